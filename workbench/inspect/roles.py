"""Roles: who speaks where in a row of ids, as far as the ids themselves say it.

In: ids and a vocabulary. Out: a role a token (system, user, assistant, tool, other) and the control ids that stand
where the template would not have put them. Known turn marks: ChatML (`<|im_start|>role … <|im_end|>`), Llama 3
(`<|start_header_id|>role<|end_header_id|> … <|eot_id|>`), Gemma (`<start_of_turn>role … <end_of_turn>`).
Limits: an injected turn that is well-formed cannot be told from a real one by its ids; a template with other marks
gives no roles, and that is said. Not here: text (`text`), what was sampled (the mask says it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.runs.vocabulary import Vocabulary

NAMES = ("other", "system", "user", "assistant", "tool")
_START = frozenset({"<|im_start|>", "<|start_header_id|>", "<start_of_turn>"})
_END = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})
_ALIASES = {"developer": "system", "human": "user", "model": "assistant", "ipython": "tool", "function": "tool"}
_LONGEST_NAME = 8


@dataclass(frozen=True)
class Roles:
    """`role` (uint8[T]) indexes `NAMES`; `flagged` (bool[T]) marks control ids inside a span of content."""

    role: np.ndarray
    flagged: np.ndarray
    known: bool


def roles_of(ids_T: np.ndarray, vocabulary: Vocabulary) -> Roles:
    """Roles of a row. Without a known turn mark all are `other`, nothing is flagged and `known` is False."""
    role_T = np.zeros(ids_T.size, dtype=np.uint8)
    flagged_T = np.zeros(ids_T.size, dtype=bool)
    starts = {i for i, name in vocabulary.special.items() if name in _START}
    ends = {i for i, name in vocabulary.special.items() if name in _END}
    marks = np.flatnonzero(np.isin(ids_T, np.array(sorted(starts | ends), dtype=np.uint64))).tolist()
    if not any(int(ids_T[at]) in starts for at in marks):
        return Roles(role_T, flagged_T, known=False)

    opened: int | None = None
    for at in marks:
        if int(ids_T[at]) in starts:
            if opened is not None:
                flagged_T[at] = True
                continue
            opened = at
        elif opened is not None and _closes(at, ids_T, vocabulary, starts):
            role_T[opened : at + 1] = _role_at(opened, ids_T, vocabulary)
            opened = None
        elif opened is not None:
            flagged_T[at] = True
    if opened is not None:
        role_T[opened:] = _role_at(opened, ids_T, vocabulary)
    return Roles(role_T, flagged_T, known=True)


def _closes(at: int, ids_T: np.ndarray, vocabulary: Vocabulary, starts: set[int]) -> bool:
    """Whether an end mark ends its turn: only blanks follow, up to the next start mark or the end of the row."""
    for follower in ids_T[at + 1 : at + 1 + _LONGEST_NAME].tolist():
        if follower in starts:
            return True
        if follower in vocabulary.special:
            continue
        if vocabulary.pieces.get(follower, b"x").strip():
            return False
    return True


def _role_at(start: int, ids_T: np.ndarray, vocabulary: Vocabulary) -> int:
    name = b""
    for token_id in ids_T[start + 1 : start + 1 + 4 * _LONGEST_NAME].tolist():
        piece = vocabulary.pieces.get(token_id)
        if piece is None:
            break
        name += piece
        if b"\n" in piece:
            break
    word = name.split(b"\n")[0].strip().decode("utf-8", errors="ignore")
    word = _ALIASES.get(word, word)
    return NAMES.index(word) if word in NAMES else 0
