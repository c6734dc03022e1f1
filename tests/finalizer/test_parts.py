"""A group's parts on disk: every digest can be recomputed from them alone, rejected and side branches too."""

from __future__ import annotations

import inspect
import json

import numpy as np
import polars as pl
import pytest
from chains import Chain
from test_group import BOS, chain, outcome, staged_of

from workbench.errors import FinalizerError, RunStoreError, SetupError
from workbench.finalizer.bos import bos_of
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.parts import write_group
from workbench.finalizer.rows import pack_row
from workbench.finalizer.stored import read_group
from workbench.runs import schema
from workbench.runs.staged import staged_call
from workbench.wire import Cause, ManifestFailure, RolloutReceipt, extras_digest, staged_call_digest


def recompute(row):
    """The call digest of one row of the calls part, and the one that was staged."""
    fields = {**row, **json.loads(row["snapshot"])}
    columns = {"token_ids", "token_mask", "logprobs"}
    names = set(inspect.signature(staged_call_digest).parameters) & set(fields) - columns
    digest = staged_call_digest(
        token_ids_delta=np.array(row["token_ids"], dtype=np.uint64),
        token_mask_delta=np.array(row["token_mask"], dtype=np.float32),
        generation_log_probs_delta=np.array(row["logprobs"], dtype=np.float32),
        **{name: fields[name] for name in names},
    )
    return digest, fields["digest"]


async def write(tmp_path, outcomes, chains, spoil=None, group_id="g0"):
    request = FinalizationRequest(group_id=group_id, weight_version=0, rollouts=outcomes)
    staged, _ = await staged_of(request, chains, spoil)
    write_group(tmp_path, request, staged, assemble(request, staged, BOS))
    return pl.read_parquet(tmp_path / "calls" / f"{group_id}.parquet"), pl.read_parquet(
        tmp_path / "rows" / f"{group_id}.parquet"
    )


async def test_every_digest_can_be_recomputed_from_the_calls_part(tmp_path):
    branching = Chain("run.0.0.0", weight_version=2)
    branching.call(extras={"finish_reason": "stop", "sampling": {"temperature": 1.0, "n": 1}})
    branching.call("c0", extras={})
    branching.call("c0", token_ids=[2**64 - 1, 5, 6], generated=2)
    corrupt, poisoned = chain(1), chain(2)
    fields = {"capture_poisoned": True, "failure_reason": "worker_capture_failed"}
    failure = ManifestFailure(model_call_id="f0", reason="worker_capture_failed", detail="nonfinite_logprob")
    outcomes = [
        outcome(0, branching, "c1"),
        outcome(1, corrupt),
        outcome(2, poisoned, None, receipt_fields=fields, failures=[failure]),
        RolloutOutcome(rollout_id="run.0.3.0", index=3),
    ]

    def spoil(rows):
        rows["run.0.1.0/c1"]["token_ids"][0] += 1
        rows.pop("run.0.2.0/c1")

    calls, rows = await write(tmp_path, outcomes, [branching, corrupt, poisoned], spoil)
    assert dict(calls.schema) == schema.polars_schema("calls") and dict(rows.schema) == schema.polars_schema("rows")
    assert calls["model_call_id"].to_list() == ["c0", "c1", "c2", "c0", "c1", "c0", "c1", "f0"]
    right = {}
    for row in calls.filter(pl.col("staging") == "fetched").to_dicts():
        digest, staged_digest = recompute(row)
        right[row["rollout_id"], row["model_call_id"]] = digest == staged_digest
        if row["extras"] is not None:
            assert extras_digest(json.loads(row["extras"])) == row["extras_digest"]
    assert right == {(f"run.0.{r}.0", c): (r, c) != (1, "c1")
                     for r, c in [(0, "c0"), (0, "c1"), (0, "c2"), (1, "c0"), (1, "c1"), (2, "c0")]}  # fmt: skip
    assert calls["extras"].to_list()[:3] == [
        '{"finish_reason":"stop","sampling":{"temperature":1.0,"n":1}}', "{}", None,
    ]  # fmt: skip
    assert calls["on_chain"].to_list() == [True, True, False, True, True, False, False, False]
    assert calls["terminal"].to_list() == [False, True, False, False, True, False, False, False]
    assert calls["finish_reason"][0] == "stop"
    lost, failed = calls.to_dicts()[6:]
    assert (lost["staging"], lost["token_ids"]) == (Cause.MISSING_STAGING_ROW, None)
    assert (failed["disposition"], failed["failure_reason"], failed["detail"]) == (
        "failed", "worker_capture_failed", "nonfinite_logprob",
    )  # fmt: skip
    assert rows["cause"].to_list() == [None, "corrupt_digest", "worker_capture_failed", "missing_receipt"]
    assert rows["sample_mask"].to_list() == [1, 0, 0, 0]
    assert rows["token_ids"][0].to_numpy().tolist() == branching.ids["c1"].tolist()
    assert json.loads(rows["link_spans"][0]) == [["c0", 5, 7], ["c1", 5, 7]]


async def test_a_staged_call_that_differs_from_its_record_keeps_what_was_staged(tmp_path):
    grown, other = Chain("run.0.0.0", weight_version=5), Chain("run.0.0.0", weight_version=6)
    grown.call(), other.call()
    calls, rows = await write(tmp_path, [outcome(0, grown, "c0")], [other])
    (row,) = calls.to_dicts()
    assert row["weight_version"] == 5 and json.loads(row["snapshot"])["weight_version"] == 6
    digest, staged_digest = recompute(row)
    assert digest == staged_digest == other.staged[0].digest != row["digest"]
    assert rows["cause"].to_list() == ["wrong_weight_version"]


async def test_receipts_are_kept_with_failures_and_rewards(tmp_path):
    grown = chain(0)
    failure = ManifestFailure(model_call_id="f", reason="request_finished_without_staged_coordinates")
    await write(
        tmp_path, [outcome(0, grown, failures=[failure], reward=0.25, reward_components={"format": 0.25})], [grown]
    )
    (line,) = (tmp_path / "receipts" / "g0.jsonl").read_text().splitlines()
    stored = RolloutOutcome.model_validate_json(line)
    assert isinstance(stored.receipt, RolloutReceipt)
    assert (stored.failures, stored.reward, stored.reward_components) == ([failure], 0.25, {"format": 0.25})


async def test_group_ids_that_are_no_file_names_and_unwritable_places_are_refused(tmp_path):
    grown = chain(0)
    with pytest.raises(FinalizerError, match="group id"):
        await write(tmp_path, [outcome(0, grown)], [grown], group_id="../escape")
    (tmp_path / "calls").write_text("in the way")
    with pytest.raises((RunStoreError, OSError)):
        await write(tmp_path, [outcome(0, grown)], [grown])


async def test_rows_come_back_as_they_were_published_with_how_their_calls_were_sampled(tmp_path):
    warm = Chain("run.0.0.0", weight_version=2)
    warm.call(extras={"finish_reason": "stop", "sampling": {"temperature": 0.7, "logprobs_mode": "processed_logprobs"}})
    warm.call("c0", extras={})
    outcomes = [outcome(0, warm, "c1", reward=0.5), RolloutOutcome(rollout_id="run.0.1.0", index=1)]
    request = FinalizationRequest(group_id="g0", weight_version=2, rollouts=outcomes)
    staged, _ = await staged_of(request, [warm])
    assembly = assemble(request, staged, BOS)
    assert assembly.rows[0].sampling == [{"temperature": 0.7, "logprobs_mode": "processed_logprobs"}, {}]
    write_group(tmp_path, request, staged, assembly)
    stored = read_group(tmp_path, "g0")
    for published, again in zip(assembly.rows, stored.rows, strict=True):
        for name, values in pack_row(published).items():
            assert pack_row(again)[name].tobytes() == values.tobytes(), (published.rollout_id, name)


@pytest.mark.parametrize("plan", ["{no json", "[]", '{"dims": 1}', '{"dims": [0, 1, "int8"], "spans": []}'])
async def test_a_group_with_a_damaged_route_plan_is_not_read_back_and_says_what_to_do(tmp_path, plan):
    grown = chain(0)
    _, rows = await write(tmp_path, [outcome(0, grown)], [grown])
    rows.with_columns(route_plan=pl.lit(plan)).write_parquet(tmp_path / "rows" / "g0.parquet")
    with pytest.raises(RunStoreError, match=r"g0 .* cannot be read back: .* Next: workbench verify"):
        read_group(tmp_path, "g0")


def test_a_placeholders_bos_is_the_models_own_wherever_it_is_named(tmp_path):
    """Generation settings name the end of sequence alone; the model's own BOS stands in config.json."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    assert bos_of(tmp_path) == 1
    (tmp_path / "config.json").write_text('{"bos_token_id": null, "pad_token_id": 0}')
    assert bos_of(tmp_path) == 2
    (tmp_path / "generation_config.json").unlink()
    assert bos_of(tmp_path) == 0
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SetupError, match="names no BOS, EOS or padding token"):
        bos_of(tmp_path)
    (tmp_path / "config.json").write_text("{torn")
    with pytest.raises(SetupError, match=r"config\.json is not JSON.* Next:"):
        bos_of(tmp_path)


async def test_calls_of_one_id_in_two_rollouts_keep_their_own_settings(tmp_path):
    chains = [Chain("run.0.0.0"), Chain("run.0.1.0")]
    for grown, temperature in zip(chains, (0.5, 1.0), strict=True):
        grown.call(extras={"sampling": {"temperature": temperature}})
    outcomes = [outcome(i, chains[i], "c0") for i in range(2)]
    await write(tmp_path, outcomes, chains)
    stored = read_group(tmp_path, "g0")
    assert [row.sampling for row in stored.rows] == [[{"temperature": 0.5}], [{"temperature": 1.0}]]


async def test_a_call_staged_for_another_rollout_is_stored_as_it_was_fetched(tmp_path):
    """A manifest that names a sibling's row: what was wrong then is still wrong when the run is verified."""
    grown, robbed = chain(0), chain(1)
    thief = grown.receipt("c1").model_dump() | {"rollout_id": "run.0.2.0"}
    outcomes = [
        outcome(0, grown),
        outcome(1, robbed),
        RolloutOutcome(rollout_id="run.0.2.0", index=2, receipt=RolloutReceipt.model_validate(thief)),
    ]
    calls, rows = await write(tmp_path, outcomes, [grown, robbed])
    assert rows["cause"].to_list() == [None, None, Cause.WRONG_ROLLOUT]
    stored = [staged_call(row) for row in calls.iter_rows(named=True) if row["rollout_id"] == "run.0.2.0"]
    assert stored == grown.staged


async def test_rows_and_receipts_of_different_rollouts_are_no_group(tmp_path):
    for group_id, index in (("g0", 0), ("g1", 1)):
        grown = Chain(f"run.{index}.0.0")
        grown.call()
        only = RolloutOutcome(rollout_id=grown.rollout_id, index=0, receipt=grown.receipt("c0"))
        await write(tmp_path, [only], [grown], group_id=group_id)
    (tmp_path / "receipts" / "g1.jsonl").rename(tmp_path / "receipts" / "g0.jsonl")
    with pytest.raises(RunStoreError, match="not about the same rollouts"):
        read_group(tmp_path, "g0")


@pytest.mark.parametrize(
    "extras",
    [
        {"sampling": ["temperature"]},
        {"sampling": 5},
        {"sampling": {"temperature": {"a": 1}, "top_p": True, "logprobs_mode": 3}},
        {"finish_reason": 3},
        {"finish_reason": ["stop"]},
    ],
)
async def test_what_another_writer_put_into_the_extras_costs_no_sibling_anything(tmp_path, extras):
    chains = [Chain("run.0.0.0"), Chain("run.0.1.0", seed=1)]
    chains[0].call(extras=extras)
    chains[1].call(extras={"finish_reason": "stop", "sampling": {"temperature": 0.5}})
    calls, rows = await write(tmp_path, [outcome(i, chains[i], "c0") for i in range(2)], chains)
    assert rows["sample_mask"].to_list() == [1, 1]
    assert calls["finish_reason"].to_list() == [None, "stop"]
    assert staged_call(calls.row(0, named=True)).extras == extras
    assert [row.sampling for row in read_group(tmp_path, "g0").rows] == [[{}], [{"temperature": 0.5}]]
