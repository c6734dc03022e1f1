"""Text: token ids as they can be shown, without ever losing which id made what.

In: ids and a vocabulary. Out: pieces in order, each covering one or more consecutive ids. An id whose bytes are only a
part of a character is joined with its siblings; bytes that are no UTF-8 even then are shown as `⟨E2 96⟩`, never as
U+FFFD. Invariant: the pieces cover every id exactly once, in order.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from workbench.runs.vocabulary import Vocabulary

Kind = Literal["text", "special", "bytes", "unknown"]
# U+FFFD is what other tools show for bytes that they could not read; one that was really recorded is named.
_CONTROL = {ord("\n"): "↵", ord("\t"): "⇥", ord("\r"): "␍", 0x00A0: "⍽", 0xFFFD: "⟨U+FFFD⟩"}
_MAX_JOIN = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """`ids[start:stop]` of the input; `shown` is what a reader sees, control characters made visible."""

    start: int
    stop: int
    kind: Kind
    shown: str
    breaks: bool = False


def pieces_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> list[Piece]:
    """The pieces of `token_ids`, in order. A character is at most four bytes, so at most four ids are joined."""
    pieces: list[Piece] = []
    i, count = 0, len(token_ids)
    while i < count:
        token_id = token_ids[i]
        if token_id in vocabulary.special:
            pieces.append(Piece(i, i + 1, "special", vocabulary.special[token_id]))
            i += 1
            continue
        if token_id not in vocabulary.pieces:
            pieces.append(Piece(i, i + 1, "unknown", f"⟨id {token_id}⟩"))
            i += 1
            continue
        raw, stop = b"", i
        while stop < count and stop - i < _MAX_JOIN and token_ids[stop] in vocabulary.pieces:
            raw += vocabulary.pieces[token_ids[stop]]
            stop += 1
            text = _decoded(raw)
            if text is not None:
                pieces.append(Piece(i, stop, "text", visible(text), breaks="\n" in text))
                break
            if not _may_continue(raw):
                pieces.append(_as_bytes(i, vocabulary.pieces[token_id]))
                stop = i + 1
                break
        else:
            pieces.append(_as_bytes(i, vocabulary.pieces[token_id]))
            stop = i + 1
        i = stop
    return pieces


class Slots(NamedTuple):
    """A whole row of T ids, D of them distinct: `ids` (uint64[D]), `slot` (index into them, [T]), `pieces` (D of them,
    each id by itself) and `joins`, the pieces that cover several ids, in order."""

    ids: np.ndarray
    slot: np.ndarray
    pieces: list[Piece]
    joins: list[Piece]


def slots_of(ids_T: np.ndarray, vocabulary: Vocabulary) -> Slots:
    """The pieces of a row (uint64[T]) as distinct ids and exceptions: the same pieces that `pieces_of` gives.

    An id that is whole characters by itself never joins, so only runs of the others are looked at one by one.
    """
    ids_D, slot_T = np.unique(ids_T, return_inverse=True)
    pieces_D = [pieces_of([token_id], vocabulary)[0] for token_id in ids_D.tolist()]
    partial_D = np.array([piece.kind == "bytes" for piece in pieces_D], dtype=bool)
    joins: list[Piece] = []
    if partial_D.any():
        partial_T = np.concatenate(([False], partial_D[slot_T], [False])).astype(np.int8)
        edges = np.flatnonzero(np.diff(partial_T)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            run = pieces_of(ids_T[start:stop].tolist(), vocabulary)
            joins += [
                Piece(start + p.start, start + p.stop, p.kind, p.shown, p.breaks) for p in run if p.stop - p.start > 1
            ]
    return Slots(ids_D, slot_T, pieces_D, joins)


def visible(text: str) -> str:
    """Text with its control characters drawn; an empty one as `∅`."""
    shown = text.translate(_CONTROL)
    return "".join(char if char.isprintable() else f"⟨U+{ord(char):04X}⟩" for char in shown) or "∅"


def _as_bytes(at: int, raw: bytes) -> Piece:
    return Piece(at, at + 1, "bytes", "⟨" + " ".join(f"{byte:02X}" for byte in raw) + "⟩")


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _may_continue(raw: bytes) -> bool:
    """Whether more bytes could still make this valid: the only fault is an unfinished character at the end."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    return True
