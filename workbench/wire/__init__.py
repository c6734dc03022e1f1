"""Wire: the contract that ledgers, staged calls and receipts are read and written by, here and elsewhere.

Pure functions and frozen records; numpy and pydantic are the only dependencies. See each module's head:
`records`, `digests`, `encoding`, `extras`, `fingerprints`, `routes`, `causes`.
"""

from workbench.wire.causes import Cause
from workbench.wire.digests import DIGEST_VERSION, SCHEMA_VERSION, chain_hash, hash_token_ids, staged_call_digest
from workbench.wire.extras import EMPTY_EXTRAS_DIGEST, EXTRAS_DIGEST_VERSION, extras_digest
from workbench.wire.fingerprints import FINGERPRINT_VERSION, assistant_fingerprint, conversation_digest
from workbench.wire.records import (
    CallRecord,
    CaptureAdmission,
    CommitCoords,
    ManifestFailure,
    RolloutCommit,
    RolloutManifest,
    RolloutReceipt,
    StagedCall,
    check_rollout_id,
    staging_key,
)
from workbench.wire.routes import Routes, classify_route_span, decode_routes, encode_routes

__all__ = [
    "DIGEST_VERSION",
    "EMPTY_EXTRAS_DIGEST",
    "EXTRAS_DIGEST_VERSION",
    "FINGERPRINT_VERSION",
    "SCHEMA_VERSION",
    "CallRecord",
    "CaptureAdmission",
    "Cause",
    "CommitCoords",
    "ManifestFailure",
    "RolloutCommit",
    "RolloutManifest",
    "RolloutReceipt",
    "Routes",
    "StagedCall",
    "assistant_fingerprint",
    "chain_hash",
    "check_rollout_id",
    "classify_route_span",
    "conversation_digest",
    "decode_routes",
    "encode_routes",
    "extras_digest",
    "hash_token_ids",
    "staged_call_digest",
    "staging_key",
]
