"""Large: rollouts of the size that inspectors must stand, made up but shaped like real ones.

`row(tokens, calls)` is a token frame whose calls carry tool output and sample a third of their tokens; `tree(nodes)` a
calls frame; `vocabulary()` has as many entries as the ids reach. Everything from a fixed seed.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
import polars as pl

from workbench.runs.vocabulary import Vocabulary

WORDS = 40_000
START, END = WORDS, WORDS + 1


@cache
def vocabulary() -> Vocabulary:
    """Pieces of one to nine bytes, some of them halves of characters, and two turn marks."""
    rng = np.random.default_rng(1)
    letters = np.array(list("etaoinshrdlu"))
    pieces = {i: (" " + "".join(rng.choice(letters, 1 + i % 8))).encode() for i in range(WORDS)}
    pieces |= {0: "🎲".encode()[:2], 1: "🎲".encode()[2:], 2: b"\n", 3: b"user\n", 4: b"assistant\n"}
    return Vocabulary(pieces, {START: "<|im_start|>", END: "<|im_end|>"})


def row(tokens: int, calls: int, *, seed: int = 2) -> pl.DataFrame:
    """A trained row of `tokens` ids over `calls` calls, with the trainer's numbers."""
    rng = np.random.default_rng(seed)
    ids_T = (rng.zipf(1.2, tokens) % WORDS).astype(np.uint64)
    call_T = np.arange(tokens) * calls // tokens
    within_T = np.arange(tokens) - np.searchsorted(call_T, call_T)
    size = max(1, tokens // calls)
    sampled_T = within_T >= size - size // 3
    ids_T[within_T == 0], ids_T[within_T == 1] = START, 3
    ids_T[np.flatnonzero(np.diff(call_T))] = END
    ids_T[40:80:2], ids_T[41:80:2] = 0, 1
    logprob_T = np.where(sampled_T, -rng.gamma(0.7, 0.9, tokens), 0).astype(np.float32)
    delta_T = rng.normal(0, 0.03, tokens).astype(np.float32)
    return pl.DataFrame(
        {
            "rollout_id": pl.Series(["large.0.0.0"] * tokens),
            "model_call_id": pl.Series([f"{call:032x}" for call in call_T]),
            "position": pl.Series(np.arange(tokens)),
            "token_id": pl.Series(ids_T),
            "sampled": pl.Series(sampled_T),
            "logprob": pl.Series(logprob_T),
            "trainer_logprob": pl.Series(np.where(sampled_T, logprob_T + delta_T, np.nan).astype(np.float32)).fill_nan(
                None
            ),
            "delta": pl.Series(np.where(sampled_T, delta_T, np.nan).astype(np.float32)).fill_nan(None),
            "advantage": pl.Series(np.full(tokens, 0.5)),
            "weight_version": pl.Series(call_T // 50),
        }
    )


def edited(frame: pl.DataFrame, *, every: int) -> pl.DataFrame:
    """The same row with one id in `every` replaced and as many left out."""
    rng = np.random.default_rng(3)
    ids_T = frame["token_id"].to_numpy().copy()
    ids_T[rng.choice(ids_T.size, ids_T.size // every, replace=False)] = 7
    keep = np.ones(ids_T.size, dtype=bool)
    keep[rng.choice(ids_T.size, ids_T.size // every, replace=False)] = False
    return frame.with_columns(pl.Series("token_id", ids_T)).filter(pl.Series(keep))


def tree(nodes: int, shape: Literal["chain", "star", "bush"]) -> pl.DataFrame:
    """The calls of one rollout: one long chain, siblings of one root, or a chain that forks now and then."""
    rng = np.random.default_rng(4)
    parent = {
        "chain": np.arange(nodes) - 1,
        "star": np.zeros(nodes, dtype=np.int64),
        "bush": np.where(rng.random(nodes) < 0.9, np.arange(nodes) - 1, rng.integers(0, np.arange(nodes) + 1) - 1),
    }[shape]
    ids = [f"{i:032x}" for i in rng.permutation(nodes)]
    return pl.DataFrame(
        {
            "rollout_id": ["large.0.0.0"] * nodes,
            "model_call_id": ids,
            "order": range(1, nodes + 1),
            "mode": ["text", *["token_in"] * (nodes - 1)],
            "parent_call_id": [None, *(ids[max(0, parent[i])] for i in range(1, nodes))],
            "near_call_id": pl.Series([None] * nodes, dtype=pl.String),
            "delta_len": rng.integers(20, 400, nodes),
            "cum_len": np.arange(1, nodes + 1) * 200,
            "sampled_tokens": rng.integers(1, 20, nodes),
            "weight_version": np.arange(nodes) // 500,
            "finish_reason": ["stop"] * nodes,
            "digest": [f"{rng.integers(2**62):064x}" for _ in range(nodes)],
            "relation": ["chain" if i < nodes // 2 and parent[i] == i - 1 else "branch" for i in range(nodes)],
            "failure_reason": pl.Series([None] * nodes, dtype=pl.String),
            "detail": pl.Series([None] * nodes, dtype=pl.String),
        }
    )
