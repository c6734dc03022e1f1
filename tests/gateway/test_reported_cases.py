"""Faults that people reported of other projects, played against this one; each test names the report it is from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger.speech import commit
from tellers import Items, Teller

from conftest import Stack, follow, say
from workbench.finalizer.verify import verify_and_linearize
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.wire import Cause

R = "run.0.0.0"
ASK = [{"role": "user", "content": "say something"}]
TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
on_stack = pytest.mark.asyncio(loop_scope="module")


def recorded(tmp_path: Path, say: Teller, answer: Items) -> LedgerStore:
    """A ledger with one call that asked something and got `answer`."""
    store = LedgerStore(tmp_path)
    served = say.dialect.response_items(say.served(answer))
    commit(store, R, "c0", say.request_items(say.user("q")), served, dialect=say.name)
    return store


def parent_of(store: LedgerStore, say: Teller, answer: Items) -> tuple[str | None, Cause | None]:
    """What a request with this answer in its history resolves to, and why it does not."""
    admitted = store.admit(R, say.request_items(say.user("q") + answer + say.user("more")), "c9", dialect=say.name)
    assert admitted.resolution.status != "root"
    return admitted.resolution.parent, admitted.drift and admitted.drift.cause


def test_two_id_sequences_of_the_same_text_are_never_merged(tmp_path: Path) -> None:
    """rLLM #272: different ids that decode to one text are two calls, and a continuation of that text is neither's."""
    say = Teller("chat")
    store = recorded(tmp_path, say, say.model("hello"))
    commit(store, R, "c1", say.request_items(say.user("q")), say.model("hello"))
    assert parent_of(store, say, say.model("hello")) == (None, Cause.DUPLICATE_OUTPUT)
    assert len(store.manifest(R).records) == 2


def test_reasoning_that_the_server_returned_apart_need_not_come_back(tmp_path: Path) -> None:
    """verl #6854, #3720: with reasoning in a field or an item of its own, an echo of the answer alone resolves."""
    say = Teller("responses")
    store = recorded(tmp_path / "responses", say, say.model("A", thinking="R"))
    assert parent_of(store, say, say.model("A")) == ("c0", None)
    say = Teller("chat")
    apart = [{**say.model("A")[0], "reasoning_content": "R"}]
    store = recorded(tmp_path / "chat", say, apart)
    assert parent_of(store, say, say.model("A")) == ("c0", None)


@pytest.mark.parametrize("name", ["chat", "responses"])
@pytest.mark.parametrize(
    ("served", "came", "cause"),
    [
        ('{"a":1}', '{"a": 1}', None),
        ('{"a":1,"b":[2]}', '{"b": [2], "a": 1}', None),
        ('{"a":1}', '{"a":2}', Cause.HISTORY_EDITED),
        ("", "{}", Cause.TOOL_CALL_RESERIALISED),
    ],
)
def test_tool_arguments_in_another_spelling(
    name: str, served: str, came: str, cause: Cause | None, tmp_path: Path
) -> None:
    """smg #1836: spacing and order of keys are no difference, a value is, and nothing becomes a root."""
    say = Teller(name)
    store = recorded(tmp_path, say, say.model(None, [("c1", served)]))
    assert parent_of(store, say, say.model(None, [("c1", came)])) == ("c0" if cause is None else None, cause)


async def row_of(stack: Stack, rollout_id: str, response: dict[str, Any]) -> Any:
    manifest = await stack.control.manifest(rollout_id)
    receipt = assemble_receipt(manifest, rollout_id=rollout_id, reward=1.0, response=response)
    calls = await stack.sink.fetch([record.staging_key for record in receipt.manifest])
    return verify_and_linearize(receipt, calls)  # type: ignore[arg-type]


@on_stack
async def test_a_streamed_tool_call_has_as_many_ids_as_its_usage_says(stack: Stack) -> None:
    """vLLM #27482, #29074: a tool parser holds chunks back; captured ids are the engine's all the same."""
    agent = stack.agent("case.tools.stream")
    asked: Any = {"model": "policy", "messages": ASK, "tools": TOOLS, "stream_options": {"include_usage": True}}
    async with agent.chat.completions.stream(**asked) as events:
        answer = await events.get_final_completion()
    (record,) = (await stack.control.manifest("case.tools.stream")).records
    (row,) = await stack.sink.fetch([record.staging_key])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == int(np.count_nonzero(row.token_mask_delta))  # type: ignore[union-attr]


@on_stack
async def test_a_turn_cut_by_length_says_so_as_far_as_the_row(stack: Stack) -> None:
    """OpenRLHF #1327, TRL #4976: turn 2 of 3 ends by length; the record says so and the chain goes on."""
    agent = stack.agent("case.length")
    first = await say(agent, ASK)
    second = await say(agent, follow(ASK, first), max_tokens=1)
    assert second["choices"][0]["finish_reason"] == "length"
    third = await say(agent, follow(follow(ASK, first), second))
    row = await row_of(stack, "case.length", third)
    assert len(row.model_call_ids) == 3 and row.link_spans[1][2] == 1
    keys = [record.staging_key for record in (await stack.control.manifest("case.length")).records]
    cuts = [call.extras["truncated"] for call in await stack.sink.fetch(keys)]  # type: ignore[union-attr,index]
    assert cuts == [False, True, False]


@on_stack
async def test_of_a_declared_compaction_only_the_new_trace_trains(stack: Stack) -> None:
    """NeMo RL #3910: after a declared compaction the row is the terminal's own trace, the old one is shown only."""
    agent = stack.agent("case.compact")
    first = await say(agent, ASK)
    second = await say(agent, follow(ASK, first))
    short = [{"role": "user", "content": "in short: we spoke"}]
    third = await say(agent, short, extra_headers={"x-workbench-compaction": second["id"]})
    fourth = await say(agent, follow(short, third))
    row = await row_of(stack, "case.compact", fourth)
    records = (await stack.control.manifest("case.compact")).records
    assert row.model_call_ids == [record.model_call_id for record in records[2:]]


@on_stack
async def test_of_a_retried_call_the_one_that_was_continued_is_on_the_chain(stack: Stack) -> None:
    """The same request twice with other tokens, then a call that continues the second: the first is a dead sibling."""
    agent = stack.agent("case.retry")
    first = await say(agent, ASK)
    one, other = [await say(agent, follow(ASK, first)) for _ in range(2)]
    records = (await stack.control.manifest("case.retry")).records
    alone = assemble_receipt(await stack.control.manifest("case.retry"), rollout_id="case.retry", reward=1.0)
    assert alone.failure_reason == "ambiguous_terminal"
    assert (await row_of(stack, "case.retry", one)).model_call_ids[-1] == records[1].model_call_id
    last = await say(agent, follow(follow(ASK, first), other))
    row = await row_of(stack, "case.retry", last)
    assert row.model_call_ids == [records[0].model_call_id, records[2].model_call_id, row.model_call_ids[-1]]
