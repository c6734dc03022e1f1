"""Damage: exhibits made of an honest rollout, between its last call and its verification.

`RECEIPTS`: what can go wrong in saying which call was the last one. `VERIFICATION`: what recomputing everything finds,
in the order in which the verifier looks. Invariant: each exhibit changes one thing, and where that alone would be found
sooner (a wrong digest), the lie is made consistent up to the check that it is about.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from workbench.demo.gallery.exhibit import ASK, MORE, Case, Exhibit, Hand
from workbench.ledger import LedgerStore, assemble_receipt
from workbench.wire import Cause

C = Cause
HEX = "ab" * 32


# -- agents that leave two possible ends ------------------------------------------------------------------------------


async def retried_end(hand: Hand) -> None:
    """The last request is sent twice, and nobody says which answer was scored."""
    answer = await hand.say(ASK)
    for _ in range(2):
        await hand.say(ASK, answer, MORE)
    hand.last = None


async def mixed_witness(hand: Hand) -> None:
    """What is scored has the id of the first response and the words of the second."""
    answer = await hand.say(ASK)
    first = hand.last
    await hand.say(ASK, answer, MORE)
    assert first is not None and hand.last is not None
    hand.last = {**hand.last, "id": first["id"]}


async def same_answer_to_two(hand: Hand) -> None:
    """Two questions, one answer, and a scored response without an id."""
    await hand.say(ASK)
    await hand.say(MORE)
    assert hand.last is not None
    hand.last = {**hand.last, "id": ""}


async def invented_response(hand: Hand) -> None:
    """What is scored is no response of the model at all."""
    await hand.say(ASK)
    hand.last = {"id": "invented", "choices": [{"message": {"role": "assistant", "content": "Something else."}}]}


async def damaged_ledger(hand: Hand) -> None:
    """Between two calls and the end, a line of the ledger turns into something else."""
    await hand.say(ASK)
    ledger = hand.bench.path / "ledger" / f"{hand.rollout_id}.lineage.jsonl"
    ledger.write_bytes(b"{broken\n" + ledger.read_bytes())


# -- receipts ---------------------------------------------------------------------------------------------------------


def _swap_receipt(case: Case) -> None:
    case.set_receipt(rollout_id="somebody.else.0.0")


def _poison(case: Case) -> None:
    case.set_receipt(capture_poisoned=True, terminal_model_call_id=None, terminal_selection=None)


def _circle(case: Case) -> None:
    first, second = case.records
    length = second.cum_len
    child = {"parent_call_id": second.model_call_id, "mode": "token_in", "prev_len": length}
    case.attribute_again([first.model_copy(update={**child, "cum_len": length + first.delta_len}), second])


def _double(case: Case) -> None:
    case.attribute_again([*case.records, case.records[0]])


def _orphan(case: Case) -> None:
    case.attribute_again(case.records[1:])


def _declare_stranger(case: Case) -> None:
    case.attribute_again(declared="resp-of-nobody")


def _declare_two(case: Case) -> None:
    shared = [record.model_copy(update={"response_id": "one-id-for-both"}) for record in case.records]
    case.attribute_again(shared, declared="one-id-for-both")


def _no_response_id(case: Case) -> None:
    """The ledger file of a writer that left the id empty, read by our store."""
    name = case.outcome.rollout_id
    with tempfile.TemporaryDirectory() as folder:
        rows = [orjson.loads(line) for line in case.ledger.read_bytes().splitlines()]
        rows[-1]["response_id"] = ""
        (Path(folder) / case.ledger.name).write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        manifest = LedgerStore(folder).manifest(name)
    receipt = assemble_receipt(manifest, rollout_id=name, reward=case.outcome.reward)
    case.set_outcome(receipt=receipt, failures=manifest.failures)


RECEIPTS = (
    Exhibit(C.LEDGER_ROW_MISSING_RESPONSE_ID, "the ledger's writer left the response id empty", spoil=_no_response_id),
    Exhibit(C.MISSING_RECEIPT, "a line of the rollout's ledger is damaged before it is closed", damaged_ledger),
    Exhibit(C.IDENTITY_MISMATCH, "the receipt of another rollout arrives", spoil=_swap_receipt),
    Exhibit(C.CAPTURE_POISONED, "the receipt says that it is poisoned and not why", spoil=_poison),
    Exhibit(C.DUPLICATE_CALL_ID, "a row of the ledger stands there twice", spoil=_double),
    Exhibit(C.NO_ROOT, "two rows of the ledger name each other as parents", spoil=_circle),
    Exhibit(C.ORPHANED_ROW, "the root's row is lost from the ledger", spoil=_orphan),
    Exhibit(C.AMBIGUOUS_TERMINAL, "the last request is sent twice, and no response is scored", retried_end),
    Exhibit(C.WITNESS_DISAGREEMENT, "the scored response has one call's id and another call's words", mixed_witness),
    Exhibit(
        C.CONTENT_AMBIGUOUS,
        "two calls gave the same answer, and the scored response has no id",
        same_answer_to_two,
        ({"text": "It rains."},),
    ),
    Exhibit(
        C.DECLARED_TERMINAL_NOT_CAPTURED, "the harness declares a response that no call gave", spoil=_declare_stranger
    ),
    Exhibit(C.DECLARED_AMBIGUOUS, "the harness declares an id that two calls carry", spoil=_declare_two),
    Exhibit(C.MISSING_TERMINAL, "what is scored is no response of the model", invented_response),
)


# -- verification -----------------------------------------------------------------------------------------------------


def _receipt(**fields: Any) -> Any:
    return lambda case: case.set_receipt(**fields)


def _staged(index: int, **fields: Any) -> Any:
    return lambda case: case.set_staged(index, **fields)


def _both(index: int, **fields: Any) -> Any:
    return lambda case: case.set_both(index, **fields)


def _flip_token(case: Case) -> None:
    ids_T = case.calls[1].token_ids_delta.copy()
    ids_T[4] ^= 1
    case.set_staged(1, token_ids_delta=ids_T)


def _contradiction(case: Case) -> None:
    length = case.calls[1].delta_len + 1
    case.set_staged(1, delta_len=length)
    case.set_row(1, delta_len=length)


def _swap(case: Case) -> None:
    first, second = case.calls
    case.put(0, second)
    case.put(1, first)


def _repeat(case: Case) -> None:
    case.put(1, case.calls[0])


def _stranger(case: Case) -> None:
    case.set_staged(1, model_call_id="a-call-of-nobody")


def _row_twice(case: Case) -> None:
    case.set_receipt(manifest=[*case.records, case.records[0]])


def _key_twice(case: Case) -> None:
    case.set_row(1, staging_key=case.records[0].staging_key)


def _too_early(case: Case) -> None:
    case.set_both(1, prev_len=3, cum_len=3 + case.calls[1].delta_len)


def _cycle(case: Case) -> None:
    first, second = case.calls
    longer = second.cum_len + first.delta_len
    case.set_both(0, parent_call_id=second.model_call_id, mode="token_in", prev_len=second.cum_len, cum_len=longer)


def _nothing_sampled(case: Case) -> None:
    size = case.calls[1].delta_len
    case.set_both(1, token_mask_delta=np.zeros(size, np.float32), generation_log_probs_delta=np.zeros(size, np.float32))


def _mask_back(case: Case) -> None:
    mask_T = case.calls[1].token_mask_delta.copy()
    logprobs_T = case.calls[1].generation_log_probs_delta.copy()
    mask_T[-2], logprobs_T[-2] = 0.0, 0.0
    case.set_both(1, token_mask_delta=mask_T, generation_log_probs_delta=logprobs_T)


def _forget(case: Case) -> None:
    del case.sink.rows[case.records[1].staging_key]


def _tear(case: Case) -> None:
    row = case.sink.rows[case.records[1].staging_key]
    row["token_ids"] = row["token_ids"][:2]


STORAGE = (
    Exhibit(C.MISSING_STAGING_ROW, "the storage unit that held the second call is gone", spoil=_forget),
    Exhibit(C.INVALID_STAGING_ROW, "the second call's row comes back with two tokens only", spoil=_tear),
)
WRONG = {
    "parent_call_id": "another-parent",
    "mode": "text",
    "prev_len": 3,
    "delta_len": 3,
    "cum_len": 3,
    "weight_version": 9,
    "digest": HEX,
    "extras_digest": HEX,
    "chain_hash": HEX,
    "cumulative_hash": HEX,
    "schema_version": 9,
    "digest_version": 9,
    "extras_digest_version": 9,
}
VERIFICATION = (
    Exhibit(C.UNSUPPORTED_SCHEMA, "a receipt of another schema version", spoil=_receipt(schema_version=1)),
    Exhibit(C.UNSUPPORTED_DIGEST, "a receipt of another digest version", spoil=_receipt(digest_version=1)),
    Exhibit(
        C.UNSUPPORTED_EXTRAS_DIGEST, "a receipt of another extras version", spoil=_receipt(extras_digest_version=2)
    ),
    Exhibit(C.EMPTY_MANIFEST, "the receipt lists no call", spoil=_receipt(manifest=[])),
    Exhibit(C.DUPLICATE_MANIFEST_ROW, "the receipt lists a call twice", spoil=_row_twice),
    Exhibit(C.DUPLICATE_STAGING_KEY, "two rows of the receipt name one key", spoil=_key_twice),
    Exhibit(C.DUPLICATE_SNAPSHOT, "storage answers twice with the same call", spoil=_repeat),
    Exhibit(C.SNAPSHOT_IDENTITY_MISMATCH, "storage answers with a call that nobody asked for", spoil=_stranger),
    Exhibit(C.SNAPSHOT_ORDER_MISMATCH, "storage answers in another order", spoil=_swap),
    Exhibit(C.WRONG_ROLLOUT, "storage answers with another rollout's call", spoil=_staged(1, rollout_id="another")),
    *(
        Exhibit(
            Cause(f"wrong_{name}"), f"{name} of the stored call is not the receipt's", spoil=_staged(1, **{name: to})
        )
        for name, to in WRONG.items()
    ),
    Exhibit(C.INVALID_SNAPSHOT, "call and receipt agree on a length that the tokens do not have", spoil=_contradiction),
    Exhibit(C.CORRUPT_DIGEST, "one bit of one token is flipped in storage", spoil=_flip_token),
    Exhibit(C.MISSING_PARENT, "a call names a parent that is not there", spoil=_both(1, parent_call_id="ghost")),
    Exhibit(C.PARENT_LENGTH_MISMATCH, "a call begins three tokens into its parent", spoil=_too_early),
    Exhibit(C.LINEAGE_CYCLE, "two calls are each other's parent", spoil=_cycle),
    Exhibit(C.CHAIN_HASH_MISMATCH, "a chain hash that the deltas do not give", spoil=_both(1, chain_hash=HEX)),
    Exhibit(C.INVALID_MASK_ORDER, "a token in the middle of the answer is called carried", spoil=_mask_back),
    Exhibit(C.EMPTY_GENERATION, "a call of the chain sampled nothing", spoil=_nothing_sampled),
    Exhibit(C.CUMULATIVE_HASH_MISMATCH, "a whole sequence of another hash", spoil=_both(1, cumulative_hash=HEX)),
)
