"""Records: what gateway, worker, ledger and finalizer hand each other about one call or one rollout.

    CaptureAdmission   gateway → worker   which call this is and which exact prefix it must begin with
    StagedCall         worker → staging   the delta: ids_T, mask_T, logprobs_T and all digests
    CommitCoords       worker → gateway   token-free acknowledgement that the delta is durable
    CallRecord         ledger             one row of the manifest
    RolloutManifest    ledger → caller    all rows and failures of a rollout
    RolloutReceipt     → finalizer        manifest, terminal call, reward
Invariant: a root is `text` without parent at prev_len 0, a child is `token_in` with a parent and prev_len > 0; a record
that contradicts itself cannot be built by validation. Unknown fields and other versions are refused.
Not here: arrays' big-endian forms (`encoding`), hashing (`digests`), checks across records (`finalizer.verify`).
"""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any, Literal, Self

import numpy as np
import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from workbench.errors import WireError
from workbench.wire.digests import (
    DIGEST_VERSION,
    SCHEMA_VERSION,
    check_shape,
    mask_and_logprobs,
    staged_call_digest,
)
from workbench.wire.encoding import U64_MAX, float32_array, token_array
from workbench.wire.extras import EMPTY_EXTRAS_DIGEST, EXTRAS_DIGEST_VERSION, extras_digest

ROLLOUT_ID = re.compile(r"^(?!\.+$)[A-Za-z0-9._-]{1,200}\Z")

Identifier = Annotated[StrictStr, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=0, le=U64_MAX)]
Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
Mode = Literal["text", "token_in"]
Selection = Literal["declared", "response_id", "content", "heuristic"]
Ids = Annotated[np.ndarray, BeforeValidator(token_array), PlainSerializer(lambda a: a.tolist(), when_used="json")]
Float32s = Annotated[
    np.ndarray, BeforeValidator(float32_array), PlainSerializer(lambda a: a.tolist(), when_used="json")
]


def _id_list(values: Any) -> list[int]:
    # Checked as one column: asking pydantic about every id took longer than all else that capture does with it.
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise WireError(f"token ids must be a list, got {type(values).__name__}")
    ids: list[int] = token_array(values).tolist()
    return ids


IdList = Annotated[list[int], PlainValidator(_id_list)]


def check_rollout_id(rollout_id: str) -> str:
    """Return the id, or raise WireError when it could not safely be a file name: 1-200 of A-Z a-z 0-9 . _ -"""
    if not isinstance(rollout_id, str) or ROLLOUT_ID.match(rollout_id) is None:
        raise WireError(f"rollout id {rollout_id!r} must be 1-200 characters of A-Z a-z 0-9 . _ - and not only dots")
    return rollout_id


def staging_key(rollout_id: str, model_call_id: str) -> str:
    """The key of a staged call: `<rollout_id>/<model_call_id>`."""
    if not rollout_id or not model_call_id:
        raise WireError("a staging key needs a rollout id and a call id")
    return f"{rollout_id}/{model_call_id}"


class WireRecord(BaseModel):
    """Frozen, closed to unknown fields, stamped with the schema version."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    schema_version: Literal[2] = SCHEMA_VERSION


class DigestedRecord(WireRecord):
    """A record whose digests are of these versions."""

    digest_version: Literal[2] = DIGEST_VERSION
    extras_digest_version: Literal[1] = EXTRAS_DIGEST_VERSION


class CaptureAdmission(WireRecord):
    """Identity of one call and the exact prefix its engine prompt must begin with.

    A child's prefix comes inline (`required_prefix_token_ids`, prev_len ids) or as `staging_chain`, the staging keys
    of root, ..., parent whose deltas concatenate to it.
    """

    rollout_id: Annotated[StrictStr, BeforeValidator(check_rollout_id)]
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: Count = 0
    mode: Mode
    required_prefix_token_ids: IdList = Field(default_factory=list)
    staging_chain: list[Identifier] = Field(default_factory=list)
    parent_chain_hash: Digest | None = None

    @model_validator(mode="after")
    def _root_or_child(self) -> Self:
        call = f"admission of {self.rollout_id}/{self.model_call_id}"
        if self.mode == "text":
            given = (self.parent_call_id, self.parent_chain_hash, self.prev_len or None)
            if any(value is not None for value in given) or self.required_prefix_token_ids or self.staging_chain:
                raise ValueError(f"{call}: mode 'text' is a root; it takes no parent, prefix or chain")
            return self
        if self.parent_call_id is None or self.prev_len == 0 or self.parent_chain_hash is None:
            raise ValueError(f"{call}: mode 'token_in' needs parent_call_id, prev_len > 0 and parent_chain_hash")
        inline = len(self.required_prefix_token_ids)
        if inline != self.prev_len and (inline or not self.staging_chain):
            raise ValueError(f"{call}: {inline} prefix ids given, prev_len is {self.prev_len}")
        return self

    def to_header(self) -> str:
        """The admission as one HTTP header value (base64url of its JSON)."""
        return base64.urlsafe_b64encode(orjson.dumps(self.model_dump(mode="json"))).decode("ascii")

    @classmethod
    def from_header(cls, value: str) -> CaptureAdmission:
        """Read `to_header`'s form.

        Raises WireError when it cannot be read, pydantic's ValidationError when the admission contradicts itself.
        """
        try:
            decoded = orjson.loads(base64.b64decode(value.encode("ascii"), altchars=b"-_", validate=True))
        except ValueError as error:
            raise WireError(f"the admission header is not base64url of JSON: {error}") from error
        return cls.model_validate(decoded)


class StagedCall(DigestedRecord):
    """The delta of one call: prompt-carry tokens (mask 0, log-prob 0.0), then sampled tokens (mask 1).

    token_ids_delta uint64[T], token_mask_delta float32[T], generation_log_probs_delta float32[T] (nats), T = delta_len.
    Validation recomputes `digest`, and `extras_digest` where the extras themselves are present. `unverified` skips
    that for readers whose next step is the verifier.
    """

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    mode: Mode
    prev_len: Count
    delta_len: Count
    cum_len: Count
    weight_version: Count
    digest: Digest
    token_ids_delta: Ids
    token_mask_delta: Float32s
    generation_log_probs_delta: Float32s
    extras_digest: Digest = EMPTY_EXTRAS_DIGEST
    chain_hash: Digest
    cumulative_hash: Digest
    extras: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _columns(cls, data: Any) -> Any:
        # Mask and log-probs are checked together and before rounding, so they are turned into arrays here.
        if isinstance(data, dict) and {"token_mask_delta", "generation_log_probs_delta"} <= data.keys():
            call = f"call {data.get('rollout_id')}/{data.get('model_call_id')}"
            mask, logprobs = data["token_mask_delta"], data["generation_log_probs_delta"]
            data = dict(data)
            data["token_mask_delta"], data["generation_log_probs_delta"] = mask_and_logprobs(
                mask, logprobs, call, strict=False
            )
        return data

    @model_validator(mode="after")
    def _digests_match(self) -> Self:
        recomputed = self.recompute_digest()
        if recomputed != self.digest:
            raise ValueError(f"call {self.staging_key}: digest is {self.digest}, contents give {recomputed}")
        if self.extras is not None and extras_digest(self.extras) != self.extras_digest:
            raise ValueError(f"call {self.staging_key}: extras do not give extras_digest {self.extras_digest}")
        return self

    @property
    def staging_key(self) -> str:
        return staging_key(self.rollout_id, self.model_call_id)

    def recompute_digest(self) -> str:
        """The call digest of the fields as they are. Raises WireError when they contradict each other."""
        return staged_call_digest(
            schema_version=self.schema_version,
            digest_version=self.digest_version,
            extras_digest_version=self.extras_digest_version,
            rollout_id=self.rollout_id,
            model_call_id=self.model_call_id,
            parent_call_id=self.parent_call_id,
            mode=self.mode,
            prev_len=self.prev_len,
            delta_len=self.delta_len,
            cum_len=self.cum_len,
            weight_version=self.weight_version,
            token_ids_delta=self.token_ids_delta,
            token_mask_delta=self.token_mask_delta,
            generation_log_probs_delta=self.generation_log_probs_delta,
            extras_digest=self.extras_digest,
            chain_hash=self.chain_hash,
            cumulative_hash=self.cumulative_hash,
        )

    @classmethod
    def unverified(cls, **fields: Any) -> StagedCall:
        """Build without checking digests: the three columns must be arrays of the dtypes above.

        For a writer that has just computed the digests and for a reader whose rows go to `verify_and_linearize`.
        """
        given = fields.keys()
        if not (given >= _STAGED_REQUIRED and given <= _STAGED_TEMPLATE.keys()):
            missing, unknown = sorted(_STAGED_REQUIRED - given), sorted(given - _STAGED_TEMPLATE.keys())
            raise WireError(f"a staged call lacks {missing} and does not know {unknown}")
        # `model_construct` does the same four assignments in five times the time, and this runs for every call.
        call = cls.__new__(cls)
        object.__setattr__(call, "__dict__", {**_STAGED_TEMPLATE, **fields})
        object.__setattr__(call, "__pydantic_fields_set__", set(given))
        object.__setattr__(call, "__pydantic_extra__", None)
        object.__setattr__(call, "__pydantic_private__", None)
        return call

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StagedCall):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        return mine.keys() == theirs.keys() and all(
            np.array_equal(mine[name], theirs[name])
            if isinstance(mine[name], np.ndarray)
            else mine[name] == theirs[name]
            for name in mine
        )

    def __hash__(self) -> int:
        return hash((self.rollout_id, self.model_call_id, self.digest))


_STAGED_REQUIRED = {name for name, info in StagedCall.model_fields.items() if info.is_required()}
# In the record's order, which is the order a dump is written in.
_STAGED_TEMPLATE = {name: info.default for name, info in StagedCall.model_fields.items()}


class CommitCoords(DigestedRecord):
    """Token-free acknowledgement of one call; `capture_failed` ones keep identity and version and nothing else."""

    rollout_id: Identifier
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: Count
    delta_len: Count
    cum_len: Count
    weight_version: Count
    disposition: Literal["staged", "capture_failed"] = "staged"
    digest: Digest | None = None
    extras_digest: Digest | None = None
    staging_key: Identifier | None = None
    chain_hash: Digest | None = None
    cumulative_hash: Digest | None = None

    @model_validator(mode="after")
    def _staged_or_failed(self) -> Self:
        call = f"coordinates of {self.rollout_id}/{self.model_call_id}"
        if (self.parent_call_id is None) != (self.prev_len == 0):
            raise ValueError(f"{call}: parent {self.parent_call_id!r} does not fit prev_len {self.prev_len}")
        if self.cum_len != self.prev_len + self.delta_len:
            raise ValueError(f"{call}: cum_len {self.cum_len} is not {self.prev_len} + {self.delta_len}")
        proof = (self.digest, self.extras_digest, self.staging_key, self.chain_hash, self.cumulative_hash)
        if self.disposition == "staged":
            if None in proof or self.delta_len == 0:
                raise ValueError(f"{call}: staged coordinates need a delta, all digests and the staging key")
        elif any(value is not None for value in proof) or self.delta_len:
            raise ValueError(f"{call}: failed coordinates carry no delta, digest or staging key")
        return self


class CallRecord(DigestedRecord):
    """One manifest row: a staged call without its tokens, and what the ledger knows about it.

    `admitted_at` is wall-clock seconds; `fingerprint_version` 0 means no fingerprints were recorded.
    """

    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: Count
    delta_len: Count
    cum_len: Count
    weight_version: Count
    digest: Digest
    extras_digest: Digest
    staging_key: Identifier
    mode: Mode = "token_in"
    chain_hash: Digest
    cumulative_hash: Digest
    response_id: Identifier
    admitted_at: StrictFloat | None = None
    output_fingerprint: Digest | None = None
    continuation_fingerprint: Digest | None = None
    fingerprint_version: Count = 0

    @model_validator(mode="after")
    def _root_or_child(self) -> Self:
        call = f"manifest row {self.model_call_id}"
        check_shape(
            "row", self.model_call_id, self.parent_call_id, self.mode, self.prev_len, self.delta_len, self.cum_len, call
        )
        return self


class ManifestFailure(WireRecord):
    """A call whose capture did not complete; `detail` (ours) is the worker's typed cause where there is one."""

    model_call_id: Identifier
    reason: Identifier
    detail: StrictStr | None = Field(default=None, exclude_if=lambda value: value is None)


class RolloutManifest(WireRecord):
    """Everything the ledger knows of one rollout, in the order it was committed."""

    rollout_id: Identifier
    records: list[CallRecord] = Field(default_factory=list)
    failures: list[ManifestFailure] = Field(default_factory=list)


class RolloutCommit(WireRecord):
    """One staged call as it is handed to the ledger: the manifest row and what resolves its children."""

    rollout_id: Identifier
    record: CallRecord
    staging_chain: list[Identifier] = Field(default_factory=list)
    request_items: list[Any] = Field(default_factory=list)
    response_items: list[Any] = Field(default_factory=list)


class RolloutReceipt(DigestedRecord):
    """One finished rollout: its manifest, the call that ends the trajectory, how that was decided, the reward.

    An unpoisoned receipt names terminal and selection and has no failure_reason. A receipt without selection is one
    where no attribution ran: it names no terminal and says why.
    """

    rollout_id: Identifier
    reward: float | None = None
    terminal_model_call_id: Identifier | None = None
    manifest: list[CallRecord] = Field(default_factory=list)
    capture_poisoned: bool = False
    failure_reason: StrictStr | None = None
    terminal_selection: Selection | None = None
    terminal_attribution_reason: StrictStr | None = None

    @model_validator(mode="after")
    def _one_state(self) -> Self:
        receipt = f"receipt of {self.rollout_id}"
        call_ids = {record.model_call_id for record in self.manifest}
        if len(call_ids) != len(self.manifest):
            raise ValueError(f"{receipt}: the manifest lists a call twice")
        if self.terminal_model_call_id is not None and self.terminal_model_call_id not in call_ids:
            raise ValueError(f"{receipt}: terminal {self.terminal_model_call_id} is not in the manifest")
        if not self.capture_poisoned:
            if self.failure_reason is not None:
                raise ValueError(f"{receipt}: has failure_reason {self.failure_reason!r} but is not poisoned")
            if self.terminal_model_call_id is None or self.terminal_selection is None:
                raise ValueError(f"{receipt}: not poisoned, so it must name terminal and selection")
        if self.terminal_selection is None and (self.terminal_model_call_id is not None or self.failure_reason is None):
            raise ValueError(f"{receipt}: without a selection it names no terminal and needs a failure_reason")
        return self
