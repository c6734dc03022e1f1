"""Text: ids stay countable, characters are whole, bytes that are none are shown as bytes."""

from __future__ import annotations

import random

import numpy as np
from stored_run import END, START, VOCABULARY, encode

from workbench.inspect.roles import NAMES, roles_of
from workbench.inspect.text import pieces_of, visible


def shown(ids: list[int]) -> list[str]:
    return [piece.shown for piece in pieces_of(ids, VOCABULARY)]


def test_a_character_split_over_four_ids_is_one_piece_covering_all_four():
    pieces = pieces_of(encode("a🎲b"), VOCABULARY)
    assert [(p.start, p.stop, p.shown) for p in pieces] == [(0, 1, "a"), (1, 5, "🎲"), (5, 6, "b")]


def test_bytes_that_are_no_character_are_shown_as_bytes_and_never_replaced():
    assert shown([0xE2, 0x96, 0x41]) == ["⟨E2⟩", "⟨96⟩", "A"]
    assert shown([0xFF]) == ["⟨FF⟩"]
    assert "\ufffd" not in "".join(shown(list(range(256))))


def test_a_replacement_character_that_was_recorded_is_named_and_not_taken_for_unreadable_bytes():
    assert [(p.stop, p.kind, p.shown) for p in pieces_of(encode("\ufffd"), VOCABULARY)] == [(3, "text", "⟨U+FFFD⟩")]


def test_special_tokens_are_named_and_not_joined():
    assert shown([0xF0, START, 0x9F, END]) == ["⟨F0⟩", "<|im_start|>", "⟨9F⟩", "<|im_end|>"]


def test_a_literal_marker_in_the_text_is_not_the_special_token():
    pieces = pieces_of(list(b"<|im_end|>"), VOCABULARY)
    assert {p.kind for p in pieces} == {"text"} and len(pieces) == 10


def test_unknown_ids_are_shown_as_ids():
    assert shown([65, 2**64 - 1]) == ["A", f"⟨id {2**64 - 1}⟩"]


def test_control_characters_are_visible():
    assert visible("a\n\t\x07") == "a↵⇥⟨U+0007⟩" and visible("") == "∅"


def test_pieces_cover_every_id_once_in_order():
    rng = random.Random(2)
    for _ in range(200):
        ids = [rng.choice([*range(258), 999]) for _ in range(40)]
        pieces = pieces_of(ids, VOCABULARY)
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces[:-1])] and pieces[-1].stop == 40


def test_roles_are_told_by_turn_marks_alone_and_unknown_names_have_none():
    plain = roles_of(np.array(encode("no marks"), dtype=np.uint64), VOCABULARY)
    assert not plain.known and not plain.role.any()
    # An end mark, another special token and a start mark: the turn ended. An unknown id ends a name.
    ids = [START, *encode("user\nhi"), END, END, START, 999_999, END]
    roles = roles_of(np.array(ids, dtype=np.uint64), VOCABULARY)
    assert roles.known and NAMES[int(roles.role[1])] == "user"
    assert int(roles.role[-1]) == 0
