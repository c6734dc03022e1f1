"""Strip columns: a whole row of tokens as the live strip wants it, small enough to send at once.

In: a token frame, a vocabulary, custody. Out: (words, columns) for `live.pack`. A token is two bytes of slot (or four,
beyond 65,536 distinct ids) and one of flags; log-probs are sent of sampled tokens only; what is constant over a stretch
is sent as `[start, value]`; router agreement is a share in 254ths, 255 for none. Invariant: ids and log-probs are the
recorded ones, bit for bit; what nobody recorded is a signal with its reason, never a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from workbench.inspect.ids import call_name
from workbench.inspect.roles import NAMES, Roles, roles_of
from workbench.inspect.text import Piece, Slots, slots_of
from workbench.runs.vocabulary import Vocabulary

KINDS = {"text": 0, "special": 1, "bytes": 2, "unknown": 3}
SAMPLED, FLAGGED = 1, 2
NOT_SCORED = "the trainer has not scored these tokens"


def strip_columns(
    tokens: pl.DataFrame,
    vocabulary: Vocabulary | None,
    *,
    routes: list[list[Any]] | str,
    order_of: Mapping[str, int],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Words (JSON) and columns of a token frame; `routes` is `[start, coverage]` spans or why there are none,
    `order_of` the places of the calls in their ledger, as far as they are known."""
    ids_T = tokens["token_id"].to_numpy().astype(np.uint64)
    sampled_T = tokens["sampled"].to_numpy().astype(bool)
    slots, roles = text_of(ids_T, vocabulary)
    slot_dtype = np.uint16 if slots.ids.size < 2**16 else np.uint32
    columns: dict[str, np.ndarray] = {
        "ids": slots.ids,
        "slot": slots.slot.astype(slot_dtype),
        "flags": (sampled_T * SAMPLED + roles.flagged * FLAGGED).astype(np.uint8),
        "logprob": tokens["logprob"].to_numpy().astype(np.float32)[sampled_T],
    }
    scored = "trainer_logprob" in tokens.columns and tokens["trainer_logprob"].null_count() < tokens.height
    if scored:
        columns["trainer"] = _floats(tokens["trainer_logprob"])[sampled_T]
        columns["delta"] = _floats(tokens["delta"])[sampled_T]
    agreed = "route_agreement" in tokens.columns and tokens["route_agreement"].null_count() < tokens.height
    if agreed:
        columns["agreement"] = _in_a_byte(tokens["route_agreement"])
    advantage = tokens["advantage"] if "advantage" in tokens.columns else pl.Series([], dtype=pl.Float64)
    advantages = _runs(advantage) if advantage.drop_nulls().len() else []
    versions = _runs(tokens["weight_version"]) if tokens["weight_version"].drop_nulls().len() else []
    words = {
        "n": tokens.height,
        "texts": [piece.shown for piece in slots.pieces],
        "kinds": [KINDS[piece.kind] for piece in slots.pieces],
        "breaks": [slot for slot, piece in enumerate(slots.pieces) if piece.breaks],
        "joins": [[p.start, p.stop, p.shown, KINDS[p.kind]] for p in slots.joins],
        "calls": call_starts(tokens, order_of),
        "roles": _runs(pl.Series(roles.role)),
        "role_names": NAMES,
        "versions": versions,
        "advantages": advantages,
        "routes": routes if isinstance(routes, list) else [],
        "signals": _signals(
            _no_roles(vocabulary, roles.known), scored, bool(advantages), bool(versions), routes, agreed
        ),
        "flagged": int(roles.flagged.sum()),
        "decoded": vocabulary is not None,
    }
    return words, columns


def text_of(ids_T: np.ndarray, vocabulary: Vocabulary | None) -> tuple[Slots, Roles]:
    """Pieces and roles; without a vocabulary the ids themselves, and no roles."""
    if vocabulary is not None:
        return slots_of(ids_T, vocabulary), roles_of(ids_T, vocabulary)
    ids_D, slot_T = np.unique(ids_T, return_inverse=True)
    pieces = [Piece(0, 1, "unknown", f"{token_id} ") for token_id in ids_D.tolist()]
    nothing = Roles(np.zeros(ids_T.size, np.uint8), np.zeros(ids_T.size, bool), known=False)
    return Slots(ids_D, slot_T, pieces, []), nothing


def call_starts(tokens: pl.DataFrame, order_of: Mapping[str, int]) -> list[list[Any]]:
    """`[start, call id, name, weight version, place in the ledger or null]` of each stretch of one call, in order."""
    rollout_id = tokens["rollout_id"][0] if tokens.height else ""
    versions = tokens["weight_version"]
    return [
        [start, call, call_name(call, rollout_id, order_of), versions[start], order_of.get(call)]
        for start, call in _runs(tokens["model_call_id"])
    ]


def _no_roles(vocabulary: Vocabulary | None, known: bool) -> str | None:
    if vocabulary is None:
        return "no vocabulary is at hand"
    return None if known else "the vocabulary has no turn marks that are known here"


def _signals(
    no_roles: str | None, scored: bool, advantage: bool, version: bool, routes: list[list[Any]] | str, agreed: bool
) -> list[list[str | None]]:
    """`[key, label, reason why it is missing or null]`, in the order of the menu."""
    no_trainer = None if scored else NOT_SCORED
    return [
        ["role", "role", no_roles],
        ["mask", "mask (sampled or carried)", None],
        ["logprob", "sampler log-prob", None],
        ["trainer", "trainer log-prob", no_trainer],
        ["delta", "Δ trainer − sampler", no_trainer],
        ["ratio", "ratio exp(Δ)", no_trainer],
        ["advantage", "advantage", None if advantage else "no optimiser step has used this row"],
        ["version", "weight version", None if version else "no weight version was recorded"],
        ["route", "route coverage", routes if isinstance(routes, str) else None],
        ["agreement", "router agreement", None if agreed else "no routes were replayed in training"],
    ]


def _in_a_byte(shares: pl.Series) -> np.ndarray:
    """Shares 0 to 1 as 0 to 254, and 255 where there is none: one byte a token instead of four."""
    return (shares.cast(pl.Float32) * 254).round().fill_null(255).to_numpy().astype(np.uint8)


def _floats(series: pl.Series) -> np.ndarray:
    return series.cast(pl.Float32).fill_null(float("nan")).to_numpy()


def _runs(series: pl.Series) -> list[list[Any]]:
    """`[start, value]` of each stretch of equal values."""
    if series.is_empty():
        return []
    changes = (series.ne_missing(series.shift(1))).to_numpy().copy()
    changes[0] = True
    starts = np.flatnonzero(changes)
    return [[int(start), value] for start, value in zip(starts, series.gather(starts).to_list(), strict=True)]
