"""Routes: the envelope comes back as it went, and one changed byte is seen."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from workbench.errors import WireError
from workbench.wire import classify_route_span, decode_routes, encode_routes, extras_digest
from workbench.wire.extras import ROUTED_EXPERTS

shapes = hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=5)


@given(st.sampled_from(["int8", "int16", "int32"]).flatmap(lambda dtype: hnp.arrays(dtype, shapes)))
def test_signed_routes_keep_their_dtype_and_their_text(values: np.ndarray) -> None:
    envelope = encode_routes(values)
    routes = decode_routes(envelope)
    assert routes.values.tolist() == values.tolist()
    assert routes.dtype == values.dtype.name
    assert (len(values), routes.num_layers, routes.topk) == values.shape
    assert encode_routes(routes.values) == envelope


@pytest.mark.parametrize(("dtype", "wire"), [("uint8", "int16"), ("uint16", "int32"), ("uint32", "int32")])
def test_unsigned_routes_are_widened_so_that_minus_one_fits(dtype: str, wire: str) -> None:
    top = min(np.iinfo(dtype).max, np.iinfo(np.int32).max)
    values = np.array([[[0, top]]], dtype=dtype)
    routes = decode_routes(encode_routes(values))
    assert routes.dtype == wire and routes.values.tolist() == [[[0, top]]]


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((0, 1, 1), dtype=np.int8),
        np.zeros((1, 1), dtype=np.int8),
        np.zeros((1, 1, 1)),
        np.array([[[2**31]]], dtype=np.int64),
        np.array([[[2**32 - 1]]], dtype=np.uint32),
    ],
)
def test_what_is_no_route_array_is_refused(values: np.ndarray) -> None:
    with pytest.raises(WireError):
        encode_routes(values)


def test_one_changed_byte_of_an_envelope_changes_the_digest_or_is_refused() -> None:
    envelope = encode_routes(np.arange(12, dtype=np.int16).reshape(2, 3, 2))
    committed = extras_digest({ROUTED_EXPERTS: envelope})
    original = decode_routes(envelope)
    for position in range(len(envelope)):
        changed = envelope[:position] + chr(ord(envelope[position]) ^ 1) + envelope[position + 1 :]
        assert extras_digest({ROUTED_EXPERTS: changed}) != committed
        try:
            routes = decode_routes(changed)
        except WireError:
            continue
        assert routes.dtype != original.dtype or not np.array_equal(routes.values, original.values)


@pytest.mark.parametrize(
    "payload",
    [
        "nrlre1:int16:1x1x2: AQACAA==",
        "nrlre1:int16:+1x1x2:AQACAA==",
        "nrlre1:int16:1x1x-2:AQACAA==",
        "nrlre1:int16:1x1x2x1:AQACAA==",
        "nrlre1:int64:1x1x1:AQACAAAAAAA=",
        "nrlre1:int16:1x1x2:äöüß",
        "nrlre1:int16:1x1x2",
        None,
        3,
        {},
        [[[]]],
        [[[True]]],
        [[[1], [2]], [[3]]],
        [[[2**70]]],
    ],
)
def test_other_payloads_are_refused(payload: object) -> None:
    with pytest.raises(WireError):
        decode_routes(payload)  # type: ignore[arg-type]


def test_the_bytes_are_little_endian() -> None:
    assert encode_routes(np.array([[[1]]], dtype=">i4")).split(":")[3] == base64.b64encode(b"\1\0\0\0").decode()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 20))
def test_route_spans_are_full_tail_or_sentinel(carry: int, generated: int, staged: int) -> None:
    kind = classify_route_span(carry, generated, staged)
    if staged == 0:
        assert kind == "sentinel"
    elif staged == carry + generated:
        assert kind == "full"
    else:
        assert kind == ("tail" if 0 < generated <= staged else "sentinel")


@pytest.mark.parametrize("lengths", [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (True, 1, 1), (1, 1.0, 1)])
def test_lengths_that_are_none_are_refused(lengths: tuple[int, int, int]) -> None:
    with pytest.raises(WireError, match="ints >= 0"):
        classify_route_span(*lengths)
