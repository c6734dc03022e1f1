"""Causes: the one vocabulary for why a call, a rollout or a route was not usable.

Each cause has a family and a one-line explanation; metrics, receipts, events, tables and plots use these names.
Values of the custody family are also wire strings: they are read from and written to ledgers and never repurposed.
Not here: the order in which a verifier looks for them (`workbench.finalizer.verify`).
"""

from __future__ import annotations

from enum import StrEnum

CUSTODY, VERIFICATION, STAGING, DRIFT, ROUTES = "custody", "verification", "staging", "drift", "routes"


class Cause(StrEnum):
    """Why something was rejected. `.family` is one of custody, verification, staging, drift, routes."""

    family: str
    explanation: str

    def __new__(cls, value: str, family: str = "", explanation: str = "") -> Cause:
        member = str.__new__(cls, value)
        member._value_ = value
        member.family = family
        member.explanation = explanation
        return member

    # Custody: what the ledger and the receipt say.
    UNRESOLVED_PARENT = (
        "unresolved_parent",
        CUSTODY,
        "The request continues no recorded call, so its prefix is unknown.",
    )
    REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES = (
        "request_finished_without_staged_coordinates",
        CUSTODY,
        "The request ended before a completion existed; nothing was staged and nothing was served.",
    )
    WORKER_RESPONSE_MISSING_COMMIT_COORDINATES = (
        "worker_response_missing_commit_coordinates",
        CUSTODY,
        "The worker answered but gave no acknowledgement of staging.",
    )
    WORKER_CAPTURE_FAILED = (
        "worker_capture_failed",
        CUSTODY,
        "The worker served the call but could not stage its tokens.",
    )
    INVALID_WORKER_COMMIT_COORDINATES = (
        "invalid_worker_commit_coordinates",
        CUSTODY,
        "The worker's acknowledgement does not fit the call that was admitted.",
    )
    LEDGER_ROW_MISSING_RESPONSE_ID = (
        "ledger_row_missing_response_id",
        CUSTODY,
        "The served object had no id, so no witness could name this call.",
    )
    LEDGER_ROW_MISSING_CHAIN_HASH = (
        "ledger_row_missing_chain_hash",
        CUSTODY,
        "The parent's ledger row has no chain hash, so no child can be chained to it.",
    )
    MISSING_RECEIPT = "missing_receipt", CUSTODY, "No receipt came for this rollout."
    IDENTITY_MISMATCH = (
        "identity_mismatch",
        CUSTODY,
        "The receipt names another rollout than the one that was asked for.",
    )
    ROLLOUT_FAILED = "rollout_failed", CUSTODY, "The receipt carries a failure reason."
    CAPTURE_POISONED = (
        "capture_poisoned",
        CUSTODY,
        "A call of the rollout was not captured, so its tokens are not proven.",
    )
    NO_RECORDS = "no_records", CUSTODY, "The rollout has no captured call."
    NO_ROOT = "no_root", CUSTODY, "No captured call of the rollout is a root."
    DUPLICATE_CALL_ID = "duplicate_call_id", CUSTODY, "Two captured calls carry the same id."
    ORPHANED_ROW = "orphaned_row", CUSTODY, "A captured call names a parent that was not captured."
    AMBIGUOUS_TERMINAL = "ambiguous_terminal", CUSTODY, "Several calls could be the last one of the trajectory."
    WITNESS_DISAGREEMENT = "witness_disagreement", CUSTODY, "Response id, content or declaration name different calls."
    CONTENT_AMBIGUOUS = "content_ambiguous", CUSTODY, "The scored response's content matches several different calls."
    DECLARED_TERMINAL_NOT_CAPTURED = (
        "declared_terminal_not_captured",
        CUSTODY,
        "The response id declared by the harness matches no captured call.",
    )
    DECLARED_AMBIGUOUS = (
        "declared_ambiguous",
        CUSTODY,
        "The response id declared by the harness matches different calls.",
    )
    MISSING_TERMINAL = "missing_terminal", CUSTODY, "The receipt names no terminal call, or one that is not in it."

    # Verification: what recomputing everything shows.
    EMPTY_MANIFEST = "empty_manifest", VERIFICATION, "The receipt lists no call."
    DUPLICATE_MANIFEST_ROW = "duplicate_manifest_row", VERIFICATION, "Two manifest rows carry the same call id."
    DUPLICATE_STAGING_KEY = "duplicate_staging_key", VERIFICATION, "Two manifest rows name the same staging key."
    ROW_COUNT_MISMATCH = "row_count_mismatch", VERIFICATION, "There are not as many staged calls as manifest rows."
    DUPLICATE_SNAPSHOT = "duplicate_snapshot", VERIFICATION, "The same staged call came twice."
    SNAPSHOT_IDENTITY_MISMATCH = "snapshot_identity_mismatch", VERIFICATION, "A staged call is not in the manifest."
    SNAPSHOT_ORDER_MISMATCH = "snapshot_order_mismatch", VERIFICATION, "Staged calls are not in manifest order."
    WRONG_ROLLOUT = "wrong_rollout", VERIFICATION, "A staged call belongs to another rollout."
    WRONG_MODEL_CALL_ID = "wrong_model_call_id", VERIFICATION, "Staged call and manifest differ in the call id."
    WRONG_PARENT_CALL_ID = "wrong_parent_call_id", VERIFICATION, "Staged call and manifest differ in the parent."
    WRONG_MODE = "wrong_mode", VERIFICATION, "Staged call and manifest differ in the mode."
    WRONG_PREV_LEN = "wrong_prev_len", VERIFICATION, "Staged call and manifest differ in the length before the call."
    WRONG_DELTA_LEN = "wrong_delta_len", VERIFICATION, "Staged call and manifest differ in the length of the delta."
    WRONG_CUM_LEN = "wrong_cum_len", VERIFICATION, "Staged call and manifest differ in the length after the call."
    WRONG_WEIGHT_VERSION = (
        "wrong_weight_version",
        VERIFICATION,
        "Staged call and manifest differ in the weight version.",
    )
    WRONG_DIGEST = "wrong_digest", VERIFICATION, "Staged call and manifest differ in the call digest."
    WRONG_EXTRAS_DIGEST = "wrong_extras_digest", VERIFICATION, "Staged call and manifest differ in the extras digest."
    WRONG_CHAIN_HASH = "wrong_chain_hash", VERIFICATION, "Staged call and manifest differ in the chain hash."
    WRONG_CUMULATIVE_HASH = (
        "wrong_cumulative_hash",
        VERIFICATION,
        "Staged call and manifest differ in the cumulative hash.",
    )
    WRONG_SCHEMA_VERSION = (
        "wrong_schema_version",
        VERIFICATION,
        "Staged call, manifest and receipt differ in the schema.",
    )
    WRONG_DIGEST_VERSION = (
        "wrong_digest_version",
        VERIFICATION,
        "Staged call, manifest and receipt differ in the digest.",
    )
    WRONG_EXTRAS_DIGEST_VERSION = (
        "wrong_extras_digest_version",
        VERIFICATION,
        "Staged call, manifest and receipt differ in the version of the extras digest.",
    )
    INVALID_SNAPSHOT = "invalid_snapshot", VERIFICATION, "A staged call contradicts itself, so it has no digest."
    CORRUPT_DIGEST = "corrupt_digest", VERIFICATION, "A staged call's contents do not give the digest it carries."
    MISSING_PARENT = "missing_parent", VERIFICATION, "A call's parent is not in the manifest."
    PARENT_LENGTH_MISMATCH = "parent_length_mismatch", VERIFICATION, "A call does not begin where its parent ends."
    LINEAGE_CYCLE = "lineage_cycle", VERIFICATION, "Following the parents leads back to the same call."
    CHAIN_HASH_MISMATCH = "chain_hash_mismatch", VERIFICATION, "A call's delta does not extend its parent's chain."
    CUMULATIVE_HASH_MISMATCH = (
        "cumulative_hash_mismatch",
        VERIFICATION,
        "The linearised tokens are not the sequence the terminal call was served with.",
    )
    EMPTY_GENERATION = "empty_generation", VERIFICATION, "A call on the chain holds no sampled token."
    EMPTY_TRAINING_ROW = "empty_training_row", VERIFICATION, "The chain holds no sampled token."
    INVALID_MASK_ORDER = "invalid_mask_order", VERIFICATION, "A call's mask is not carry first, then generation."
    UNSUPPORTED_SCHEMA = "unsupported_schema", VERIFICATION, "The receipt speaks another schema version."
    UNSUPPORTED_DIGEST = "unsupported_digest", VERIFICATION, "The receipt speaks another digest version."
    UNSUPPORTED_EXTRAS_DIGEST = (
        "unsupported_extras_digest",
        VERIFICATION,
        "The receipt speaks another version of the extras digest.",
    )

    # Staging: what went wrong in or near the worker.
    MISSING_STAGING_ROW = "missing_staging_row", STAGING, "A staged call did not come back from storage."
    INVALID_STAGING_ROW = (
        "invalid_staging_row",
        STAGING,
        "A staged call is unreadable, incomplete or contradicts itself.",
    )
    NONFINITE_LOGPROB = "nonfinite_logprob", STAGING, "A sampled token's log-prob is NaN, infinite or beyond float32."
    LOGPROB_COUNT_MISMATCH = "logprob_count_mismatch", STAGING, "There is not one log-prob for every sampled token."
    SPLICE_BOUNDARY = "splice_boundary", STAGING, "The template shows no unique place after the parent's turn."
    PREFIX_MISMATCH = "prefix_mismatch", STAGING, "The engine's prompt does not begin with the parent's tokens."
    SINK_TIMEOUT = "sink_timeout", STAGING, "The staging sink did not answer in time."
    SINK_ERROR = "sink_error", STAGING, "The staging sink refused the call or failed."

    # Drift: why a request failed to resolve.
    TEMPLATE_STRIPPED_REASONING = (
        "template_stripped_reasoning",
        DRIFT,
        "The history lost the reasoning that the model had written.",
    )
    TOOL_CALL_RESERIALISED = (
        "tool_call_reserialised",
        DRIFT,
        "A tool call came back with other arguments or another id.",
    )
    TOOL_CALL_DROPPED = "tool_call_dropped", DRIFT, "A tool call of the recorded turn is missing from the history."
    HISTORY_EDITED = "history_edited", DRIFT, "An earlier user, system or tool item was changed."
    CONTEXT_COMPACTED = "context_compacted", DRIFT, "Earlier items were dropped or replaced by a summary."
    TOOLS_CHANGED = "tools_changed", DRIFT, "Instructions or the tool list changed between the calls."
    ASSISTANT_TEXT_CHANGED = "assistant_text_changed", DRIFT, "The model's own text came back changed."
    DIALECT_CHANGED = "dialect_changed", DRIFT, "The rollout switched to another API dialect."
    DUPLICATE_OUTPUT = (
        "duplicate_output",
        DRIFT,
        "Several recorded calls gave this same output; the parent is ambiguous.",
    )
    UNKNOWN_HISTORY = "unknown_history", DRIFT, "The history resembles no recorded call."

    # Routes: routed experts of a mixture-of-experts model.
    ROUTE_MISSING = "route_missing", ROUTES, "No routed experts were staged where they were expected."
    ROUTE_LENGTH_MISMATCH = "route_length_mismatch", ROUTES, "There is not one route row for every token."
    ROUTE_DIGEST_MISMATCH = (
        "route_digest_mismatch",
        ROUTES,
        "The routes do not give the extras digest that was committed.",
    )
    ROUTE_DIMS_UNKNOWN = (
        "route_dims_unknown",
        ROUTES,
        "No rollout of the group tells how many layers and experts there are.",
    )


REASONS = {
    "declared_terminal_not_captured": "The harness declared a last response id that no captured call has.",
    "declared_ambiguous": "The declared id belongs to calls with different tokens.",
    "no_response_object": "The agent left no response as it was served, so nothing could be compared.",
    "response_has_no_id": "The response that the agent left has no id.",
    "response_id_no_match": "No captured call was served under the response's id.",
    "response_id_ambiguous": "Several calls with different tokens were served under the response's id.",
    "response_has_no_output": "The response that the agent left has no items to compare.",
    "response_output_unfingerprintable": "The response's items are not of a form that can be compared.",
    "no_model_authored_output": "No item of the response is the model's.",
    "no_content_match": "No captured call was answered with the response's content.",
    "content_ambiguous": "Several calls with different tokens were answered with the response's content.",
    "witness_disagreement": "Response id, content or declaration name calls with different tokens; in brackets: which.",
    "corroborated_by": "These witnesses name the same tokens as the one that was followed.",
}
"""What a part of a `terminal_attribution_reason` means: why nobody, or who, named the last call; joined by commas."""
