"""Records: what parses, what is refused, and that no single changed field goes unnoticed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from chains import Chain
from pydantic import ValidationError

from workbench.errors import WireError
from workbench.wire import (
    CallRecord,
    CaptureAdmission,
    CommitCoords,
    ManifestFailure,
    RolloutManifest,
    RolloutReceipt,
    StagedCall,
    check_rollout_id,
    staging_key,
)

HEX = "ab" * 32


def staged() -> StagedCall:
    chain = Chain("run.g.0.0", weight_version=3)
    chain.call()
    return chain.call("c0", extras={"finish_reason": "stop"})


CHANGES: dict[str, Any] = {
    "schema_version": 3,
    "digest_version": 1,
    "extras_digest_version": 2,
    "rollout_id": "run.g.0.1",
    "model_call_id": "c2",
    "parent_call_id": "c9",
    "mode": "text",
    "prev_len": 13,
    "delta_len": 13,
    "cum_len": 25,
    "weight_version": 4,
    "digest": HEX,
    "extras_digest": HEX,
    "chain_hash": HEX,
    "cumulative_hash": HEX,
    "extras": {"finish_reason": "length"},
}


def test_a_staged_call_is_equal_to_its_copy_alone() -> None:
    call, other = staged(), staged().model_copy(update={"weight_version": 4})
    assert len({call, staged()}) == 1
    assert call != other and call != "a call"


def test_a_staged_call_comes_back_from_its_json_bit_for_bit() -> None:
    call = staged()
    again = StagedCall.model_validate(call.model_dump(mode="json"))
    assert again == call
    assert again.token_ids_delta.dtype == np.uint64
    assert again.token_mask_delta.dtype == again.generation_log_probs_delta.dtype == np.float32
    assert StagedCall.model_validate_json(call.model_dump_json()) == call
    assert StagedCall.model_validate(call.model_dump()) == call


@pytest.mark.parametrize("field", CHANGES)
def test_a_staged_call_with_one_changed_field_is_refused(field: str) -> None:
    data = staged().model_dump(mode="json")
    assert data[field] != CHANGES[field]
    with pytest.raises(ValidationError):
        StagedCall.model_validate({**data, field: CHANGES[field]})


def test_the_changes_cover_every_field_but_the_columns() -> None:
    columns = {"token_ids_delta", "token_mask_delta", "generation_log_probs_delta"}
    assert set(CHANGES) | columns == set(StagedCall.model_fields)


@pytest.mark.parametrize("position", range(12))
def test_a_staged_call_with_one_flipped_bit_in_a_column_is_refused(position: int) -> None:
    for column in ("token_ids_delta", "generation_log_probs_delta", "token_mask_delta"):
        data = copy.deepcopy(staged().model_dump())
        data[column].view(np.uint8)[position * data[column].itemsize] ^= 1
        with pytest.raises(ValidationError):
            StagedCall.model_validate(data)


@pytest.mark.parametrize(
    "change",
    [
        {"token_mask_delta": [0.0] * 5 + [1.0] * 6},
        {"token_mask_delta": [0.0] * 4 + [0.5] + [1.0] * 7},
        {"token_mask_delta": [0.0] * 5 + [True] * 7},
        {"generation_log_probs_delta": [0.0] * 4 + [-1e-60] + [-1.0] * 7},
        {"generation_log_probs_delta": [0.0] * 5 + [float("nan")] * 7},
        {"token_ids_delta": [-1] + [2] * 11},
        {"token_ids_delta": [1.0] + [2] * 11},
        {"token_ids_delta": "abc"},
        {"weight_version": True},
        {"weight_version": 1.0},
        {"weight_version": -1},
        {"rollout_id": ""},
        {"digest": HEX.upper()},
        {"digest": HEX + "\n"},
        {"unknown": 1},
    ],
)
def test_a_staged_call_that_contradicts_the_contract_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StagedCall.model_validate({**staged().model_dump(mode="json"), **change})


def test_extras_are_checked_where_they_are_present_only() -> None:
    data = staged().model_dump(mode="json")
    del data["extras"]
    assert StagedCall.model_validate(data).extras is None
    with pytest.raises(ValidationError, match="extras"):
        StagedCall.model_validate({**data, "extras": {}})


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError):
        staged().weight_version = 4  # type: ignore[misc]


def test_unverified_keeps_the_arrays_and_skips_the_digest() -> None:
    fields = {**staged().model_dump(), "digest": HEX}
    call = StagedCall.unverified(**fields)
    assert call.token_ids_delta is fields["token_ids_delta"]
    assert call.recompute_digest() != call.digest
    assert StagedCall.unverified(**staged().__dict__) == staged()
    assert StagedCall.unverified(**staged().__dict__).model_dump_json() == staged().model_dump_json()


@pytest.mark.parametrize("change", [{"colour": "red"}, {"digest": ...}])
def test_unverified_still_takes_the_records_fields_only(change: dict[str, Any]) -> None:
    fields = {**staged().__dict__, **change}
    with pytest.raises(WireError):
        StagedCall.unverified(**{name: value for name, value in fields.items() if value is not ...})


ROOT = {"rollout_id": "r", "model_call_id": "c", "mode": "text"}
CHILD = {
    **ROOT,
    "mode": "token_in",
    "parent_call_id": "p",
    "prev_len": 2,
    "staging_chain": ["r/p"],
    "parent_chain_hash": HEX,
}


@pytest.mark.parametrize("form", [ROOT, CHILD, {**CHILD, "staging_chain": [], "required_prefix_token_ids": [4, 5]}])
def test_an_admission_travels_in_a_header(form: dict[str, Any]) -> None:
    admission = CaptureAdmission.model_validate(form)
    header = admission.to_header()
    assert header.isascii() and "\n" not in header
    assert CaptureAdmission.from_header(header) == admission
    with pytest.raises((WireError, ValidationError)):
        CaptureAdmission.from_header(header[: len(header) // 2])
    with pytest.raises(WireError):
        CaptureAdmission.from_header("no base64 ä")


@pytest.mark.parametrize(
    "form",
    [
        {**ROOT, "parent_call_id": "p"},
        {**ROOT, "prev_len": 1},
        {**ROOT, "parent_chain_hash": HEX},
        {**ROOT, "staging_chain": ["r/p"]},
        {**ROOT, "required_prefix_token_ids": [1]},
        {**ROOT, "mode": "audio"},
        {**ROOT, "rollout_id": "a/b"},
        {**ROOT, "rollout_id": ".."},
        {**ROOT, "schema_version": 1},
        {**ROOT, "colour": "red"},
        {**CHILD, "parent_call_id": None},
        {**CHILD, "prev_len": 0},
        {**CHILD, "parent_chain_hash": None},
        {**CHILD, "parent_chain_hash": HEX[:-1]},
        {**CHILD, "staging_chain": []},
        {**CHILD, "required_prefix_token_ids": [4]},
        {**CHILD, "staging_chain": [], "required_prefix_token_ids": [4, -5]},
        {**CHILD, "staging_chain": [], "required_prefix_token_ids": [4, True]},
        {**CHILD, "staging_chain": [], "required_prefix_token_ids": [4, 5.0]},
        {**CHILD, "staging_chain": [], "required_prefix_token_ids": [4, 2**64]},
        {**CHILD, "staging_chain": [], "required_prefix_token_ids": {4: 0, 5: 0}},
        {**CHILD, "staging_chain": [], "required_prefix_token_ids": "45"},
    ],
)
def test_an_admission_that_is_neither_root_nor_child_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CaptureAdmission.model_validate(form)


def test_a_prefix_in_an_admission_is_a_list_of_ints_whatever_it_came_as() -> None:
    for ids in ([4, 2**64 - 1], (4, 2**64 - 1), np.array([4, 2**64 - 1], dtype=np.uint64)):
        read = CaptureAdmission.model_validate({**CHILD, "staging_chain": [], "required_prefix_token_ids": ids})
        assert read.required_prefix_token_ids == [4, 2**64 - 1]
        assert {type(value) for value in read.required_prefix_token_ids} == {int}


@pytest.mark.parametrize("rollout_id", ["run.group.0.1", "a", "A_b-c.9", "...x", "x" * 200])
def test_rollout_ids_that_are_safe_file_names_pass(rollout_id: str) -> None:
    assert check_rollout_id(rollout_id) == rollout_id


@pytest.mark.parametrize("rollout_id", ["", ".", "..", "....", "a/b", "a b", "ä", "x" * 201, "a\n", "a\x00", None, 3])
def test_other_rollout_ids_are_refused(rollout_id: Any) -> None:
    with pytest.raises(WireError):
        check_rollout_id(rollout_id)


COORDS = {
    "rollout_id": "r",
    "model_call_id": "c",
    "prev_len": 0,
    "delta_len": 3,
    "cum_len": 3,
    "weight_version": 1,
    "digest": HEX,
    "extras_digest": HEX,
    "staging_key": "r/c",
    "chain_hash": HEX,
    "cumulative_hash": HEX,
}


@pytest.mark.parametrize(
    "change",
    [
        {"cum_len": 4},
        {"delta_len": 0, "cum_len": 0},
        {"digest": None},
        {"staging_key": None},
        {"parent_call_id": "p"},
        {"disposition": "capture_failed"},
        {"disposition": "maybe"},
        {"digest": "AB" * 32},
        {"digest_version": 3},
        {"token_ids": [1]},
    ],
)
def test_coordinates_that_contradict_themselves_are_refused(change: dict[str, Any]) -> None:
    CommitCoords.model_validate(COORDS)
    with pytest.raises(ValidationError):
        CommitCoords.model_validate({**COORDS, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"cum_len": 13},
        {"prev_len": 1},
        {"delta_len": 0},
        {"parent_call_id": "p"},
        {"mode": "token_in"},
        {"response_id": ""},
        {"admitted_at": "now"},
        {"admitted_at": float("inf")},
        {"output_fingerprint": "x"},
        {"schema_version": 1},
        {"rollout_id": "r"},
    ],
)
def test_a_manifest_row_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    chain = Chain("r")
    chain.call()
    data = chain.records[0].model_dump(mode="json")
    assert CallRecord.model_validate(data) == chain.records[0]
    with pytest.raises(ValidationError):
        CallRecord.model_validate({**data, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"terminal_model_call_id": None},
        {"terminal_selection": None},
        {"terminal_selection": "guess"},
        {"terminal_model_call_id": "c7"},
        {"failure_reason": "agent_failed"},
        {"capture_poisoned": True, "terminal_selection": None},
        {"capture_poisoned": "perhaps"},
        {"manifest": []},
        {"extras_digest_version": 2},
        {"reward": float("nan")},
        {"note": "x"},
    ],
)
def test_a_receipt_in_no_documented_state_is_refused(change: dict[str, Any]) -> None:
    chain = Chain("r")
    chain.call()
    data = chain.receipt("c0").model_dump(mode="json")
    assert RolloutReceipt.model_validate(data).model_dump(mode="json") == data
    with pytest.raises(ValidationError):
        RolloutReceipt.model_validate({**data, **change})


def test_a_receipt_with_a_call_twice_is_refused() -> None:
    chain = Chain("r")
    chain.call()
    data = chain.receipt("c0").model_dump(mode="json")
    with pytest.raises(ValidationError, match="twice"):
        RolloutReceipt.model_validate({**data, "manifest": data["manifest"] * 2})


def test_a_poisoned_receipt_may_still_name_its_terminal() -> None:
    chain = Chain("r")
    chain.call()
    receipt = chain.receipt("c0", capture_poisoned=True, failure_reason="worker_capture_failed")
    assert receipt.terminal_model_call_id == "c0"


@pytest.mark.parametrize("written", [1, 1.0, "true", "yes"])
def test_a_receipt_poisoned_in_another_spelling_is_poisoned(written: object) -> None:
    chain = Chain("r")
    chain.call()
    data = chain.receipt("c0").model_dump(mode="json") | {"failure_reason": "worker_capture_failed"}
    assert RolloutReceipt.model_validate(data | {"capture_poisoned": written}).capture_poisoned is True


def test_a_failure_detail_is_left_out_where_there_is_none() -> None:
    plain = {"schema_version": 2, "model_call_id": "c", "reason": "worker_capture_failed"}
    assert ManifestFailure.model_validate(plain).model_dump(mode="json") == plain
    detailed = {**plain, "detail": "nonfinite_logprob"}
    manifest = RolloutManifest(rollout_id="r", failures=[ManifestFailure.model_validate(detailed)])
    assert manifest.model_dump(mode="json")["failures"] == [detailed]


def test_staging_keys_name_rollout_and_call() -> None:
    assert staging_key("r", "c") == "r/c"
    with pytest.raises(WireError):
        staging_key("", "c")
