"""Verifier: what it proves, what it refuses, and in which order it looks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chains import Chain
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import ReceiptRejected
from workbench.finalizer.verify import verify_and_linearize
from workbench.wire import Cause, RolloutReceipt, StagedCall, chain_hash, hash_token_ids

HEX = "ab" * 32


def story() -> Chain:
    """Root c0, retry c1 of it, c2 continues c1, side branch c3 of c1, terminal c4 on c2."""
    chain = Chain("run.g.0.0", seed=3, weight_version=1)
    chain.call(carry=6, generated=4)
    chain.call(carry=6, generated=5, extras={"finish_reason": "stop"})
    chain.call("c1", carry=3, generated=4, weight_version=2)
    chain.call("c1", carry=2, generated=2)
    chain.call("c2", carry=1, generated=3, weight_version=3)
    return chain


def altered(call: StagedCall, **fields: Any) -> StagedCall:
    return StagedCall.unverified(**{**call.__dict__, **fields})


def redigested(call: StagedCall, **fields: Any) -> StagedCall:
    changed = altered(call, **fields)
    return altered(changed, digest=changed.recompute_digest())


class Case:
    """A receipt and its staged calls, to be spoilt before they are verified."""

    def __init__(self) -> None:
        self.chain = story()
        self.receipt = self.chain.receipt("c4")
        self.staged = list(self.chain.staged)

    def set_receipt(self, **fields: Any) -> None:
        self.receipt = self.receipt.model_copy(update=fields)

    def set_row(self, index: int, **fields: Any) -> None:
        rows = list(self.receipt.manifest)
        rows[index] = rows[index].model_copy(update=fields)
        self.set_receipt(manifest=rows)

    def set_both(self, index: int, **fields: Any) -> None:
        """Change a staged call and its row alike, with a digest that fits: only later checks can see it."""
        self.staged[index] = redigested(self.staged[index], **fields)
        row = {name: value for name, value in fields.items() if name in type(self.receipt.manifest[0]).model_fields}
        self.set_row(index, digest=self.staged[index].digest, **row)

    def rejection(self) -> ReceiptRejected:
        with pytest.raises(ReceiptRejected) as caught:
            verify_and_linearize(self.receipt, self.staged)
        assert isinstance(caught.value.cause, Cause)
        return caught.value


def test_ids_equal_the_last_calls_engine_prompt_and_sampled_ids() -> None:
    case = Case()
    row = verify_and_linearize(case.receipt, case.staged)
    assert row.token_ids.tolist() == case.chain.ids["c4"].tolist()
    assert row.token_ids.dtype == np.uint64
    assert row.token_mask.dtype == row.logprobs.dtype == np.float32
    on_chain = [case.staged[index] for index in (1, 2, 4)]
    assert row.logprobs.tobytes() == b"".join(call.generation_log_probs_delta.tobytes() for call in on_chain)
    assert row.token_mask.tobytes() == b"".join(call.token_mask_delta.tobytes() for call in on_chain)
    assert row.rollout_id == "run.g.0.0"
    assert row.model_call_ids == ["c1", "c2", "c4"]
    assert row.prompt_len == 6
    assert row.weight_versions == [1, 2, 3]
    assert row.weight_version_spans == [("c1", 0, 11, 1), ("c2", 11, 18, 2), ("c4", 18, 22, 3)]
    assert row.link_spans == [("c1", 6, 5), ("c2", 3, 4), ("c4", 1, 3)]
    assert row.extras_commitments == [(call.model_call_id, call.extras_digest) for call in on_chain]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.booleans()), min_size=1, max_size=8), st.data())
def test_any_call_of_any_tree_linearises_to_its_own_sequence(
    shape: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    chain = Chain("r", seed=len(shape))
    for number, (carry, generated, is_root) in enumerate(shape):
        parent = None if number == 0 or is_root else f"c{data.draw(st.integers(0, number - 1))}"
        chain.call(parent, carry=carry, generated=generated)
    for terminal, ids_T in chain.ids.items():
        row = verify_and_linearize(chain.receipt(terminal), chain.staged)
        assert row.token_ids.tolist() == ids_T.tolist()
        assert sum(carry + generated for _, carry, generated in row.link_spans) == len(ids_T)


def test_a_terminal_in_the_middle_gives_the_shorter_row() -> None:
    case = Case()
    case.set_receipt(terminal_model_call_id="c2")
    assert verify_and_linearize(case.receipt, case.staged).model_call_ids == ["c1", "c2"]


FLIPPED = [(index, column) for index in range(5) for column in ("ids", "mask", "logprobs")]


@pytest.mark.parametrize(("index", "column"), FLIPPED)
def test_one_flipped_bit_of_any_staged_column_is_refused(index: int, column: str) -> None:
    name = {"ids": "token_ids_delta", "mask": "token_mask_delta", "logprobs": "generation_log_probs_delta"}[column]
    case = Case()
    for byte in range(getattr(case.staged[index], name).nbytes):
        case = Case()
        values = getattr(case.staged[index], name).copy()
        values.view(np.uint8)[byte] ^= 1
        case.staged[index] = altered(case.staged[index], **{name: values})
        rejected = case.rejection()
        assert rejected.cause in (Cause.CORRUPT_DIGEST, Cause.INVALID_SNAPSHOT)
        assert rejected.call_id == f"c{index}"


FIELDS = {
    "model_call_id": None,  # cannot reach its own check: identity and order come first
    "parent_call_id": "c9",
    "mode": "audio",
    "prev_len": 99,
    "delta_len": 99,
    "cum_len": 99,
    "weight_version": 99,
    "digest": HEX,
    "extras_digest": HEX,
    "chain_hash": HEX,
    "cumulative_hash": HEX,
    "schema_version": 9,
    "digest_version": 9,
    "extras_digest_version": 9,
}


@pytest.mark.parametrize("name", [name for name, value in FIELDS.items() if value is not None])
@pytest.mark.parametrize("side", ["staged", "row"])
@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_field_that_differs_between_staged_call_and_row_is_named(name: str, side: str, index: int) -> None:
    case = Case()
    if side == "staged":
        case.staged[index] = altered(case.staged[index], **{name: FIELDS[name]})
    else:
        case.set_row(index, **{name: FIELDS[name]})
    rejected = case.rejection()
    assert rejected.cause == f"wrong_{name}" and rejected.call_id == f"c{index}"


def test_fields_are_compared_in_the_contracts_order() -> None:
    names = [name for name, value in FIELDS.items() if value is not None]
    for first, second in itertools.combinations(names, 2):
        case = Case()
        case.staged[2] = altered(case.staged[2], **{first: FIELDS[first], second: FIELDS[second]})
        assert case.rejection().cause == f"wrong_{first}"


def reorder(case: Case) -> None:
    case.staged[0], case.staged[1] = case.staged[1], case.staged[0]


def repeat_first(case: Case) -> None:
    case.staged[1] = case.staged[0]


def strange_call(case: Case) -> None:
    case.staged[1] = redigested(case.staged[1], model_call_id="stranger")


def row_twice(case: Case) -> None:
    case.set_receipt(manifest=[case.receipt.manifest[0], *case.receipt.manifest])


def orphan(case: Case) -> None:
    case.set_both(3, parent_call_id="ghost")


def wrong_length(case: Case) -> None:
    case.set_both(3, prev_len=12, cum_len=16)


def broken_chain(case: Case) -> None:
    case.set_both(2, chain_hash=HEX)


def mask_back_to_zero(case: Case) -> None:
    mask = np.array([0, 0, 1, 0, 1, 1, 1], dtype=np.float32)
    logprobs = np.array([0, 0, -1, 0, -1, -1, -1], dtype=np.float32)
    case.set_both(2, token_mask_delta=mask, generation_log_probs_delta=logprobs)


def nothing_sampled(case: Case) -> None:
    empty = np.zeros(7, dtype=np.float32)
    case.set_both(2, token_mask_delta=empty, generation_log_probs_delta=empty)


def contradictory(case: Case) -> None:
    logprobs = case.staged[2].generation_log_probs_delta.copy()
    logprobs[0] = -1.0
    case.staged[2] = altered(case.staged[2], generation_log_probs_delta=logprobs)


FAULTS: dict[Cause, Callable[[Case], None]] = {
    Cause.UNSUPPORTED_SCHEMA: lambda case: case.set_receipt(schema_version=1),
    Cause.UNSUPPORTED_DIGEST: lambda case: case.set_receipt(digest_version=1),
    Cause.UNSUPPORTED_EXTRAS_DIGEST: lambda case: case.set_receipt(extras_digest_version=2),
    Cause.ROLLOUT_FAILED: lambda case: case.set_receipt(failure_reason="worker_capture_failed"),
    Cause.CAPTURE_POISONED: lambda case: case.set_receipt(capture_poisoned=True),
    Cause.DUPLICATE_MANIFEST_ROW: row_twice,
    Cause.DUPLICATE_STAGING_KEY: lambda case: case.set_row(1, staging_key=case.receipt.manifest[0].staging_key),
    Cause.ROW_COUNT_MISMATCH: lambda case: case.staged.append(case.staged[0]),
    Cause.SNAPSHOT_ORDER_MISMATCH: reorder,
    Cause.DUPLICATE_SNAPSHOT: repeat_first,
    Cause.SNAPSHOT_IDENTITY_MISMATCH: strange_call,
    Cause.WRONG_ROLLOUT: lambda case: case.staged.__setitem__(1, redigested(case.staged[1], rollout_id="other")),
    Cause.WRONG_WEIGHT_VERSION: lambda case: case.set_row(1, weight_version=9),
    Cause.INVALID_SNAPSHOT: contradictory,
    Cause.MISSING_PARENT: orphan,
    Cause.PARENT_LENGTH_MISMATCH: wrong_length,
    Cause.MISSING_TERMINAL: lambda case: case.set_receipt(terminal_model_call_id="c9"),
    Cause.CHAIN_HASH_MISMATCH: broken_chain,
    Cause.INVALID_MASK_ORDER: mask_back_to_zero,
    Cause.EMPTY_GENERATION: nothing_sampled,
    Cause.CUMULATIVE_HASH_MISMATCH: lambda case: case.set_both(4, cumulative_hash=HEX),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_every_fault_has_its_cause(cause: Cause) -> None:
    case = Case()
    FAULTS[cause](case)
    assert case.rejection().cause is cause


def test_an_empty_manifest_has_its_cause() -> None:
    case = Case()
    case.set_receipt(manifest=[])
    case.staged = []
    assert case.rejection().cause is Cause.EMPTY_MANIFEST


def test_parents_that_lead_back_to_the_same_call_are_a_cycle() -> None:
    # Lengths of a cycle cannot all fit while every delta is positive, so the walk from an earlier row must see it.
    case = Case()
    case.set_both(2, parent_call_id="c4", prev_len=22, cum_len=29)
    case.set_both(4, parent_call_id="c2", prev_len=18, cum_len=22)
    rejected = case.rejection()
    assert rejected.cause is Cause.LINEAGE_CYCLE and rejected.call_id == "c2"


def test_a_call_that_is_its_own_parent_is_refused() -> None:
    case = Case()
    case.set_both(3, parent_call_id="c3")
    assert case.rejection().cause is Cause.PARENT_LENGTH_MISMATCH


@pytest.mark.parametrize(
    ("earlier", "later"),
    list(
        itertools.pairwise(
            [
                Cause.UNSUPPORTED_SCHEMA,
                Cause.UNSUPPORTED_DIGEST,
                Cause.UNSUPPORTED_EXTRAS_DIGEST,
                Cause.ROLLOUT_FAILED,
                Cause.CAPTURE_POISONED,
                Cause.DUPLICATE_STAGING_KEY,
                Cause.ROW_COUNT_MISMATCH,
                Cause.WRONG_ROLLOUT,
                Cause.INVALID_SNAPSHOT,
                Cause.MISSING_PARENT,
                Cause.MISSING_TERMINAL,
            ]
        )
    )
    + [
        (Cause.ROW_COUNT_MISMATCH, Cause.SNAPSHOT_ORDER_MISMATCH),
        (Cause.SNAPSHOT_ORDER_MISMATCH, Cause.WRONG_WEIGHT_VERSION),
        (Cause.WRONG_WEIGHT_VERSION, Cause.INVALID_SNAPSHOT),
        (Cause.DUPLICATE_SNAPSHOT, Cause.INVALID_SNAPSHOT),
        (Cause.PARENT_LENGTH_MISMATCH, Cause.MISSING_TERMINAL),
        (Cause.PARENT_LENGTH_MISMATCH, Cause.CHAIN_HASH_MISMATCH),
        (Cause.CHAIN_HASH_MISMATCH, Cause.INVALID_MASK_ORDER),
        (Cause.CHAIN_HASH_MISMATCH, Cause.EMPTY_GENERATION),
        (Cause.INVALID_MASK_ORDER, Cause.CUMULATIVE_HASH_MISMATCH),
        (Cause.EMPTY_GENERATION, Cause.CUMULATIVE_HASH_MISMATCH),
    ],
)
def test_of_two_faults_the_one_that_is_checked_first_is_the_cause(earlier: Cause, later: Cause) -> None:
    case = Case()
    FAULTS[later](case)
    FAULTS[earlier](case)
    assert case.rejection().cause is earlier


def test_an_earlier_rows_digest_comes_before_a_later_rows_fields() -> None:
    case = Case()
    case.staged[3] = altered(case.staged[3], rollout_id="run.g.9.0")
    assert case.rejection().cause is Cause.WRONG_ROLLOUT
    case.staged[1] = altered(case.staged[1], token_ids_delta=case.staged[1].token_ids_delta + np.uint64(1))
    assert (case.rejection().cause, case.rejection().call_id) == (Cause.CORRUPT_DIGEST, "c1")


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38, -0.0])
def test_log_probs_that_need_a_closer_look_get_it(odd: float) -> None:
    case = Case()
    logprobs = case.staged[1].generation_log_probs_delta.copy()
    logprobs[0 if odd == 0 else 8] = odd
    changed = altered(case.staged[1], generation_log_probs_delta=logprobs)
    if not np.isfinite(odd):
        case.staged[1] = changed
        assert case.rejection().cause is Cause.INVALID_SNAPSHOT
        return
    case.set_both(1, generation_log_probs_delta=logprobs)
    assert verify_and_linearize(case.receipt, case.staged).logprobs[:11].tobytes() == logprobs.tobytes()


def test_side_branches_are_not_checked_for_chain_mask_or_generation() -> None:
    case = Case()
    case.set_both(0, chain_hash=HEX)
    empty = np.zeros(4, dtype=np.float32)
    case.set_both(3, token_mask_delta=empty, generation_log_probs_delta=empty)
    assert verify_and_linearize(case.receipt, case.staged).model_call_ids == ["c1", "c2", "c4"]


def test_the_position_of_a_token_that_is_to_blame_is_named() -> None:
    case = Case()
    mask_back_to_zero(case)
    rejected = case.rejection()
    assert (rejected.call_id, rejected.position) == ("c2", 3)


def test_the_receipts_own_reason_is_the_detail() -> None:
    case = Case()
    case.set_receipt(failure_reason="unresolved_parent", capture_poisoned=True)
    assert case.rejection().detail == "unresolved_parent"


def test_tokens_that_no_hash_of_the_terminal_covers_are_refused() -> None:
    # A delta replaced on the whole chain, with right chain hashes: only the terminal's cumulative hash still knows.
    case = Case()
    ids = case.staged[1].token_ids_delta.copy()
    ids[2] += 1
    running = chain_hash(None, ids)
    case.set_both(1, token_ids_delta=ids, chain_hash=running, cumulative_hash=hash_token_ids(ids))
    for index in (2, 4):
        running = chain_hash(running, case.staged[index].token_ids_delta)
        case.set_both(index, chain_hash=running)
    assert case.rejection().cause is Cause.CUMULATIVE_HASH_MISMATCH


def test_staged_calls_need_not_carry_their_extras() -> None:
    case = Case()
    case.staged = [altered(call, extras=None) for call in case.staged]
    verify_and_linearize(case.receipt, case.staged)


def test_lists_are_read_like_arrays() -> None:
    case = Case()
    case.staged = [
        altered(call, token_ids_delta=call.token_ids_delta.tolist(), token_mask_delta=call.token_mask_delta.tolist())
        for call in case.staged
    ]
    assert verify_and_linearize(case.receipt, case.staged).token_ids.tolist() == case.chain.ids["c4"].tolist()


def test_arguments_that_are_no_records_are_a_type_error() -> None:
    case = Case()
    with pytest.raises(TypeError):
        verify_and_linearize(case.receipt.model_dump(), case.staged)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        verify_and_linearize(case.receipt, [*case.staged[:4], case.staged[4].model_dump()])  # type: ignore[list-item]


def test_a_long_chain_of_calls_is_walked_once() -> None:
    chain = Chain("r")
    for number in range(400):
        chain.call(f"c{number - 1}" if number else None, carry=1, generated=1)
    receipt: RolloutReceipt = chain.receipt("c399")
    assert verify_and_linearize(receipt, chain.staged).token_ids.size == 800


def test_versions_are_those_of_the_receipt() -> None:
    """A row that agrees with its staged call about a version that the receipt does not have."""
    for name in ("schema_version", "digest_version", "extras_digest_version"):
        case = Case()
        case.staged[0] = altered(case.staged[0], **{name: 9})
        case.set_row(0, **{name: 9})
        assert (case.rejection().cause, case.rejection().call_id) == (Cause(f"wrong_{name}"), "c0")


def test_a_call_that_no_digest_can_be_made_of_is_refused() -> None:
    case = Case()
    case.staged[0] = altered(case.staged[0], weight_version=-1)
    case.set_row(0, weight_version=-1)
    assert case.rejection().cause is Cause.INVALID_SNAPSHOT


def test_a_call_longer_than_a_window_is_verified_like_any_other() -> None:
    chain = Chain("run.g.0.0", seed=3)
    chain.call(carry=70_000, generated=5)
    row = verify_and_linearize(chain.receipt("c0"), list(chain.staged))
    assert (row.token_ids.size, int(row.token_mask.sum()), row.prompt_len) == (70_005, 5, 70_000)
