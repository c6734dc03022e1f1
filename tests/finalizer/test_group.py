"""Group assembly: exactly N rows in index order, one primary cause a rejection, bad rollouts isolated."""

from __future__ import annotations

import numpy as np
import pytest
from chains import Chain
from pydantic import ValidationError

from workbench.capture.staging import MemorySink
from workbench.errors import ReceiptRejected
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.metrics import pool_metrics
from workbench.finalizer.verify import verify_and_linearize
from workbench.wire import Cause, ManifestFailure, RolloutReceipt, StagedCall

BOS = 1


def chain(i, turns=2, **options):
    grown = Chain(f"run.0.{i}.0", seed=100 + i, **options)
    for turn in range(turns):
        grown.call(f"c{turn - 1}" if turn else None)
    return grown


def outcome(i, grown, terminal="c1", **fields):
    receipt = fields.pop("receipt", None) or grown.receipt(terminal, **fields.pop("receipt_fields", {}))
    return RolloutOutcome(rollout_id=f"run.0.{i}.0", index=i, task_id="t", receipt=receipt, **{"reward": 1.0, **fields})


async def staged_of(request, chains, spoil=None):
    sink = MemorySink()
    for grown in chains:
        for call in grown.staged:
            sink.stage(call)
    if spoil:
        spoil(sink.rows)
    keys = request.staging_keys()
    return dict(zip(keys, await sink.fetch(keys), strict=True)), sink


async def run(outcomes, chains, spoil=None):
    request = FinalizationRequest(group_id="g0", weight_version=3, rollouts=outcomes)
    staged, _ = await staged_of(request, chains, spoil)
    return assemble(request, staged, BOS)


async def test_a_clean_group_is_n_verified_rows_in_index_order():
    chains = [chain(i) for i in range(4)]
    made = await run([outcome(i, chains[i]) for i in (2, 0, 3, 1)], chains)
    assert [row.index for row in made.rows] == [0, 1, 2, 3]
    for row, grown, summary in zip(made.rows, chains, made.summaries, strict=True):
        assert np.array_equal(row.token_ids, grown.ids["c1"])
        assert row.token_mask.tolist() == [0] * 5 + [1] * 7 + [0] * 5 + [1] * 7
        assert np.array_equal(row.logprobs, np.concatenate([c.generation_log_probs_delta for c in grown.staged]))
        assert (row.sample_mask, summary.cause, summary.tokens, summary.sampled_tokens) == (1, None, 24, 14)
    assert made.metrics.valid_rows == 4


async def test_a_changed_token_rejects_that_rollout_and_siblings_survive():
    chains = [chain(i) for i in range(3)]

    def spoil(rows):
        rows["run.0.1.0/c0"]["token_ids"][2] += 1

    made = await run([outcome(i, chains[i]) for i in range(3)], chains, spoil)
    assert [row.sample_mask for row in made.rows] == [1, 0, 1]
    bad = made.summaries[1]
    assert (bad.cause, bad.call_id, bad.placeholder) == (Cause.CORRUPT_DIGEST, "c0", "sibling")
    placeholder = made.rows[1]
    assert np.array_equal(placeholder.token_ids, chains[0].ids["c0"][:5])
    assert not placeholder.token_mask.any() and not placeholder.logprobs.any()
    assert np.array_equal(made.rows[2].token_ids, chains[2].ids["c1"])
    assert made.metrics.rejections == {"corrupt_digest": 1}


async def test_a_missing_side_branch_rejects_with_its_key_though_it_is_off_the_chain():
    grown = chain(0)
    grown.call("c0", call_id="side")
    made = await run([outcome(0, grown)], [grown], lambda rows: rows.pop("run.0.0.0/side"))
    assert (made.summaries[0].cause, made.summaries[0].call_id) == (Cause.MISSING_STAGING_ROW, "side")
    assert "run.0.0.0/side" in made.summaries[0].detail


async def test_placeholders_fall_back_to_a_verified_root_then_to_bos():
    chains = [chain(0), chain(1)]

    def lose_children(rows):
        rows.pop("run.0.0.0/c1"), rows.pop("run.0.1.0/c1")
        rows["run.0.0.0/c0"]["token_ids"][0] += 1

    outcomes = [outcome(i, chains[i]) for i in range(2)]
    made = await run(outcomes, chains, lose_children)
    assert [s.placeholder for s in made.summaries] == ["root_carry"] * 2
    assert np.array_equal(made.rows[0].token_ids, chains[1].ids["c0"][:5])
    made = await run(outcomes, chains, lambda rows: rows.clear())
    assert [row.token_ids.tolist() for row in made.rows] == [[BOS]] * 2
    assert {s.placeholder for s in made.summaries} == {"bos"}
    assert made.rows[0].token_ids.dtype == np.uint64


@pytest.mark.parametrize(
    ("fields", "expected", "detail"),
    [
        ({"failure_reason": "witness_disagreement", "terminal_attribution_reason": "witness_disagreement[x]"},
         Cause.WITNESS_DISAGREEMENT, "witness_disagreement[x]"),
        ({"failure_reason": "unresolved_parent"}, Cause.UNRESOLVED_PARENT, "history_edited"),
        ({"failure_reason": "worker_capture_failed"}, Cause.WORKER_CAPTURE_FAILED, "nonfinite_logprob"),
        ({"failure_reason": "the agent crashed"}, Cause.ROLLOUT_FAILED, "the agent crashed"),
        ({"failure_reason": "rollout_failed"}, Cause.ROLLOUT_FAILED, "it did not finish"),
    ],
)  # fmt: skip
async def test_the_primary_cause_of_a_poisoned_receipt_is_its_own_reason(fields, expected, detail):
    chains = [chain(0), chain(1)]
    failures = [
        ManifestFailure(model_call_id="f0", reason="unresolved_parent", detail="history_edited"),
        ManifestFailure(model_call_id="f1", reason="worker_capture_failed", detail="nonfinite_logprob"),
    ]
    poisoned = outcome(
        0,
        chains[0],
        None,
        receipt_fields={"capture_poisoned": True, **fields},
        failures=failures,
        detail="it did not finish",
    )
    made = await run([poisoned, outcome(1, chains[1])], chains)
    assert (made.summaries[0].cause, made.summaries[0].detail) == (expected, detail)
    assert made.summaries[0].call_id == {"history_edited": "f0", "nonfinite_logprob": "f1"}.get(detail)
    assert made.summaries[1].cause is None
    assert made.metrics.rejections == {expected.value: 1}


async def test_a_missing_row_does_not_hide_why_the_receipt_was_poisoned():
    grown = chain(0)
    fields = {"capture_poisoned": True, "failure_reason": "ambiguous_terminal"}
    made = await run([outcome(0, grown, None, receipt_fields=fields)], [grown], lambda rows: rows.clear())
    assert made.summaries[0].cause == Cause.AMBIGUOUS_TERMINAL


async def test_rollouts_without_a_receipt_or_with_another_ones_are_placeholders():
    chains = [chain(0), chain(1), chain(2), chain(3)]
    outcomes = [
        RolloutOutcome(rollout_id="run.0.0.0", index=0),
        RolloutOutcome(rollout_id="run.0.1.0", index=1, failure=Cause.ROLLOUT_FAILED, detail="timed out"),
        outcome(2, chains[3], receipt=chains[3].receipt("c1")),
        outcome(3, chains[3]),
    ]
    made = await run(outcomes, chains)
    assert [s.cause for s in made.summaries] == [
        Cause.MISSING_RECEIPT, Cause.ROLLOUT_FAILED, Cause.IDENTITY_MISMATCH, None,
    ]  # fmt: skip
    assert made.summaries[1].detail == "timed out"
    assert [row.rollout_id for row in made.rows] == [f"run.0.{i}.0" for i in range(4)]


async def test_changed_extras_are_found_though_the_call_digest_covers_only_their_digest():
    grown = Chain("run.0.0.0")
    grown.call(extras={"finish_reason": "stop"})

    def spoil(rows):
        meta = rows["run.0.0.0/c0"]["meta"].tobytes().replace(b'"stop"', b'"halt"')
        rows["run.0.0.0/c0"]["meta"] = np.frombuffer(meta, dtype=np.uint8)

    made = await run([outcome(0, grown, "c0")], [grown], spoil)
    assert (made.summaries[0].cause, made.summaries[0].call_id) == (Cause.CORRUPT_DIGEST, "c0")


async def test_byte_equal_siblings_are_reported_and_a_retried_call_is_not_one():
    same = [Chain(f"run.0.{i}.0", seed=1) for i in range(2)]
    retried = Chain("run.0.2.0", seed=2)
    for grown in (*same, retried):
        grown.call()
    retried.call(token_ids=retried.ids["c0"], generated=7)
    made = await run([outcome(i, grown, "c0") for i, grown in enumerate((*same, retried))], (*same, retried))
    assert [s.duplicate_of for s in made.summaries] == [None, "run.0.0.0", None]
    assert (made.metrics.duplicate_rows, made.metrics.valid_rows) == (1, 3)


async def test_metrics_count_all_calls_and_pool_by_sums():
    chains = [chain(0, turns=3), chain(1, turns=1), chain(2, turns=1)]
    failure = ManifestFailure(model_call_id="f", reason="unresolved_parent")
    outcomes = [
        outcome(0, chains[0], "c2", reward=1.0),
        outcome(1, chains[1], "c0", reward=0.0, receipt_fields={"terminal_selection": "heuristic"}),
        outcome(2, chains[2], None, failures=[failure], reward=1000.0,
                receipt_fields={"capture_poisoned": True, "failure_reason": "unresolved_parent",
                                "terminal_attribution_reason": "witness_disagreement[response_id=c0;content=c1]"}),
    ]  # fmt: skip
    made = await run(outcomes, chains)
    metrics, rates = made.metrics, made.metrics.rates()
    assert (metrics.calls, metrics.token_in_calls, metrics.unresolved_calls, metrics.receipts) == (6, 2, 1, 3)
    assert rates["token_in_rate"] == 2 / 6
    assert rates["token_in_rate_after_roots"] == 2 / 3
    assert (metrics.capture_poisoned_rollouts, metrics.witness_disagreements) == (1, 1)
    assert metrics.terminal_selection_counts == {"content": 1, "heuristic": 1}
    assert rates["terminal_selection_fractions"] == {"content": 1 / 3, "heuristic": 1 / 3}
    assert rates["heuristic_fraction"] == 1 / 3
    assert (rates["reward_mean"], rates["reward_std"]) == (0.5, 0.5)
    group = FinalizedGroup(
        group_id="g0",
        weight_version=3,
        train_keys=["a"],
        rows=made.summaries,
        metrics=metrics,
        timings_s={"fetch": 0.5},
    )
    pooled = pool_metrics([group, group])
    assert pooled["token_in_rate"] == 2 / 6 and pooled["calls"] == 12 and pooled["finalize_fetch_s"] == 1.0
    assert pooled["rejections"] == {"unresolved_parent": 2}
    record = group.store_record()
    assert record["valid_rows"] == 2 and record["fetch_s"] == 0.5 and len(record["rollouts"]) == 3
    assert FinalizedGroup.model_validate(group.model_dump(mode="json")) == group


async def test_a_valid_row_without_a_reward_has_none_and_is_in_no_mean():
    chains = [chain(i) for i in range(3)]
    made = await run([outcome(0, chains[0], reward=None), outcome(1, chains[1]), outcome(2, chains[2])], chains)
    assert [row.reward for row in made.rows] == [summary.reward for summary in made.summaries] == [None, 1.0, 1.0]
    assert [made.metrics.rates()[name] for name in ("reward_mean", "reward_std")] == [1.0, 0.0]
    assert (made.metrics.valid_rows, made.metrics.unrewarded_rows) == (3, 1)
    alone = await run([outcome(0, chains[0], reward=None)], chains[:1])
    assert alone.metrics.rates()["reward_mean"] is None


async def test_a_group_of_placeholders_only_has_no_rates_and_no_nan():
    made = await run([RolloutOutcome(rollout_id="run.0.0.0", index=0)], [])
    assert made.metrics.rates()["reward_mean"] is None and made.metrics.rates()["token_in_rate"] is None
    assert len(made.rows) == 1


def test_a_request_is_n_distinct_rollouts_and_carries_no_tensor():
    a, b = (RolloutOutcome(rollout_id=f"r{i}", index=i) for i in range(2))
    with pytest.raises(ValidationError, match="indexes"):
        FinalizationRequest(group_id="g", weight_version=0, rollouts=[a, a.model_copy(update={"index": 2})])
    with pytest.raises(ValidationError, match="same id"):
        FinalizationRequest(group_id="g", weight_version=0, rollouts=[a, b.model_copy(update={"rollout_id": "r0"})])
    with pytest.raises(ValidationError, match="Extra inputs"):
        RolloutOutcome(rollout_id="r", index=0, token_ids=[1])
    grown = chain(0)
    request = FinalizationRequest(group_id="g", weight_version=0, rollouts=[outcome(0, grown)])
    assert FinalizationRequest.model_validate(request.model_dump(mode="json")) == request
    assert b"token_ids" not in request.model_dump_json().encode()


def test_the_verifier_itself_is_what_is_used():
    grown = chain(0)
    receipt = grown.receipt("c1")
    assert isinstance(receipt, RolloutReceipt)
    assert np.array_equal(verify_and_linearize(receipt, grown.staged).token_ids, grown.ids["c1"])
    with pytest.raises(ReceiptRejected):
        verify_and_linearize(receipt, grown.staged[:1])


async def test_spans_of_a_call_that_straddled_a_weight_update_reach_the_row():
    grown = chain(0, turns=1)
    sampling = {"temperature": 0.6, "top_p": 1.0, "logprobs_mode": "processed_logprobs", "seed": 5}
    grown.call("c0", extras={"weight_spans": [[0, 3, 2], [3, 7, 3]], "sampling": sampling}, weight_version=2)
    made = await run([outcome(0, grown)], [grown])
    row, summary = made.rows[0], made.summaries[0]
    assert row.weight_version_spans == [["c0", 0, 12, 0], ["c1", 12, 20, 2], ["c1", 20, 24, 3]]
    assert (row.weight_versions, summary.weight_version_min, summary.weight_version_max) == ([0, 2], 0, 3)
    assert row.tags(9)["weight_version_max"] == 3
    assert row.sampling == [{}, {"temperature": 0.6, "top_p": 1.0, "logprobs_mode": "processed_logprobs"}]


@pytest.mark.parametrize(
    "spans",
    [[[0, 6, 2]], [[0, 3, 2], [4, 7, 3]], [[0, 7, "2"]], [[0, 7]], 7, [[0, 7, -1]], [[0.0, 7.0, 2]], [[False, 7, 2]]],
)
async def test_spans_that_do_not_tile_the_generation_make_a_placeholder(spans):
    grown = chain(0, turns=1)
    grown.call("c0", extras={"weight_spans": spans})
    made = await run([outcome(0, grown)], [grown])
    assert (made.rows[0].sample_mask, made.summaries[0].cause) == (0, Cause.INVALID_SNAPSHOT)
    assert made.summaries[0].call_id == "c1" and "7 generated tokens" in made.summaries[0].detail


async def test_what_the_environment_says_of_a_rollout_that_was_captured_well_is_its_cause():
    chains = [chain(0), chain(1)]
    failed = outcome(1, chains[1], failure=Cause.ROLLOUT_FAILED, detail="the agent crashed")
    made = await run([outcome(0, chains[0]), failed], chains)
    assert [row.sample_mask for row in made.rows] == [1, 0]
    assert (made.summaries[1].cause, made.summaries[1].detail) == (Cause.ROLLOUT_FAILED, "the agent crashed")


async def test_extras_and_log_probs_of_which_no_digest_can_be_made_reject_their_rollout_alone():
    chains = [chain(0, turns=1), chain(1, turns=1), chain(2, turns=1)]
    request = FinalizationRequest(
        group_id="g0", weight_version=3, rollouts=[outcome(i, chains[i], "c0") for i in range(3)]
    )
    staged, _ = await staged_of(request, chains)
    spoilt = {"run.0.0.0/c0": {"extras": {"spans": (1, 2)}}}
    spoilt["run.0.1.0/c0"] = {"generation_log_probs_delta": np.full(12, np.nan, np.float32)}
    for key, fields in spoilt.items():
        staged[key] = StagedCall.unverified(**{**staged[key].__dict__, **fields})
    made = assemble(request, staged, BOS)
    assert [summary.cause for summary in made.summaries] == [Cause.INVALID_SNAPSHOT, Cause.INVALID_SNAPSHOT, None]
    # Of the second not even the prompt is proven, so nothing is borrowed from it.
    alone = FinalizationRequest(
        group_id="g0", weight_version=3, rollouts=[request.rollouts[1].model_copy(update={"index": 0})]
    )
    assert assemble(alone, staged, BOS).summaries[0].placeholder == "bos"


async def test_behind_a_poisoned_receipt_of_a_rollout_that_failed_stands_the_receipts_own_reason():
    grown = chain(0)
    poisoned = {"capture_poisoned": True, "failure_reason": "worker_capture_failed"}
    failed = ManifestFailure(model_call_id="f0", reason="worker_capture_failed", detail="nonfinite_logprob")
    fields = {"failure": Cause.ROLLOUT_FAILED, "detail": "the agent crashed", "failures": [failed]}
    made = await run([outcome(0, grown, receipt_fields=poisoned, **fields)], [grown])
    (summary,) = made.summaries
    assert (summary.cause, summary.detail) == (Cause.WORKER_CAPTURE_FAILED, "nonfinite_logprob")
    assert summary.call_id == "f0"


async def test_a_root_without_a_prompt_lends_its_siblings_none():
    """A row of no token could not be trained on, not even as a placeholder."""
    bare, lost = Chain("run.0.0.0"), chain(1)
    bare.call(carry=0)
    for receipt in (bare.receipt("c0"), bare.receipt(None, capture_poisoned=True, failure_reason="no_root")):
        made = await run([outcome(0, bare, receipt=receipt), outcome(1, lost)], [bare])
        assert made.rows[1].token_ids.tolist() == [BOS]
        assert made.summaries[1].placeholder == "bos"


async def test_empty_extras_are_not_none():
    grown = chain(0, turns=1)
    bare = StagedCall.unverified(**{**grown.staged[0].__dict__, "extras": {}})
    request = FinalizationRequest(group_id="g0", weight_version=0, rollouts=[outcome(0, grown, "c0")])
    (summary,) = assemble(request, {bare.staging_key: bare}, BOS).summaries
    assert (summary.cause, summary.call_id) == (Cause.CORRUPT_DIGEST, "c0")
