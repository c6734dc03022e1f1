"""Spans: what the digested extras of a chain's calls say about each stretch of the row: weights and sampling settings.

    version_spans   [call, start, end, version] over row positions; a call that straddled a weight update has several
    sampling        one mapping a call: temperature, top_p, top_k, min_p, logprobs_mode; {} where its extras don't say

In: a verified row and its staged calls. Invariant: the spans of a row tile it, root first; a call without
`weight_spans` has one, with the version at its admission. Carried tokens count to the call's first span.
Not here: whether the extras are the ones that were committed (verdicts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.errors import ReceiptRejected
from workbench.finalizer.verify import LinearizedRow
from workbench.wire import Cause, StagedCall
from workbench.wire.extras import SAMPLING, WEIGHT_SPANS

_SETTINGS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), (int, float)),
    "logprobs_mode": (str,),
}


def version_spans(row: LinearizedRow, calls: Iterable[StagedCall]) -> list[tuple[str, int, int, int]]:
    """The row's weight version spans. Raises ReceiptRejected where a call's own spans do not tile its generation."""
    extras = {call.model_call_id: call.extras or {} for call in calls}
    out: list[tuple[str, int, int, int]] = []
    for (call_id, start, end, version), (_, carry, generated) in zip(
        row.weight_version_spans, row.link_spans, strict=True
    ):
        own = extras.get(call_id, {}).get(WEIGHT_SPANS)
        if own is None:
            out.append((call_id, start, end, version))
            continue
        _check_tiling(call_id, own, generated)
        first = start + carry
        out += [(call_id, start if at == 0 else first + at, first + to, of) for at, to, of in own if to > at]
    return out


def sampling_of(row: LinearizedRow, calls: Iterable[StagedCall]) -> list[dict[str, Any]]:
    """How each call of the chain was sampled, root first."""
    extras = {call.model_call_id: call.extras for call in calls}
    return [settings_of(extras.get(call_id)) for call_id in row.model_call_ids]


def settings_of(extras: Mapping[str, Any] | None) -> dict[str, Any]:
    """How one call was sampled, from its extras. What another writer put there under these names is left out."""
    said = (extras or {}).get(SAMPLING)
    if not isinstance(said, Mapping):
        return {}
    return {name: said[name] for name, types in _SETTINGS.items() if type(said.get(name)) in types}


def _check_tiling(call_id: str, spans: Any, generated: int) -> None:
    end = 0
    try:
        for at, to, version in spans:
            if not (type(at) is type(to) is type(version) is int) or at != end or to < at or version < 0:
                raise ValueError
            end = to
        if end != generated:
            raise ValueError
    except (TypeError, ValueError):
        detail = f"its weight_spans {spans!r} do not tile its {generated} generated tokens"
        raise ReceiptRejected(Cause.INVALID_SNAPSHOT, call_id=call_id, detail=detail) from None
