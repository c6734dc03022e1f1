"""Encoders and hashes against a reference that packs one value at a time."""

from __future__ import annotations

import array
import hashlib
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WireError
from workbench.wire import chain_hash, extras_digest, hash_token_ids, staged_call_digest
from workbench.wire.encoding import big_endian, float32_array, token_array, u64
from workbench.wire.extras import encode_extras

ids = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=50)
floats = st.lists(st.floats(allow_nan=False, width=32) | st.floats(-30, 0), max_size=50)
hexes = st.binary(min_size=32, max_size=32).map(bytes.hex)
finite = st.floats(allow_nan=False, allow_infinity=False)
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def slow_ids(values: list[int]) -> bytes:
    out = struct.pack(">Q", len(values))
    for value in values:
        out += struct.pack(">Q", value)
    return out


def slow_hash(values: list[int]) -> str:
    return hashlib.sha256(b"nemo-gym-staging-prefix-v2" + slow_ids(values)).hexdigest()


def slow_floats(values: list[float]) -> bytes:
    out = struct.pack(">Q", len(values))
    for value in values:
        out += struct.pack(">f", value)
    return out


def slow_text(value: str) -> bytes:
    return struct.pack(">Q", len(value.encode())) + value.encode()


def slow_tree(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"B" + bytes([value])
        case int():
            return b"I" + struct.pack(">q", value)
        case float():
            return b"F" + struct.pack(">d", value)
        case str():
            return b"S" + slow_text(value)
        case list():
            return b"L" + struct.pack(">Q", len(value)) + b"".join(map(slow_tree, value))
    keys = sorted(value, key=str.encode)
    return b"D" + struct.pack(">Q", len(keys)) + b"".join(slow_text(k) + slow_tree(value[k]) for k in keys)


def float_bytes(values: Any) -> bytes:
    return big_endian(float32_array(values)).tobytes()


@given(ids)
def test_cumulative_hash_is_over_every_id_of_any_container(values: list[int]) -> None:
    expected = slow_hash(values)
    assert hash_token_ids(values) == expected
    assert hash_token_ids(tuple(values)) == expected
    assert hash_token_ids(array.array("Q", values)) == expected
    assert hash_token_ids(np.array(values, dtype=np.uint64)) == expected
    assert hash_token_ids(np.repeat(np.array(values, dtype=np.uint64), 2)[::2]) == expected  # not contiguous
    assert hash_token_ids(np.array(values, dtype=">u8")) == expected


@given(st.lists(st.integers(0, 127), max_size=20), st.sampled_from(["int8", "uint8", "int32", "uint32", "int64"]))
def test_narrow_integer_arrays_are_hashed_like_lists(values: list[int], dtype: str) -> None:
    assert hash_token_ids(np.array(values, dtype=dtype)) == slow_hash(values)


@given(floats)
def test_floats_round_to_nearest_float32_and_keep_their_sign(values: list[float]) -> None:
    if all(map(math.isfinite, values)):
        assert float_bytes(values) == slow_floats(values)[8:]
        assert float_bytes(np.array(values, dtype=np.float64)) == slow_floats(values)[8:]
    else:
        with pytest.raises(WireError):
            float_bytes(values)


def test_minus_zero_and_halfway_values_keep_their_bits() -> None:
    assert float_bytes([-0.0]) == b"\x80\x00\x00\x00"
    halfway = 1.0 + 2.0**-24  # between two float32 values: round to even
    assert float_bytes([halfway]) == struct.pack(">f", 1.0)


@given(st.none() | hexes, ids)
def test_chain_hash_is_over_the_parent_and_the_delta(parent: str | None, values: list[int]) -> None:
    head = b"\x00" if parent is None else b"\x01" + bytes.fromhex(parent)
    expected = hashlib.sha256(b"nemo-gym-staging-chain-v1" + head + slow_ids(values)).hexdigest()
    assert chain_hash(parent, values) == expected


@given(trees)
def test_extras_encode_as_a_typed_tree(tree: Any) -> None:
    assert encode_extras(tree) == slow_tree(tree)


@given(st.none() | st.dictionaries(st.text(), trees, max_size=4))
def test_extras_digest_is_over_version_and_tree(tree: dict[str, Any] | None) -> None:
    expected = hashlib.sha256(b"nemo-gym-staging-extras-v1" + b"\x01" + slow_tree(tree)).hexdigest()
    assert extras_digest(tree) == expected


@pytest.mark.parametrize("parent", ["AB" * 32, " ".join(["ab"] * 32), "ab" * 31, "0x" + "ab" * 31, "", b"ab"])
def test_a_hash_is_64_lowercase_hex_digits_and_nothing_that_reads_like_them(parent: Any) -> None:
    with pytest.raises(WireError, match="parent_chain_hash must be 64 lowercase hex digits"):
        chain_hash(parent, [1])


@given(st.data())
def test_call_digest_is_over_identity_columns_and_hashes(data: st.DataObject) -> None:
    carry = data.draw(st.integers(0, 5))
    logprobs = data.draw(st.lists(st.floats(-30, 0), max_size=8))
    size = carry + len(logprobs)
    if size == 0:
        return
    token_ids = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=size, max_size=size))
    parent = data.draw(st.none() | st.text(min_size=1))
    prev_len = data.draw(st.integers(1, 2**40)) if parent is not None else 0
    fields: dict[str, Any] = {
        "schema_version": 2,
        "digest_version": 2,
        "extras_digest_version": 1,
        "rollout_id": data.draw(st.text(min_size=1)),
        "model_call_id": data.draw(st.text(min_size=1)),
        "parent_call_id": parent,
        "mode": "text" if parent is None else "token_in",
        "prev_len": prev_len,
        "delta_len": size,
        "cum_len": prev_len + size,
        "weight_version": data.draw(st.integers(0, 2**64 - 1)),
        "token_ids_delta": token_ids,
        "token_mask_delta": [0.0] * carry + [1.0] * len(logprobs),
        "generation_log_probs_delta": [0.0] * carry + logprobs,
        "extras_digest": data.draw(hexes),
        "chain_hash": data.draw(hexes),
        "cumulative_hash": data.draw(hexes),
    }
    columns = [
        slow_ids(token_ids),
        slow_floats(fields["token_mask_delta"]),
        slow_floats(fields["generation_log_probs_delta"]),
    ]
    expected = hashlib.sha256(
        b"nemo-gym-staging-call-v2\x02\x02\x01"
        + slow_text(fields["rollout_id"])
        + slow_text(fields["model_call_id"])
        + (b"\x00" if parent is None else b"\x01" + slow_text(parent))
        + slow_text(fields["mode"])
        + struct.pack(">QQQQ", prev_len, size, prev_len + size, fields["weight_version"])
        + b"".join(struct.pack(">Q", len(column)) + column for column in columns)
        + bytes.fromhex(fields["extras_digest"])
        + b"\x01"
        + bytes.fromhex(fields["chain_hash"])
        + b"\x01"
        + bytes.fromhex(fields["cumulative_hash"])
    ).hexdigest()
    assert staged_call_digest(**fields) == expected
    as_arrays = {
        "token_ids_delta": np.array(token_ids, dtype=np.uint64),
        "token_mask_delta": np.array(fields["token_mask_delta"], dtype=np.float32),
        "generation_log_probs_delta": np.array(fields["generation_log_probs_delta"], dtype=np.float64),
    }
    assert staged_call_digest(**{**fields, **as_arrays}) == expected


@pytest.mark.parametrize(
    "values",
    [
        [1, -1],
        [1, 2**64],
        [1, True],
        [False],
        [1, 2.0],
        ["1"],
        [[1]],
        [None],
        "12",
        b"12",
        np.array([1.0]),
        np.array([1, -1]),
        np.array([[1]]),
        np.array([True]),
        array.array("d", [1.0]),
        None,
        3,
    ],
)
def test_what_is_no_column_of_ids_is_refused(values: Any) -> None:
    with pytest.raises(WireError):
        token_array(values)


def test_the_position_of_a_bad_id_is_named() -> None:
    with pytest.raises(WireError, match="position 2 is -7"):
        token_array([1, 2, -7])
    with pytest.raises(WireError, match="position 1 is negative"):
        token_array(np.array([3, -1, -2]))
    with pytest.raises(WireError, match="position 1 is a bool"):
        token_array([5, True])


@pytest.mark.parametrize(
    "values",
    [
        [math.nan],
        [0.0, -math.inf],
        [-3.5e38],
        [3.4028235677973366e38],  # exactly between the largest float32 and infinity: rounds to infinity
        [True],
        ["0.5"],
        [None],
        "0.5",
        np.array([1]),
        np.array([[0.5]]),
        np.array([np.inf], dtype=np.float32),
        None,
    ],
)
def test_what_is_no_column_of_finite_float32_is_refused(values: Any) -> None:
    with pytest.raises(WireError):
        float32_array(values)


def test_the_largest_float32_and_what_rounds_to_it_pass() -> None:
    largest = float(np.finfo(np.float32).max)
    assert float32_array([largest, 3.4028235e38, -largest]).tolist() == [largest, largest, -largest]


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, True, "1", None])
def test_u64_takes_unsigned_ints_only(value: Any) -> None:
    with pytest.raises(WireError):
        u64(value)


def test_arrays_that_fit_are_not_copied() -> None:
    column = np.arange(5, dtype=np.uint64)
    assert token_array(column) is column
    encoded = big_endian(column)
    assert big_endian(encoded) is encoded


@pytest.mark.parametrize(
    "tree",
    [
        {"a": (1, 2)},
        {"a": b"x"},
        {"a": math.nan},
        {"a": math.inf},
        {"a": 2**63},
        {"a": -(2**63) - 1},
        {"a": np.int64(1)},
        {"a": np.float32(1)},
        {"a": {1: 2}},
        {"a": {None: 2}},
        {"a": {1, 2}},
        {"a": "\ud800"},
        [1],
        "text",
        1,
    ],
)
def test_extras_that_could_be_encoded_in_two_ways_are_refused(tree: Any) -> None:
    with pytest.raises(WireError):
        extras_digest(tree)


def test_the_place_of_a_bad_extra_is_named() -> None:
    with pytest.raises(WireError, match=r"extras\.spans\[1\]\.end is a tuple"):
        extras_digest({"spans": [1, {"end": (1,)}]})


def test_null_and_empty_extras_differ() -> None:
    assert extras_digest(None) != extras_digest({})


def digest_fields() -> dict[str, Any]:
    digest = "0" * 64
    return {
        "schema_version": 2,
        "digest_version": 2,
        "extras_digest_version": 1,
        "rollout_id": "r",
        "model_call_id": "c1",
        "parent_call_id": "c0",
        "mode": "token_in",
        "prev_len": 1,
        "delta_len": 1,
        "cum_len": 2,
        "weight_version": 1,
        "token_ids_delta": [7],
        "token_mask_delta": [1.0],
        "generation_log_probs_delta": [-0.5],
        "extras_digest": digest,
        "chain_hash": digest,
        "cumulative_hash": digest,
    }


@pytest.mark.parametrize("field", ["prev_len", "delta_len", "cum_len", "weight_version"])
@pytest.mark.parametrize("value", [None, "1", 1.0, True, -1, 2**64])
def test_a_length_that_is_no_unsigned_int_has_no_digest(field: str, value: Any) -> None:
    assert len(staged_call_digest(**digest_fields())) == 64
    with pytest.raises(WireError):
        staged_call_digest(**digest_fields() | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mode", "token", "mode must be 'text' or 'token_in'"),
        ("token_mask_delta", [1], "mask must be floats"),
        ("generation_log_probs_delta", [0], "log-probs must be floats"),
        ("rollout_id", 7, "must be a string, got int"),
    ],
)
def test_a_field_of_another_kind_has_no_digest(field: str, value: Any, says: str) -> None:
    with pytest.raises(WireError, match=says):
        staged_call_digest(**digest_fields() | {field: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parent_call_id": ""}, "ids must not be empty"),
        (
            {"delta_len": 0, "cum_len": 1}
            | {name: [] for name in ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")},
            "a staged delta must hold at least one token",
        ),
        # Rounded to float32 first it would be 0, and the digest one over another log-prob than the one that came.
        ({"token_mask_delta": [0.0], "generation_log_probs_delta": [-1e-50]}, "must have log-prob 0, got -1e-50"),
    ],
)
def test_a_call_that_contradicts_itself_has_no_digest(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(WireError, match=says):
        staged_call_digest(**digest_fields() | changes)
