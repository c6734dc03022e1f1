"""Echo rows: put the turns of a rollout together by their lengths, as a harness does that has only the responses.

    row = prompt of the first call, its sampled ids, then for every later call: its prompt from position
          len(earlier prompt) + len(earlier sampled) on, its sampled ids
Where every prompt begins with what was there before, the row equals what the engine ran at the last call. Where a
turn was rendered differently it does not, and `wrong_at` is the first position that differs; the row trains all the
same. Invariant: N rows come out of N rollouts, as in the captured arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.echo.calls import EchoedCall
from workbench.finalizer.group import Assembly, build_group
from workbench.finalizer.messages import FinalizationRequest, RolloutOutcome
from workbench.finalizer.verdicts import Rejection
from workbench.finalizer.verify import LinearizedRow
from workbench.wire import Cause


@dataclass(frozen=True, eq=False)
class Concatenated:
    """A row of the echo arm. `wrong_at`: first position at which it is not what the engine ran; None where it is."""

    row: LinearizedRow
    wrong_at: int | None


def concatenate(rollout_id: str, chain: Sequence[EchoedCall]) -> Concatenated | Rejection:
    """The row of one chain of calls, or why there is none."""
    if not chain:
        return Rejection(Cause.NO_RECORDS, "no response of this rollout is the one that was scored")
    for call in chain:
        problem = _unusable(call)
        if problem is not None:
            return Rejection(*problem, call.call_id)
    ids: list[np.ndarray] = []
    mask: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    weights: list[tuple[str, int, int, int]] = []
    links: list[tuple[str, int, int]] = []
    seen = length = 0
    for call in chain:
        carry_T = call.prompt_ids[seen:]
        sampled = call.sampled_ids.size
        ids += [carry_T, call.sampled_ids]
        mask += [np.zeros(carry_T.size, np.float32), np.ones(sampled, np.float32)]
        logprobs += [np.zeros(carry_T.size, np.float32), call.logprobs]
        weights.append((call.call_id, length, length + carry_T.size + sampled, call.weight_version))
        links.append((call.call_id, int(carry_T.size), int(sampled)))
        length += int(carry_T.size) + int(sampled)
        seen = call.prompt_ids.size + sampled
    row = LinearizedRow(
        rollout_id=rollout_id,
        token_ids=np.concatenate(ids),
        token_mask=np.concatenate(mask),
        logprobs=np.concatenate(logprobs),
        model_call_ids=[call.call_id for call in chain],
        prompt_len=int(chain[0].prompt_ids.size),
        weight_versions=[call.weight_version for call in chain],
        weight_version_spans=weights,
        link_spans=links,
        extras_commitments=[],
    )
    return Concatenated(row, _first_difference(row.token_ids, chain[-1].ran))


def assemble_echo(
    request: FinalizationRequest, chains: Mapping[str, Sequence[EchoedCall]], bos_token_id: int
) -> Assembly:
    """N rows in index order from the chains by rollout id. Nothing about one rollout raises."""
    joined = [_verdict(outcome, chains.get(outcome.rollout_id, ())) for outcome in request.rollouts]
    verdicts = [item.row if isinstance(item, Concatenated) else item for item in joined]
    first_prompt = next((v.token_ids[: v.prompt_len] for v in verdicts if isinstance(v, LinearizedRow)), None)
    source = "bos" if first_prompt is None else "sibling"
    prompt_T = np.array([bos_token_id], np.uint64) if first_prompt is None else first_prompt
    built = build_group(request, verdicts, prompt_T, source, staged={})
    wrong = {
        index: item.wrong_at
        for index, item in enumerate(joined)
        if isinstance(item, Concatenated) and item.wrong_at is not None
    }
    summaries = [
        summary.model_copy(update={"detail": WRONG, "position": wrong[index]}) if index in wrong else summary
        for index, summary in enumerate(built.summaries)
    ]
    calls = sum(len(chain) for chain in chains.values())
    metrics = built.metrics.model_copy(
        update={"calls": calls, "root_calls": calls, "receipts": 0, "echo_wrong_rows": len(wrong)}
    )
    return Assembly(built.rows, summaries, metrics)


WRONG = "not the tokens that the engine ran at the last call; from the given position on"
"""What a valid row of this arm says of itself where its turns did not fit together."""


def _verdict(outcome: RolloutOutcome, chain: Sequence[EchoedCall]) -> Concatenated | Rejection:
    if outcome.failure is not None:
        return Rejection(outcome.failure, outcome.detail or outcome.failure.explanation)
    return concatenate(outcome.rollout_id, chain)


def _unusable(call: EchoedCall) -> tuple[Cause, str] | None:
    if call.sampled_ids.size != call.logprobs.size:
        return Cause.LOGPROB_COUNT_MISMATCH, (
            f"{call.sampled_ids.size} sampled ids came with {call.logprobs.size} log-probs; expected one each"
        )
    if not call.sampled_ids.size:
        return Cause.EMPTY_GENERATION, Cause.EMPTY_GENERATION.explanation
    if not np.isfinite(call.logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(call.logprobs))[0])
        return Cause.NONFINITE_LOGPROB, f"the log-prob of sampled token {at} is {call.logprobs[at]}"
    return None


def _first_difference(row_T: np.ndarray, ran_T: np.ndarray) -> int | None:
    common = min(row_T.size, ran_T.size)
    differing = np.flatnonzero(row_T[:common] != ran_T[:common])
    if differing.size:
        return int(differing[0])
    return None if row_T.size == ran_T.size else common
