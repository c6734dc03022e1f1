"""Drift: why a request continues no recorded call.

In: the item digests of the calls that were served, the request's items. Out: one cause, the call that the request
nearly continues, the first item in which they part, and the place in that item: what stood there, what came.
The nearest call is the one that shares the longest run of leading items, then the most items at all, then the latest.
Not here: whether the request resolves (resolve); the place in an item (differences); the first differing token, which
takes the tokens that a ledger never sees (`workbench.runs.drift`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.ledger.differences import Difference, first_difference
from workbench.ledger.items import CallItems, ItemDigest
from workbench.ledger.relatives import history, shared_items
from workbench.wire import Cause
from workbench.wire.fingerprints import REQUEST_ENVELOPE_ROLE


@dataclass(frozen=True)
class Drift:
    """A diagnosis. `position` is the index, from 0, of the first differing one of the request's messages or input items
    (None for its tools or instructions), `nearest_call` the recorded call it was held against, `difference` where in
    that item and what; None where there is none."""

    cause: Cause
    nearest_call: str | None
    position: int | None
    detail: str
    difference: Difference | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause.value,
            "nearest_call": self.nearest_call,
            "position": self.position,
            "detail": self.detail,
            **({} if self.difference is None else asdict(self.difference)),
        }


def diagnose_drift(
    recorded: Sequence[CallItems],
    request_items: Sequence[Any],
    *,
    dialect: str = "chat",
    prompt_options: str | None = None,
    candidates: Sequence[str] = (),
    in_custody: Collection[str] = (),
) -> Drift:
    """Say why `request_items` continue none of `recorded`. Never raises for odd items.

    `candidates` are the calls that did match where they were several; `prompt_options` is the digest of the request's
    template arguments (`options_digest`); `in_custody` holds the calls whose tokens are.
    """
    if candidates:
        return Drift(
            Cause.DUPLICATE_OUTPUT,
            candidates[0],
            None,
            f"{len(candidates)} recorded calls with different tokens answer to this history: {', '.join(candidates)}",
        )
    came = [ItemDigest.of(item) for item in request_items]
    nearest = _nearest(recorded, came)
    if nearest is None:
        return Drift(Cause.UNKNOWN_HISTORY, None, None, "no recorded call shares an item with this request")
    call, expected = nearest
    position = _shared_prefix(expected, came)
    if position and came[0].role == REQUEST_ENVELOPE_ROLE:  # both have it, and nobody counts it among the messages
        expected, came, position = expected[1:], came[1:], position - 1
    if position == len(expected):
        cause, detail = _after_whole_history(call, came, position, prompt_options, in_custody)
    else:
        cause, detail = _compare(call, expected, came, position, dialect)
    here = [items[position].role for items in (expected, came) if position < len(items)]
    in_envelope = REQUEST_ENVELOPE_ROLE in here
    difference = None
    if position < len(expected) and (not in_envelope or here == [REQUEST_ENVELOPE_ROLE] * 2):
        difference = first_difference(expected[position], came[position] if position < len(came) else None)
    if difference is not None:
        detail = f"{detail}; {difference}"
    return Drift(cause, call.model_call_id, None if in_envelope else position, detail, difference)


def _item(position: int) -> str:
    return f"item {position} (from 0)"


def _nearest(recorded: Sequence[CallItems], came: list[ItemDigest]) -> tuple[CallItems, list[ItemDigest]] | None:
    ranks = shared_items(recorded, [item.digest for item in came])
    best = max(
        (order for order, (_, shared) in enumerate(ranks) if shared),
        key=lambda order: (*ranks[order], order),
        default=None,
    )
    return None if best is None else (recorded[best], history(recorded, best))


def _shared_prefix(expected: list[ItemDigest], came: list[ItemDigest]) -> int:
    for position, (one, other) in enumerate(zip(expected, came, strict=False)):
        if one.digest != other.digest:
            return position
    return min(len(expected), len(came))


def _compare(
    call: CallItems,
    expected: list[ItemDigest],
    came: list[ItemDigest],
    position: int,
    dialect: str,
) -> tuple[Cause, str]:
    was, now = expected[position], came[position] if position < len(came) else None
    if call.dialect != dialect:
        return Cause.DIALECT_CHANGED, f"the recorded call spoke {call.dialect}, this request speaks {dialect}"
    if REQUEST_ENVELOPE_ROLE in (was.role, now.role if now else ""):
        return Cause.TOOLS_CHANGED, "the request's tools or instructions differ from those of the recorded call"
    if was.role == "reasoning" and now is not None and now.role != "reasoning":
        return Cause.TEMPLATE_STRIPPED_REASONING, f"{_item(position)}: the recorded reasoning item is gone"
    if was.role == "function_call" and now is not None and _after_calls(expected, position, now):
        return Cause.TOOL_CALL_DROPPED, f"{_item(position)}: a recorded tool call did not come back"
    if now is not None and was.authored and now.authored:
        return _compare_turns(was, now, position)
    if sum(item.authored for item in came) < sum(item.authored for item in expected):
        return (
            Cause.CONTEXT_COMPACTED,
            f"{_item(position)}: the request has {len(came)} items, the recorded history {len(expected)}",
        )
    return Cause.HISTORY_EDITED, f"{_item(position)}: a {was.role or 'nameless'} item was changed"


def _after_whole_history(
    call: CallItems,
    came: list[ItemDigest],
    position: int,
    prompt_options: str | None,
    in_custody: Collection[str],
) -> tuple[Cause, str]:
    for later in range(position, len(came)):
        if came[later].authored:
            return Cause.UNKNOWN_HISTORY, f"{_item(later)}: a model-authored item that no recorded call produced"
    if call.prompt_options != prompt_options:
        return (
            Cause.TOOLS_CHANGED,
            "template arguments or response format differ from the recorded call's",
        )
    if call.model_call_id not in in_custody:
        return Cause.UNKNOWN_HISTORY, "it continues a call that was served but has no tokens in custody"
    if not any(item.authored for item in call.items[call.response_at :]):
        return Cause.UNKNOWN_HISTORY, "the engine returned no item for the call before it, so its turn is not in it"
    return Cause.UNKNOWN_HISTORY, "it names another response than the one whose conversation it holds"


def _after_calls(expected: list[ItemDigest], position: int, now: ItemDigest) -> bool:
    """Whether `now` is the recorded item that stands behind the tool calls (and their results) from `position` on."""
    for item in expected[position:]:
        if item.digest == now.digest:
            return True
        if item.role not in ("function_call", "function_call_output"):
            return False
    # The calls ended the recorded answer; whatever came then is new.
    return not now.authored


def _compare_turns(was: ItemDigest, now: ItemDigest, position: int) -> tuple[Cause, str]:
    if len(now.tools) < len(was.tools):
        return (
            Cause.TOOL_CALL_DROPPED,
            f"{_item(position)}: {len(was.tools)} tool calls were recorded, {len(now.tools)} came back",
        )
    if len(now.tools) > len(was.tools):
        if now.role == "function_call":
            return (
                Cause.ASSISTANT_TEXT_CHANGED,
                f"{_item(position)}: the text before a tool call did not come back",
            )
        return Cause.HISTORY_EDITED, f"{_item(position)}: a tool call that was not recorded came with the turn"
    if was.tools != now.tools:
        if [(tool.name, tool.lenient) for tool in was.tools] == [(tool.name, tool.lenient) for tool in now.tools]:
            how = []
            if [tool.call_id for tool in was.tools] != [tool.call_id for tool in now.tools]:
                how.append("under another id")
            if [tool.exact for tool in was.tools] != [tool.exact for tool in now.tools]:
                how.append("with its arguments spelled otherwise (their values are the same)")
            what = f"a tool call came back {' and '.join(how)}"
            return Cause.TOOL_CALL_RESERIALISED, f"{_item(position)}: {what}{_and_text(was, now)}"
        moved = sorted(was.tools) == sorted(now.tools)
        what = "its tool calls came back in another order" if moved else "arguments or name of a tool call were changed"
        return Cause.HISTORY_EDITED, f"{_item(position)}: {what}{_and_text(was, now)}"
    if now.thinking < was.thinking and now.bare == was.bare:
        return Cause.TEMPLATE_STRIPPED_REASONING, f"{_item(position)}: the answer came back without its thinking"
    if was.text == now.text:
        return (
            Cause.ASSISTANT_TEXT_CHANGED,
            f"{_item(position)}: a model turn's text came back the same, its parts did not",
        )
    return Cause.ASSISTANT_TEXT_CHANGED, f"{_item(position)}: the text of a model turn came back changed"


def _and_text(was: ItemDigest, now: ItemDigest) -> str:
    return "" if was.text == now.text else ", and the text of its turn was changed too"
