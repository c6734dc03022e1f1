"""Calls: exhibits that an agent or the worker brings about while the rollout runs: custody, staging, drift.

Each agent is a few lines, because most of what goes wrong out there is a few lines of somebody's agent.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from workbench.capture.staging import MemorySink
from workbench.demo.gallery.exhibit import ASK, MORE, Exhibit, Hand, Message
from workbench.wire import Cause, StagedCall, staging_key


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


SEARCH, CLOCK = _tool("search"), _tool("clock")
CALL = '<tool_call>{"name": "search", "arguments": {"query": "Rome"}}</tool_call>'
RENDERING = {"chat_template_kwargs": {"hide_answers": True}}
THINKING = ({"text": "<think>Clouds.</think>It rains."}, {"text": "Take an umbrella."})
# "It rains." in two spellings: the same text, other tokens.
_SPELT = ({"text": "It rains."}, {"token_ids": [43, 86, 223, 84, 67, 75, 80, 85, 16, 2]}, {"text": "Take an umbrella."})


class FaultySink(MemorySink):
    """Storage that fails for the rollouts that are named: `full` raises, `slow` never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.full: set[str] = set()
        self.slow: set[str] = set()

    async def stage_async(self, call: StagedCall) -> None:
        if call.rollout_id in self.full:
            raise OSError("no space left on device")
        if call.rollout_id in self.slow:
            await asyncio.Event().wait()
        await super().stage_async(call)


def _sink(hand: Hand) -> FaultySink:
    assert isinstance(hand.bench.sink, FaultySink)
    return hand.bench.sink


async def one_turn(hand: Hand) -> None:
    await hand.say(ASK)


async def silent(hand: Hand) -> None:
    return


async def overflow(hand: Hand) -> None:
    answer = await hand.say(ASK)
    try:
        await hand.bench.say(hand.rollout_id, [ASK, answer, {"role": "user", "content": "word " * 600}])
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        # An honest agent stops here; what it has stands.


async def crash(hand: Hand) -> None:
    await hand.say(ASK)
    raise ValueError("the agent's parser met something that it did not expect")


async def full_disk(hand: Hand) -> None:
    _sink(hand).full.add(hand.rollout_id)
    await hand.say(ASK)


async def slow_disk(hand: Hand) -> None:
    _sink(hand).slow.add(hand.rollout_id)
    await hand.say(ASK)


async def hiding_template(hand: Hand) -> None:
    await hand.say(ASK, await hand.say(ASK, extra_body=RENDERING), MORE, extra_body=RENDERING)


async def changed_prefix(hand: Hand) -> None:
    answer = await hand.say(ASK)
    (record,) = (await hand.bench.control.manifest(hand.rollout_id)).records
    hand.bench.sink.rows[staging_key(hand.rollout_id, record.model_call_id)]["token_ids"][3] += 1
    await hand.say(ASK, answer, MORE)


async def without_thinking(hand: Hand) -> None:
    answer = await hand.say(ASK)
    await hand.say(ASK, {**answer, "content": answer["content"].split("</think>")[1]}, MORE)


async def other_call_id(hand: Hand) -> None:
    answer = await hand.say(ASK, tools=[SEARCH])
    answer["tool_calls"][0]["id"] = "call_of_my_own"
    result = {"role": "tool", "tool_call_id": "call_of_my_own", "content": "rain"}
    await hand.say(ASK, answer, result, tools=[SEARCH])


async def dropped_call(hand: Hand) -> None:
    answer = await hand.say(ASK, tools=[SEARCH])
    kept = answer["tool_calls"][:1]
    result = {"role": "tool", "tool_call_id": kept[0]["id"], "content": "rain"}
    await hand.say(ASK, {**answer, "tool_calls": kept}, result, tools=[SEARCH])


async def other_question(hand: Hand) -> None:
    answer = await hand.say(ASK)
    await hand.say({**ASK, "content": "What is the weather in Paris?"}, answer, MORE)


async def summary(hand: Hand) -> None:
    first = await hand.say(ASK)
    second = await hand.say(ASK, first, MORE)
    shorter: Message = {"role": "user", "content": "Summary: it rains in Rome."}
    await hand.say(shorter, second, MORE)


async def other_tools(hand: Hand) -> None:
    answer = await hand.say(ASK, tools=[SEARCH])
    await hand.say(ASK, answer, MORE, tools=[SEARCH, CLOCK])


async def other_words(hand: Hand) -> None:
    answer = await hand.say(ASK)
    await hand.say(ASK, {**answer, "content": "The sun shines."}, MORE)


async def other_dialect(hand: Hand) -> None:
    answer = await hand.say(ASK, tools=[SEARCH])
    said = {"role": "assistant", "content": answer.get("content") or "It rains."}
    served = await hand.client.responses.create(model="policy", input=[ASK, said, MORE])  # type: ignore[list-item]
    hand.last = served.model_dump(mode="json", exclude_unset=True)


async def same_words_twice(hand: Hand) -> None:
    answer = await hand.say(ASK)
    assert await hand.say(ASK) == answer  # again, and the same text came, from other tokens
    await hand.say(ASK, answer, MORE)


async def made_up(hand: Hand) -> None:
    await hand.say(ASK)
    turn = {"role": "assistant", "content": "I never said this."}
    await hand.say({"role": "user", "content": "Quite another talk."}, turn, MORE)


C = Cause
CUSTODY = (
    Exhibit(C.UNRESOLVED_PARENT, "the agent sends back another answer than the one it was given", other_words),
    Exhibit(
        C.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES,
        "the second request is longer than the window; the first call stands, so the rollout still trains",
        overflow,
    ),
    Exhibit(C.WORKER_RESPONSE_MISSING_COMMIT_COORDINATES, "the worker's acknowledgement is lost on its way", one_turn),
    Exhibit(C.WORKER_CAPTURE_FAILED, "the disk of the staging store is full", full_disk),
    Exhibit(
        C.INVALID_WORKER_COMMIT_COORDINATES, "the worker acknowledges another length than it was admitted", one_turn
    ),
    Exhibit(C.LEDGER_ROW_MISSING_CHAIN_HASH, "the worker's acknowledgement has no chain hash", one_turn),
    Exhibit(C.ROLLOUT_FAILED, "the agent's own code raises after its first call", crash),
    Exhibit(C.NO_RECORDS, "the agent never asks the model anything", silent),
)
STAGING = (
    Exhibit(
        C.NONFINITE_LOGPROB,
        "the engine returns NaN for the second token's log-prob",
        one_turn,
        ({"text": "It rains.", "fault": "nan_logprob", "at": 1},),
    ),
    Exhibit(
        C.LOGPROB_COUNT_MISMATCH,
        "the engine returns one log-prob less than tokens",
        one_turn,
        ({"text": "It rains.", "fault": "few_logprobs"},),
    ),
    Exhibit(C.SPLICE_BOUNDARY, "the chat template leaves earlier answers out of the prompt", hiding_template),
    Exhibit(C.PREFIX_MISMATCH, "a token of the first call is changed in storage before the second", changed_prefix),
    Exhibit(C.SINK_TIMEOUT, "the staging store does not answer", slow_disk),
    Exhibit(C.SINK_ERROR, "the staging store refuses: its disk is full", full_disk),
)
DRIFT = (
    Exhibit(
        C.TEMPLATE_STRIPPED_REASONING, "the agent keeps the answer and drops its thinking", without_thinking, THINKING
    ),
    Exhibit(
        C.TOOL_CALL_RESERIALISED,
        "the agent gives the tool call an id of its own",
        other_call_id,
        ({"text": CALL}, {"text": "It rains."}),
    ),
    Exhibit(
        C.TOOL_CALL_DROPPED,
        "of two tool calls, one comes back",
        dropped_call,
        ({"text": CALL + CALL}, {"text": "It rains."}),
    ),
    Exhibit(C.HISTORY_EDITED, "the agent rewrites its own first question", other_question),
    Exhibit(C.CONTEXT_COMPACTED, "the agent replaces the first turn by a summary", summary),
    Exhibit(C.TOOLS_CHANGED, "the second request brings one more tool", other_tools),
    Exhibit(C.ASSISTANT_TEXT_CHANGED, "the agent rewrites the model's answer", other_words),
    Exhibit(
        C.DIALECT_CHANGED,
        "the rollout goes on in another API, with the tool call retold as text",
        other_dialect,
        ({"text": CALL}, {"text": "It rains."}),
    ),
    Exhibit(
        C.DUPLICATE_OUTPUT,
        "a repeated request gave the same text from other tokens; which of the two is continued?",
        same_words_twice,
        _SPELT,
    ),
    Exhibit(C.UNKNOWN_HISTORY, "the agent continues a conversation that never took place", made_up),
)
