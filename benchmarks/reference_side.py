"""Reference side: the reference's process. Prepares jobs and runs each when it is told to, timing itself.

    in:  {"prepare": job, "arguments": {…}}   {"run": job}   one JSON object a line
    out: {"ready": true}   {"seconds": 0.105}   or {"error": "…"}

Each job does with the reference's own classes what the file of the same name does with ours, on the same inputs. The
synchronous functions behind its coroutines are called, so that no thread of its own counts against it.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import inputs
from benchmarks.measure import Sampler, in_memory, processor, timed, timed_on, wall


def capture(calls: int, tokens: int) -> Sampler:
    """Capture one chain, token ids and log-probs as lists: it takes nothing else."""
    turns, hashes = _captured(calls, tokens)[:2]
    return timed(lambda: _capture_all(turns, hashes))


def verify(calls: int, tokens: int) -> Sampler:
    """Verify and linearise what it captured itself; receipt and snapshots are made anew for every run, untimed."""
    from nemo_gym.token_id_capture import staging

    _, _, staged, records = _captured(calls, tokens)
    sent = staging.RolloutReceipt.model_validate(inputs.receipt(records)).model_dump_json()
    rows = [json.dumps(call.model_dump(mode="json", exclude={"extras"})) for call in staged]

    def fetch() -> tuple[Any, list[Any]]:
        snapshots = [staging.StagedCallBaseSnapshot.model_validate(json.loads(row)) for row in rows]
        return staging.RolloutReceipt.model_validate_json(sent), snapshots

    return timed_on(fetch, lambda chain: staging.verify_and_linearize(*chain))


def resolution(calls: int, recording: bool) -> Sampler:
    """A whole rollout against a new file ledger: the seconds in which requests are resolved, or those and recording."""
    from nemo_gym.token_id_capture.lineage import FileLineageStore
    from nemo_gym.token_id_capture.staging import CallRecord, CaptureLedgerCommit

    requests, responses = inputs.conversation(calls)
    commits = [
        CaptureLedgerCommit(
            rollout_id=inputs.ROLLOUT,
            record=CallRecord.model_validate(inputs.custody_record(number)),
            staging_chain=[f"{inputs.ROLLOUT}/c{earlier:06d}" for earlier in range(number + 1)],
            request_items=request,
            response_items=response,
        )
        for number, (request, response) in enumerate(zip(requests, responses, strict=True))
    ]

    def play() -> float:
        with tempfile.TemporaryDirectory(dir=None if recording else in_memory()) as scratch:
            store = FileLineageStore(Path(scratch))
            resolving = whole = 0.0
            for request, commit in zip(requests, commits, strict=True):
                began, spent = wall(), processor()
                store._resolve(inputs.ROLLOUT, request)
                resolving += processor() - spent
                store._record(commit)
                whole += wall() - began
            return whole if recording else resolving

    return play


def _captured(calls: int, tokens: int) -> tuple[list[Any], list[Any], list[Any], list[dict[str, Any]]]:
    turns = [
        (turn, turn.prefix.tolist(), turn.prompt.tolist(), turn.sampled.tolist(), turn.logprobs.tolist())
        for turn in inputs.turns(calls, tokens)
    ]
    hashes: list[str | None] = [None]
    staged, all_coords = _capture_all(turns, hashes, learn=True)
    records = [
        {**coords.model_dump(exclude={"disposition", "rollout_id"}), "mode": call.mode, "response_id": f"r{number}"}
        for number, (call, coords) in enumerate(zip(staged, all_coords, strict=True))
    ]
    return turns, hashes, staged, records


def _capture_all(turns: list[Any], hashes: list[str | None], learn: bool = False) -> tuple[list[Any], list[Any]]:
    from nemo_gym.token_id_capture import staging

    sink = _Memory(staging.StageResult)
    core = staging.RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 1)
    all_coords = []
    for number, (turn, prefix, prompt, sampled, logprobs) in enumerate(turns):
        admission = staging.CaptureAdmission.model_validate(inputs.admission(turn, hashes[number], number))
        call = core.begin_call(admission, prefix_token_ids=prefix if turn.parent else None)
        coords = core.complete_call(
            call, prompt_token_ids=prompt, generated_token_ids=sampled, generated_logprobs=logprobs
        )
        all_coords.append(coords)
        if learn:
            hashes.append(coords.chain_hash)
    if all_coords[-1].disposition != "staged":
        raise RuntimeError("the reference did not stage the calls")
    return sink.calls, all_coords


class _Memory:
    def __init__(self, result: Callable[..., Any]) -> None:
        self.calls: list[Any] = []
        self._result = result

    def stage(self, record: Any, **_: Any) -> Any:
        self.calls.append(record)
        return self._result(ok=True, staging_key=record.staging_key)


_JOBS: dict[str, Callable[..., Sampler]] = {"capture": capture, "verify": verify, "resolution": resolution}


def main() -> None:
    """Answer questions until the other end closes."""
    logging.disable(logging.ERROR)
    prepared: dict[str, Sampler] = {}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "prepare" in question:
                prepared[question["prepare"]] = _JOBS[question["prepare"]](**question["arguments"])
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = {"seconds": prepared[question["run"]]()}
        except Exception as error:  # whatever stands in the reference's way is the answer
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
