"""Routes: the experts of every token of a row, put together from what each call of its chain staged.

    chain links + fragments ──plan──▶ RoutePlan (spans, dims, digests) ──fill──▶ [tokens, layers, topk]; -1: unknown

A link's fragment covers its whole delta (`full`), its end with the generated tokens at least (`tail`), or nothing that
can be used (`sentinel`, with the reason). A plan holds no routes: in direct mode they are filled in beside it and ride
in the row, in deferred mode whoever consumes the row fetches the fragments then.
Invariants: a plan's spans tile its row, root first; a fragment is only ever read where its call's extras give the
digest that was committed; both modes give the same array.
Coverage is counted over positions whose logits enter the loss: those before a sampled token.
Not here: whether the extras are the committed ones (verdicts), forcing a model to take the routes (train.replay).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.errors import WireError
from workbench.finalizer.verify import LinearizedRow
from workbench.wire import Cause, StagedCall, classify_route_span, decode_routes
from workbench.wire.extras import ROUTED_EXPERTS
from workbench.wire.routes import LEGACY_DTYPE, NO_ROUTE


@dataclass(frozen=True)
class RouteSettings:
    """How a run's rows get their routes."""

    mode: Literal["direct", "deferred"]
    """`direct`: filled in by the finalizer; `deferred`: by the trainer, from the run store."""
    missing: Literal["sentinel", "reject"] = "sentinel"
    """A call of a chain without usable routes: sentinels, or the rollout loses its vote."""


@dataclass(frozen=True)
class RouteDims:
    """Shape of one token's routes and their dtype on the wire; the same for every row of a run."""

    layers: int
    topk: int
    dtype: str


@dataclass(frozen=True)
class RouteSpan:
    """One link of a chain: its call, where its delta begins in the row, carry and generated tokens, rows staged, how
    they cover it, and why they cannot be used (None: they can)."""

    call_id: str
    start: int
    carry: int
    generated: int
    staged: int
    kind: str
    fault: str | None
    extras_digest: str

    @property
    def end(self) -> int:
        return self.start + self.carry + self.generated

    @property
    def known(self) -> slice:
        """Row positions that the fragment's last rows are of."""
        if self.kind == "sentinel":
            return slice(self.end, self.end)
        return slice(max(self.start, self.end - self.staged), self.end)


@dataclass(frozen=True)
class RoutePlan:
    """What fills a row's routes; a placeholder's has no span."""

    dims: RouteDims
    spans: list[RouteSpan]

    def as_json(self) -> dict[str, Any]:
        """JSON-like; `of` reads it back."""
        return {"dims": _values(self.dims), "spans": [_values(span) for span in self.spans]}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> RoutePlan:
        """Raises KeyError, TypeError or ValueError for what is no plan."""
        dims = RouteDims(*value["dims"])
        if dims.dtype not in ("int8", "int16", "int32") or not (dims.layers > 0 and dims.topk > 0):
            raise ValueError(f"no dims of routes: {dims}")
        return cls(dims, [RouteSpan(*span) for span in value["spans"]])

    @property
    def faults(self) -> list[RouteSpan]:
        """The links whose routes cannot be used."""
        return [span for span in self.spans if span.fault is not None]


def _values(record: Any) -> list[Any]:
    return [getattr(record, name) for name in record.__dataclass_fields__]


def fragment_of(extras: Mapping[str, Any] | None) -> np.ndarray | None:
    """A call's staged routes [tokens, layers, topk] from its extras; None without any. Raises WireError."""
    payload = (extras or {}).get(ROUTED_EXPERTS)
    if payload is None:
        return None
    routes = decode_routes(payload)
    if routes.dtype != LEGACY_DTYPE:
        return routes.values
    return routes.values.astype(np.int32)


def dims_of(calls: Iterable[StagedCall]) -> RouteDims | None:
    """The dims that the first readable fragment of `calls` says; None where there is none."""
    for call in calls:
        try:
            values = fragment_of(call.extras)
        except WireError:
            continue
        if values is not None:
            return RouteDims(values.shape[1], values.shape[2], values.dtype.name)
    return None


def plan_routes(row: LinearizedRow, calls: Iterable[StagedCall], dims: RouteDims) -> RoutePlan:
    """The plan of a verified row; `calls` holds the staged calls of its chain, extras checked."""
    extras = {call.model_call_id: call.extras for call in calls}
    digests = dict(row.extras_commitments)
    spans: list[RouteSpan] = []
    start = 0
    for call_id, carry, generated in row.link_spans:
        staged, kind, fault = _judge(extras.get(call_id), carry, generated, dims)
        why = fault.value if fault else None
        spans.append(RouteSpan(call_id, start, carry, generated, staged, kind, why, digests[call_id]))
        start += carry + generated
    return RoutePlan(dims, spans)


def _judge(
    extras: Mapping[str, Any] | None, carry: int, generated: int, dims: RouteDims
) -> tuple[int, str, Cause | None]:
    try:
        values = fragment_of(extras)
    except WireError:
        return 0, "sentinel", Cause.ROUTE_LENGTH_MISMATCH
    if values is None:
        return 0, "sentinel", Cause.ROUTE_MISSING
    staged = len(values)
    limit = np.iinfo(dims.dtype).max
    if values.shape[1:] != (dims.layers, dims.topk) or int(values.max()) > limit or int(values.min()) < NO_ROUTE:
        return staged, "sentinel", Cause.ROUTE_LENGTH_MISMATCH
    kind = classify_route_span(carry, generated, staged)
    return staged, kind, Cause.ROUTE_LENGTH_MISMATCH if kind == "sentinel" else None


def fill_routes(plan: RoutePlan, tokens: int, fragments: Mapping[str, np.ndarray | None]) -> np.ndarray:
    """Routes [tokens, layers, topk] of a row in the plan's dtype; `fragments` by call id, checked when read."""
    dims = plan.dims
    values = np.full((tokens, dims.layers, dims.topk), NO_ROUTE, dtype=dims.dtype)
    for span in plan.spans:
        fragment = fragments.get(span.call_id)
        known = span.known
        if fragment is not None and known.stop > known.start:
            values[known] = fragment[len(fragment) - (known.stop - known.start) :]
    return values


def loss_positions(token_mask: np.ndarray) -> np.ndarray:
    """(T,) bool: positions whose logits enter the loss, the ones before a sampled token."""
    before_T = np.zeros(len(token_mask), dtype=bool)
    before_T[:-1] = np.asarray(token_mask[1:], dtype=bool)
    return before_T


def known_positions(routes: np.ndarray, layers: Sequence[int] | None = None) -> np.ndarray:
    """(T,) bool: positions whose whole route is known in each of `layers`; None: those with a route anywhere, because a
    layer without experts has none."""
    known_TLK = np.asarray(routes) >= 0
    own = np.flatnonzero(known_TLK.any(axis=(0, 2))) if layers is None else np.asarray(layers, dtype=np.int64)
    whole_TL = np.asarray(known_TLK.all(axis=2))
    return np.asarray(whole_TL[:, own].all(axis=1) & (own.size > 0))


def route_counts(plan: RoutePlan, routes: np.ndarray, token_mask: np.ndarray) -> Counter[str]:
    """What the metrics add up of one row: `spans_<kind>`, `positions` (in the loss), `covered` of them, `tokens`, and
    `sentinels`, the tokens without a route."""
    positions_T, known_T = loss_positions(token_mask), known_positions(routes)
    counts = Counter({f"spans_{kind}": 0 for kind in ("full", "tail", "sentinel")})
    counts.update(f"spans_{span.kind}" for span in plan.spans)
    counts.update(
        positions=int(positions_T.sum()),
        covered=int((positions_T & known_T).sum()),
        tokens=len(known_T),
        sentinels=int((~known_T).sum()),
    )
    return counts


def fragments_of(calls: Sequence[StagedCall]) -> dict[str, np.ndarray | None]:
    """Readable fragments by call id, of calls whose extras were checked."""
    found: dict[str, np.ndarray | None] = {}
    for call in calls:
        try:
            found[call.model_call_id] = fragment_of(call.extras)
        except WireError:
            found[call.model_call_id] = None
    return found
