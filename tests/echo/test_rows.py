"""Echo rows: turns joined by their lengths are right exactly where every prompt begins with what was there before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workbench.echo import EchoedCall, assemble_echo, chain_of, concatenate
from workbench.echo import finalizer as echo_finalizer
from workbench.echo.finalizer import EchoFinalizer, call_rows, stored_chains
from workbench.echo.rows import Concatenated
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.rows import pack_row
from workbench.finalizer.stored import read_group
from workbench.finalizer.verdicts import Rejection
from workbench.wire import Cause

USER = {"role": "user", "content": "?"}


def says(text):
    return {"role": "assistant", "content": text}


def call(name, prompt, sampled, messages=(USER,), answer=None):
    return EchoedCall(
        call_id=name,
        messages=messages,
        answer=says(answer or name),
        prompt_ids=np.array(prompt, np.uint64),
        sampled_ids=np.array(sampled, np.uint64),
        logprobs=np.linspace(-2, -1, len(sampled), dtype=np.float32),
        finish_reason="stop",
        weight_version=3,
    )


def test_turns_that_fit_give_the_row_that_the_engine_ran():
    chain = [call("a", [1, 2], [3, 4]), call("b", [1, 2, 3, 4, 5], [6])]
    joined = concatenate("r.0.0.0", chain)
    assert isinstance(joined, Concatenated)
    assert joined.wrong_at is None
    assert joined.row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert joined.row.token_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert joined.row.logprobs.tolist() == [0, 0, -2, -1, 0, -2]
    assert joined.row.weight_version_spans == [("a", 0, 4, 3), ("b", 4, 6, 3)]


@pytest.mark.parametrize(
    ("prompt", "wrong_at"),
    [
        # `he`,`llo` were sampled, the next prompt is rendered with `hello` (TRL #5224): one id less, then shifted.
        ([1, 2, 9, 5], 2),
        # As many ids, but others.
        ([1, 2, 9, 4, 5], 2),
        # A template strips the answer's beginning: the prompt is shorter than what was there before.
        ([1, 2, 5], 2),
    ],
)
def test_a_turn_that_is_rendered_differently_makes_the_row_wrong_from_there_on(prompt, wrong_at):
    joined = concatenate("r.0.0.0", [call("a", [1, 2], [3, 4]), call("b", prompt, [6])])
    assert isinstance(joined, Concatenated)
    assert joined.wrong_at == wrong_at


def test_a_retry_and_a_side_branch_drop_out_and_an_edited_answer_becomes_prompt():
    history = (USER, says("a"), USER)
    calls = [
        call("retried", [1], [2], answer="a"),
        call("a", [1], [2]),
        call("side", [1, 2, 3], [4], history),
        call("end", [1, 2, 5], [6], history),
    ]
    assert [c.call_id for c in chain_of(calls, "end")] == ["a", "end"]
    assert [c.call_id for c in chain_of(calls, "side")] == ["a", "side"]
    edited = [calls[1], call("end", [1, 7, 5], [6], (USER, says("(shortened)"), USER))]
    assert [c.call_id for c in chain_of(edited, "end")] == ["end"]
    assert chain_of(calls, "unknown") == []


def test_two_equal_answers_are_two_turns():
    calls = [
        call("one", [1], [2], answer="same"),
        call("two", [1, 2, 3], [2], (USER, says("same"), USER), answer="same"),
        call("end", [1, 2, 3, 2, 3], [4], (USER, says("same"), USER, says("same"), USER)),
    ]
    assert [c.call_id for c in chain_of(calls, "end")] == ["one", "two", "end"]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"logprobs": np.array([-1.0], np.float32)}, Cause.LOGPROB_COUNT_MISMATCH),
        ({"logprobs": np.array([-1.0, np.nan], np.float32)}, Cause.NONFINITE_LOGPROB),
        ({"sampled_ids": np.array([], np.uint64), "logprobs": np.array([], np.float32)}, Cause.EMPTY_GENERATION),
    ],
)
def test_what_cannot_be_trained_is_rejected_with_the_call(change, cause):
    rejected = concatenate("r.0.0.0", [replace(call("a", [1], [2, 3]), **change)])
    assert isinstance(rejected, Rejection)
    assert (rejected.cause, rejected.call_id) == (cause, "a")


def outcome(index, **settings):
    return RolloutOutcome(rollout_id=f"r.0.{index}.0", index=index, reward=float(index), **settings)


def test_a_group_keeps_n_rows_counts_the_wrong_ones_and_can_be_joined_again_from_its_stored_calls():
    request = FinalizationRequest(
        group_id="g0",
        weight_version=3,
        rollouts=[outcome(0), outcome(1), outcome(2, failure=Cause.ROLLOUT_FAILED, detail="it gave up"), outcome(3)],
    )
    chains = {
        "r.0.0.0": [call("a", [1, 2], [3, 4]), call("b", [1, 2, 3, 4, 5], [6])],
        "r.0.1.0": [call("c", [1, 2], [3, 4]), call("d", [1, 2, 9, 5], [6])],
    }
    assembly = assemble_echo(request, chains, 0)
    assert [row.sample_mask for row in assembly.rows] == [1, 1, 0, 0]
    assert [summary.cause for summary in assembly.summaries] == [None, None, Cause.ROLLOUT_FAILED, Cause.NO_RECORDS]
    assert [summary.position for summary in assembly.summaries] == [None, 2, None, None]
    assert assembly.rows[2].token_ids.tolist() == [1, 2]
    assert (assembly.metrics.calls, assembly.metrics.echo_wrong_rows) == (4, 1)
    assert assembly.metrics.rates()["token_in_rate"] == 0.0

    again = assemble_echo(request, stored_chains(call_rows(request, chains)), 0)
    for row, other in zip(assembly.rows, again.rows, strict=True):
        for name in ("token_ids", "token_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(row, name), getattr(other, name))
    assert again.summaries == assembly.summaries


async def test_a_stored_group_is_published_again_row_for_row_for_a_run_that_is_gone_on_with(tmp_path, monkeypatch):
    published = []

    async def publish_rows(rows, dispatch_version, *, deadline_s):
        published.append([pack_row(row) for row in rows])
        return [row.rollout_id for row in rows]

    monkeypatch.setattr(echo_finalizer, "publish_rows", publish_rows)
    request = FinalizationRequest(
        group_id="g0", weight_version=3, rollouts=[outcome(0), outcome(1, failure=Cause.ROLLOUT_FAILED, detail="why")]
    )
    first = EchoFinalizer(tmp_path, 0, 5.0)
    first.chains = {"r.0.0.0": [call("a", [1, 2], [3, 4]), call("b", [1, 2, 9, 5], [6])]}
    group = await first.finalize(request)
    assert first.chains == {}
    parts = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}

    # Another process, which knows no more than what is stored.
    stored = read_group(tmp_path, "g0")
    assert stored is not None
    again = await EchoFinalizer(tmp_path, 0, 5.0).republish(
        FinalizationRequest(group_id="g0", weight_version=3, rollouts=stored.outcomes)
    )
    assert (again.train_keys, again.rows, again.metrics) == (group.train_keys, group.rows, group.metrics)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == parts
    before, after = published
    for one, other in zip(before, after, strict=True):
        assert {name: column.tobytes() for name, column in one.items()} == {n: c.tobytes() for n, c in other.items()}
