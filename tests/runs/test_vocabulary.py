"""Vocabulary: bytes behind ids, from the tokenizers there are."""

from __future__ import annotations

import orjson
import pytest

from workbench.errors import RunStoreError
from workbench.runs import load_vocabulary


def test_byte_level_pieces_are_bytes(tmp_path):
    tree = {
        "model": {"vocab": {"Ġhello": 0, "Ċ": 1, "ðŁ": 2, "İ²": 3, "<|end|>": 4, "日": 5}},
        "added_tokens": [{"id": 4, "content": "<|end|>", "special": True}],
        "decoder": {"type": "ByteLevel"},
    }
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(tree))
    vocabulary = load_vocabulary(tmp_path / "tokenizer.json")
    assert vocabulary.pieces == {0: b" hello", 1: b"\n", 2: b"\xf0\x9f", 3: b"\x8e\xb2", 5: "日".encode()}
    assert (vocabulary.pieces[2] + vocabulary.pieces[3]).decode() == "🎲"
    assert vocabulary.special == {4: "<|end|>"}


def test_byte_fallback_pieces_are_bytes(tmp_path):
    tree = {"model": {"vocab": [["<0x0A>", 0.0], ["▁a", -1.0]]}, "added_tokens": [], "decoder": {"type": "Metaspace"}}
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(tree))
    assert load_vocabulary(tmp_path / "tokenizer.json").pieces == {0: b"\n", 1: b" a"}


def test_a_trimmed_vocabulary_comes_back(tmp_path):
    tree = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9, "content": "<s>", "special": True}]}
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(tree))
    small = load_vocabulary(tmp_path / "tokenizer.json").only([1, 9, 1])
    (tmp_path / "vocabulary.json").write_bytes(small.dump())
    assert load_vocabulary(tmp_path / "vocabulary.json") == small
    assert small.pieces == {1: b"b"} and small.special == {9: "<s>"}


def test_a_file_that_is_no_vocabulary_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(RunStoreError, match=r"tokenizer.json holds no vocabulary"):
        load_vocabulary(tmp_path / "tokenizer.json")
