"""Links: the staged calls of one rollout, each checked against itself, and their columns joined for hashing.

In: a manifest row and its staged call. Out: a `Link`, or ReceiptRejected with cause `invalid_snapshot`,
`corrupt_digest`, `invalid_mask_order` or `empty_generation`.
Invariant: columns are checked before they are joined; ids and log-probs are turned big-endian once for all calls.
Not here: checks between calls, the order of the checks (`verify`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from workbench.errors import ReceiptRejected, WireError
from workbench.wire import CallRecord, Cause, StagedCall
from workbench.wire.digests import check_shape, check_sizes, check_versions, hash_call_columns, mask_and_logprobs
from workbench.wire.encoding import big_endian, token_array

_WINDOW = 65_536  # tokens
_STEP = np.repeat(np.array([0.0, 1.0], dtype=np.float32), _WINDOW).tobytes()
"""Every plain mask of up to `_WINDOW` tokens is a stretch of this: zeros, then ones."""
_FLOAT32 = np.dtype(np.float32)
_STEP_BIG_ENDIAN = np.frombuffer(_STEP, dtype=np.float32).astype(">f4")


@dataclass(eq=False)
class Link:
    """One staged call whose fields and columns of T tokens were checked, and where it begins in `Joined`."""

    record: CallRecord
    staged: StagedCall
    ids: np.ndarray  # uint64[T]
    mask: np.ndarray  # float32[T]
    logprobs: np.ndarray  # float32[T]
    carry: int | None  # None where the mask is not carry-then-generation
    start: int = 0

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.ids.size)


@dataclass
class Joined:
    """The columns of several calls, one after another; ids and log-probs big-endian, as they are hashed.

    One conversion for all: call by call took longer than hashing. It is fresh memory that costs, and this is turned
    back in place. A mask is almost always a stretch of `_STEP_BIG_ENDIAN`, so masks are not converted at all.
    """

    ids: np.ndarray  # >u8
    mask: np.ndarray  # float32
    logprobs: np.ndarray  # >f4

    @classmethod
    def of(cls, links: list[Link]) -> Joined:
        """Join, and tell each link its place."""
        end = 0
        for link in links:
            link.start, end = end, end + link.ids.size
        return cls(
            np.concatenate([link.ids for link in links], dtype=">u8"),
            np.concatenate([link.mask for link in links]),
            np.concatenate([link.logprobs for link in links], dtype=">f4"),
        )

    def into_native(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three columns in the machine's byte order, in the same memory."""
        ids_T, logprobs_T = (
            column.byteswap(inplace=True).view(column.dtype.newbyteorder()) for column in (self.ids, self.logprobs)
        )
        return ids_T, self.mask, logprobs_T


def reject(cause: Cause, call_id: str | None, detail: str, position: int | None = None) -> NoReturn:
    """Raise ReceiptRejected."""
    raise ReceiptRejected(cause, call_id=call_id, position=position, detail=detail)


def checked_link(record: CallRecord, staged: StagedCall) -> Link:
    """A link whose versions, shape and columns are right, its digest not yet looked at; else `invalid_snapshot`."""
    call = staged.model_call_id
    where = f"call {call}"
    try:
        check_versions(staged.schema_version, staged.digest_version, staged.extras_digest_version, where)
        check_shape(
            staged.rollout_id,
            call,
            staged.parent_call_id,
            staged.mode,
            staged.prev_len,
            staged.delta_len,
            staged.cum_len,
            where,
        )
        ids_T = token_array(staged.token_ids_delta, "token ids")
        mask_T, logprobs_T = staged.token_mask_delta, staged.generation_log_probs_delta
        carry = _plain_carry(mask_T, logprobs_T)
        if carry is None:
            mask_T, logprobs_T = mask_and_logprobs(mask_T, logprobs_T, where, strict=False)
        check_sizes(staged.delta_len, ids_T, mask_T, logprobs_T, where)
    except WireError as error:
        reject(Cause.INVALID_SNAPSHOT, call, str(error))
    return Link(record, staged, ids_T, mask_T, logprobs_T, carry)


def check_digest(link: Link, joined: Joined) -> None:
    """Recompute the call digest of a link that stands in `joined`; `corrupt_digest` where it is another."""
    staged, span = link.staged, link.span
    try:
        digest = hash_call_columns(
            rollout_id=staged.rollout_id,
            model_call_id=staged.model_call_id,
            parent_call_id=staged.parent_call_id,
            mode=staged.mode,
            prev_len=staged.prev_len,
            delta_len=staged.delta_len,
            cum_len=staged.cum_len,
            weight_version=staged.weight_version,
            ids_be_T=joined.ids[span],
            mask_be_T=_big_endian_mask(link),
            logprobs_be_T=joined.logprobs[span],
            extras_digest=staged.extras_digest,
            chain_hash=staged.chain_hash,
            cumulative_hash=staged.cumulative_hash,
        )
    except WireError as error:
        reject(Cause.INVALID_SNAPSHOT, staged.model_call_id, str(error))
    if digest != staged.digest:
        detail = f"contents give {digest}, the staged call says {staged.digest}"
        reject(Cause.CORRUPT_DIGEST, staged.model_call_id, detail)


def _big_endian_mask(link: Link) -> np.ndarray:
    """The mask of a link, >f4[T]."""
    if link.carry is None:
        return big_endian(link.mask)
    return _STEP_BIG_ENDIAN[_WINDOW - link.carry :][: link.mask.size]


def _plain_carry(mask_T: np.ndarray, logprobs_T: np.ndarray) -> int | None:
    """Length of the carry when both columns are float32, finite and carry-then-generation; None to look closer."""
    for column in (mask_T, logprobs_T):
        if not isinstance(column, np.ndarray) or column.dtype != _FLOAT32 or column.ndim != 1:
            return None
    size = mask_T.size
    if not 0 < size <= _WINDOW:
        return None
    carry = int(mask_T.argmax())
    # Compared as bytes: that is several times quicker than element by element, and -0.0 is for the closer look.
    if mask_T.tobytes() != _STEP[4 * (_WINDOW - carry) : 4 * (_WINDOW - carry + size)]:
        return None
    # A sum of squares is finite where every term is, or overflows: for the closer look too. `vdot` does not warn of it.
    if logprobs_T[:carry].tobytes() != _STEP[: 4 * carry] or not math.isfinite(np.vdot(logprobs_T, logprobs_T)):
        return None
    return carry


def carry_of(link: Link) -> int:
    """Length of the carry. Rejects a mask that goes back to 0 after a 1, and a call without a sampled token."""
    call_id, size = link.record.model_call_id, link.mask.size
    carry = link.carry
    if carry is None:
        sampled = np.flatnonzero(link.mask)
        carry = int(sampled[0]) if sampled.size else size
        back = np.flatnonzero(link.mask[carry:] != 1.0)
        if back.size:
            position = carry + int(back[0])
            reject(Cause.INVALID_MASK_ORDER, call_id, "a carried token stands after a sampled one", position)
    if carry == size:
        reject(Cause.EMPTY_GENERATION, call_id, f"none of its {size} tokens was sampled")
    return carry
