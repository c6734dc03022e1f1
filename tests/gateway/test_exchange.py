"""One call's life, seen by an agent that knows nothing but a base URL."""

from __future__ import annotations

import asyncio

import openai
import pytest

from conftest import WINDOW, Stack, follow, message_of, say, until
from workbench.finalizer.verify import verify_and_linearize
from workbench.ledger import assemble_receipt
from workbench.wire import CallRecord, StagedCall

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "say something"}]


async def staged(stack: Stack, records: list[CallRecord]) -> list[StagedCall]:
    rows = await stack.sink.fetch([record.staging_key for record in records])
    assert all(isinstance(row, StagedCall) for row in rows)
    return rows


async def test_child_prompt_begins_with_parents_cumulative_ids(stack: Stack) -> None:
    agent = stack.agent("chain.0")
    first = await say(agent, ASK)
    second = await say(agent, follow(ASK, first))
    third = await say(agent, follow(follow(ASK, first), second))
    closed = await stack.control.freeze("chain.0", response=third)
    manifest = await stack.control.manifest("chain.0")
    assert [record.parent_call_id for record in manifest.records] == [
        None,
        *(record.model_call_id for record in manifest.records[:2]),
    ]
    assert closed["attribution"]["method"] == "response_id"
    assert closed["attribution"]["reason"] == "corroborated_by=content"
    receipt = assemble_receipt(manifest, rollout_id="chain.0", reward=1.0, response=third)
    rows = await staged(stack, manifest.records)
    row = verify_and_linearize(receipt, rows)
    assert row.token_ids.tolist() == [token for call in rows for token in call.token_ids_delta.tolist()]
    assert len(row.model_call_ids) == 3


async def test_the_last_frame_leaves_only_after_the_ledger_row(stack: Stack) -> None:
    stream = await stack.agent("slow.stream").chat.completions.create(model="policy", messages=ASK, stream=True)
    text = ""
    async for chunk in stream:
        rows = stack.gateway.custodian.store.manifest("slow.stream").records
        finished = chunk.choices and chunk.choices[0].finish_reason
        assert len(rows) == (1 if finished else 0)
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if finished:
            break
    assert text == "this takes its time to come out"


async def test_a_streamed_turn_resolves_like_a_whole_one(stack: Stack) -> None:
    agent = stack.agent("chain.stream")
    async with agent.chat.completions.stream(model="policy", messages=ASK) as events:
        first = (await events.get_final_completion()).model_dump(mode="json", exclude_unset=True)
    await say(agent, [*ASK, {"role": "assistant", "content": message_of(first)["content"]}, *ASK])
    root, child = (await stack.control.manifest("chain.stream")).records
    assert child.parent_call_id == root.model_call_id
    assert root.response_id == first["id"]


async def test_a_retry_is_a_sibling_and_the_scored_response_names_the_terminal(stack: Stack) -> None:
    agent = stack.agent("chain.retry")
    first = await say(agent, ASK)
    second = await say(agent, follow(ASK, first))
    third = await say(agent, follow(ASK, first))
    root, one, other = (await stack.control.manifest("chain.retry")).records
    assert one.parent_call_id == other.parent_call_id == root.model_call_id
    assert (await stack.control.freeze("chain.retry", response=second))["attribution"]["terminal"] == one.model_call_id
    assert (await stack.control.freeze("chain.retry", response=third))["attribution"]["terminal"] == other.model_call_id


async def test_of_an_answer_that_nobody_gave_the_nearest_one_is_named(stack: Stack) -> None:
    first = await say(stack.agent("chain.near"), ASK)
    left = {"choices": [{"message": {"role": "assistant", "content": message_of(first)["content"] + "\n"}}]}
    closed = await stack.control.freeze("chain.near", response=left)
    assert closed["attribution"]["reason"] == "response_has_no_id,no_content_match"
    (record,) = closed["manifest"]["records"]
    said = f"the text that was left is the answer of call {record['model_call_id'][:12]} with '\\n' after it. Next: "
    assert closed["nearest"].startswith(said)
    assert "nearest" not in await stack.control.freeze("chain.near", response=first)


async def test_an_edited_history_is_served_and_never_becomes_a_root(stack: Stack) -> None:
    agent = stack.agent("chain.edited")
    first = await say(agent, ASK)
    history = follow(ASK, first)
    history[1] = {"role": "assistant", "content": "something else"}
    assert message_of(await say(agent, history))["content"]
    manifest = await stack.control.manifest("chain.edited")
    (failure,) = manifest.failures
    assert len(manifest.records) == 1
    assert (failure.reason, failure.detail) == ("unresolved_parent", "assistant_text_changed")
    assert f"chain.edited/{failure.model_call_id}" not in stack.sink.rows
    drift = next(e for e in stack.gateway.custodian.store.events("chain.edited") if e["kind"] == "drift")
    assert (drift["nearest_call"], drift["position"]) == (manifest.records[0].model_call_id, 1)


async def test_a_failed_capture_is_served_and_its_child_is_unresolved(stack: Stack) -> None:
    agent = stack.agent("nan.0")
    answer = await say(agent, ASK)
    assert message_of(answer)["content"] == "not a number"
    await say(agent, follow(ASK, answer))
    manifest = await stack.control.manifest("nan.0")
    assert [(failure.reason, failure.detail) for failure in manifest.failures] == [
        ("worker_capture_failed", "nonfinite_logprob"),
        ("unresolved_parent", "unknown_history"),
    ]
    receipt = assemble_receipt(manifest, rollout_id="nan.0", reward=1.0, response=answer)
    assert (receipt.capture_poisoned, receipt.failure_reason) == (True, "worker_capture_failed")


async def test_a_full_window_is_a_clear_refusal_and_does_not_poison(stack: Stack) -> None:
    agent = stack.agent("chain.window")
    first = await say(agent, ASK)
    with pytest.raises(openai.BadRequestError) as refused:
        await say(agent, follow(ASK, first, "word " * WINDOW))
    assert refused.value.code == "context_length_exceeded"
    manifest = await stack.control.manifest("chain.window")
    assert [failure.reason for failure in manifest.failures] == ["request_finished_without_staged_coordinates"]
    assert not assemble_receipt(manifest, rollout_id="chain.window", reward=1.0, response=first).capture_poisoned


async def test_sampling_belongs_to_the_recipe(stack: Stack) -> None:
    agent = stack.agent("chain.pins")
    answer = await say(agent, ASK, temperature=0.2, presence_penalty=1.0, logprobs=True, max_tokens=7)
    assert not answer["choices"][0].get("logprobs")
    metrics = (await stack.http.get(f"{stack.url}/metrics")).text
    assert 'workbench_overridden_fields_total{field="temperature"} 1.0' in metrics
    assert 'workbench_overridden_fields_total{field="presence_penalty"} 1.0' in metrics
    assert 'workbench_stripped_fields_total{field="logprobs"} 1.0' in metrics
    record = (await stack.control.manifest("chain.pins")).records[0]
    (row,) = await staged(stack, [record])
    assert row.extras is not None and row.extras["sampling"]["temperature"] == 1.0


@pytest.mark.parametrize("field", ["echo", "use_beam_search", "continue_final_message", "n", "best_of"])
async def test_what_cannot_be_captured_is_refused(stack: Stack, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await say(stack.agent("chain.refused"), ASK, extra_body={field: 2 if field in ("n", "best_of") else True})
    assert refused.value.param == field
    assert (await stack.control.manifest("chain.refused")).failures == []


async def test_an_agent_may_not_send_our_headers(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="x-workbench-admission"):
        await say(stack.agent("chain.header"), ASK, extra_headers={"x-workbench-admission": "e30="})


async def test_malformed_requests_are_refused(stack: Stack) -> None:
    route = f"{stack.url}/ng-rollout/chain.bad/v1/chat/completions"
    http = stack.http
    for content, status in (
        (b"{", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"messages":[3]}', 400),
        (b'{"messages":[{"role":"user","content":3}]}', 400),
        (b" " * 70_000, 413),
    ):
        assert (await http.post(route, content=content)).status_code == status, content[:40]
    assert (await http.post(f"{stack.url}/ng-rollout/.../v1/chat/completions", json={})).status_code == 400
    assert (await http.post(f"{stack.url}/ng-rollout/a%20b/v1/chat/completions", json={})).status_code == 400
    assert (await http.post(f"{stack.url}/ng-rollout/a/v1/nothing", json={})).status_code == 404


async def test_after_freeze_a_call_is_refused_and_a_late_commit_changes_nothing(stack: Stack) -> None:
    agent = stack.agent("slow.late")
    late = asyncio.create_task(say(agent, ASK))
    await until(lambda: stack.worker.capture.board.live_calls, "the call is under way")
    await stack.control.freeze("slow.late")
    with pytest.raises(openai.ConflictError) as refused:
        await say(agent, ASK)
    assert refused.value.code == "rollout_frozen"
    assert message_of(await late)["content"]
    assert (await stack.control.manifest("slow.late")).records == []
    events = stack.gateway.custodian.store.events("slow.late")
    assert [event["kind"] for event in events] == ["late_commit"]


async def test_an_agent_that_leaves_in_the_middle_leaves_no_stuck_call(stack: Stack) -> None:
    stream = await stack.agent("slow.gone").chat.completions.create(model="policy", messages=ASK, stream=True)
    await anext(aiter(stream))
    await stream.close()
    store = stack.gateway.custodian.store
    await until(lambda: store.manifest("slow.gone").records, "the abandoned call is committed")
    await until(lambda: not stack.gateway._live, "no call is under way")


@pytest.mark.parametrize(
    "path", ["/v1/%2e%2e/workbench/status", "/v1/..%2fworkbench%2fstatus", "/v1/models%3Fa", "/v1//models", "/v1/%23a"]
)
async def test_nothing_passes_through_to_what_the_worker_keeps_for_its_gateway(stack: Stack, path: str) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    # By hand: clients tidy such paths up before they send them.
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 10.0)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404"), answer
    assert b"weight_version" not in answer


async def test_untagged_calls_pass_and_leave_no_trace(stack: Stack) -> None:
    before = len(stack.sink.rows)
    agent = stack.client("/v1")
    assert message_of(await say(agent, ASK))["content"]
    assert [model.id for model in (await agent.models.list()).data] == ["policy"]
    assert [model.id for model in (await stack.agent("chain.models").models.list()).data] == ["policy"]
    assert len(stack.sink.rows) == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_every_dialect_is_served_untagged_and_not_captured(stack: Stack, path: str, stream: bool) -> None:
    store, staged = stack.gateway.custodian.store.directory, len(stack.sink.rows)
    files = {file.name for file in store.iterdir()}
    body = {"model": "policy", "max_tokens": 9, "stream": stream, "input" if path == "responses" else "messages": ASK}
    answer = await stack.http.post(f"{stack.url}/v1/{path}", json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert "policy" in answer.text
    assert len(stack.sink.rows) == staged
    assert {file.name for file in store.iterdir()} == files


async def test_the_control_plane_tells_strangers_nothing(stack: Stack) -> None:
    route = f"{stack.url}/training-token-capture/control/rollouts"
    answers = set()
    http = stack.http
    for rollout_id in ("chain.0", "never.was", "..."):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eDp5"}):
            answer = await http.get(f"{route}/{rollout_id}/manifest", headers=headers)
            assert answer.status_code == 401
            answers.add(answer.content)
    assert len(answers) == 1


async def test_seal_gives_the_receipt(stack: Stack) -> None:
    answer = await say(stack.agent("chain.seal"), ASK)
    receipt = await stack.control.seal("chain.seal", 0.5, terminal_response_id=answer["id"])
    assert (receipt.reward, receipt.terminal_selection, receipt.capture_poisoned) == (0.5, "declared", False)


async def test_declared_compaction_is_a_linked_root(stack: Stack) -> None:
    agent = stack.agent("chain.compact")
    first = await say(agent, ASK)
    short = [{"role": "user", "content": "in short: we spoke"}, {"role": "assistant", "content": "yes"}, *ASK]
    await say(agent, short, extra_headers={"x-workbench-compaction": first["id"]})
    manifest = await stack.control.manifest("chain.compact")
    assert [record.parent_call_id for record in manifest.records] == [None, None]
    ledger = stack.gateway.custodian.store.directory / "chain.compact.lineage.jsonl"
    assert f'"compaction_of":"{manifest.records[0].model_call_id}"' in ledger.read_text()
