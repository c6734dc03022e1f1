"""Vocabulary: the bytes behind a token id.

In: a `tokenizer.json` (byte-level BPE or one with byte fallback), or a `vocabulary.json` that a trimmed run carries.
Out: id -> bytes, and which ids are special. Invariant: joining the bytes of consecutive ids gives the bytes of the
text; nothing here decodes a single id to text, because a character may be split over several ids.
Not here: encoding (no text is ever turned into ids outside the engine).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import orjson

from workbench.errors import RunStoreError

_BYTE_FALLBACK = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]` are the bytes of an ordinary token; `special[id]` is the name of a special one (`<|im_end|>`)."""

    pieces: dict[int, bytes]
    special: dict[int, str]

    def only(self, token_ids: Iterable[int]) -> Vocabulary:
        """The part of the vocabulary that these ids use."""
        used = set(token_ids)
        return Vocabulary(
            pieces={i: self.pieces[i] for i in sorted(used & self.pieces.keys())},
            special={i: self.special[i] for i in sorted(used & self.special.keys())},
        )

    def dump(self) -> bytes:
        """`vocabulary.json`: pieces as hexadecimal bytes, special tokens as names."""
        return orjson.dumps(
            {
                "pieces": {str(i): piece.hex() for i, piece in self.pieces.items()},
                "special": {str(i): name for i, name in self.special.items()},
            }
        )


def vocabulary_file(run_dir: Path, *, whole: bool = False) -> Path:
    """A run's own `vocabulary.json`, else the tokenizer beside the weights it published last; with `whole` the other
    way round: what is its own holds the ids that had occurred when it was written. Raises RunStoreError."""
    own = run_dir / "vocabulary.json"
    published = sorted(run_dir.glob("weights/*/tokenizer.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [*published, own] if whole else [own, *published]:
        if path.exists():
            return path
    raise RunStoreError(
        f"{run_dir} has neither vocabulary.json nor weights/*/tokenizer.json; pass a vocabulary: "
        "workbench.runs.load_vocabulary(MODEL/tokenizer.json)"
    )


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in a `vocabulary.json` or `tokenizer.json`. Raises RunStoreError for a file that is neither."""
    try:
        tree = orjson.loads(path.read_bytes())
        if not isinstance(tree, dict):
            raise TypeError("expected a JSON object")
        if "pieces" in tree:
            return Vocabulary(
                pieces={int(i): bytes.fromhex(piece) for i, piece in tree["pieces"].items()},
                special={int(i): name for i, name in tree["special"].items()},
            )
        return _from_tokenizer(tree)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunStoreError(f"{path} holds no vocabulary that can be read: {error!r}") from error


def _from_tokenizer(tree: dict) -> Vocabulary:
    added = tree.get("added_tokens") or []
    special = {token["id"]: token["content"] for token in added if token.get("special")}
    vocab = tree["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    byte_level = _mentions_byte_level(tree.get("decoder")) or _mentions_byte_level(tree.get("pre_tokenizer"))
    pieces = {int(i): _byte_level(text) if byte_level else _with_fallback(text) for text, i in pairs}
    pieces |= {token["id"]: token["content"].encode() for token in added if not token.get("special")}
    return Vocabulary({i: piece for i, piece in pieces.items() if i not in special}, special)


def _mentions_byte_level(node: object) -> bool:
    return node is not None and b'"ByteLevel"' in orjson.dumps(node)


def _gpt2_bytes() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters; this is the way back (layout: GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


_GPT2 = _gpt2_bytes()


def _byte_level(text: str) -> bytes:
    if all(char in _GPT2 for char in text):
        return bytes(_GPT2[char] for char in text)
    return text.encode()


def _with_fallback(text: str) -> bytes:
    match = _BYTE_FALLBACK.match(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()
