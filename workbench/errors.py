"""Errors: every exception that Workbench raises on purpose, in one tree.

    WorkbenchError                      exit_code 1
    ├── SetupError                      the machine or the recipe cannot run this; exit_code 2
    │   ├── RecipeError                 a recipe key, value or combination is wrong
    │   ├── ModelMissing                no model at the path or under the name
    │   └── ProbeFailed                 the engine does not give what capture needs
    ├── WireError (also ValueError)     a record, digest, extras tree or envelope breaks the wire contract
    │   └── FingerprintError            an item cannot be fingerprinted
    ├── CaptureError                    capture was asked for something it must refuse
    │   ├── SpliceError                 no unique boundary: the child's prompt cannot be built
    │   └── CallRefused (also ValueError) a request that cannot be captured exactly, or not twice; served as a 400
    ├── LedgerError
    │   ├── LedgerConflict              a different row for a call that is already recorded
    │   ├── LedgerCorrupt               a broken line before others
    │   └── RolloutFrozen               a call after freeze
    ├── EchoLost                        a response of the token-echo arm came without ids or log-probs
    ├── StagingError                    a staged row is missing, unreadable or not what was asked for
    ├── ReceiptRejected                 a rollout does not verify; carries cause, call_id, position
    ├── FinalizerError
    │   └── GroupsDropped               groups in a row could not become rows, and replacing them does not help
    ├── TrainerError
    │   ├── NothingToTrainOn            steps in a row had no row with a vote
    │   ├── ReplayBufferError           a group was used out of turn (reserved twice, committed with other keys, full)
    │   └── WeightSyncError             sampler and trainer disagree after new weights, or the sync failed
    ├── GatewayError                    the gateway did not answer, or answered with a failure
    ├── DeadlineExceeded                a wait ran out; names what was waited for
    ├── ComponentDied                   a process or actor is gone; names it and what was in flight
    ├── DiskFull (also OSError)         a file could not be written for want of room
    └── RunStoreError                   a stored run is missing, damaged or being written by somebody else

A bad rollout is data, not a crash: only `ReceiptRejected` and `StagingError` describe one, and both carry a `Cause`.
"""

from __future__ import annotations

from typing import Any


def _one_sentence(self: WorkbenchError) -> list[str]:
    """What a notebook shows: the sentence, which says all there is, and not the calls that led to it."""
    return [f"{type(self).__name__}: {self}"]


class WorkbenchError(Exception):
    """Base of all deliberate errors. `exit_code` is what the command line returns for it."""

    exit_code = 1


class SetupError(WorkbenchError):
    """This machine or configuration cannot run what was asked; nothing heavy was started."""

    exit_code = 2


class RecipeError(SetupError):
    """A recipe key, value or combination is wrong. The message names the key path and the allowed values."""

    _render_traceback_ = _one_sentence


class ModelMissing(SetupError):
    """No model under this name or path."""


class ProbeFailed(SetupError):
    """The start-up conversation did not come back with exact ids, log-probs and a clean splice."""


class WireError(WorkbenchError, ValueError):
    """A record, digest, extras tree or routes envelope breaks the wire contract."""


class FingerprintError(WireError):
    """A conversation item is not something that has a fingerprint."""


class CaptureError(WorkbenchError):
    """The capture core was asked for something it must refuse (a second `begin` of a call, a wrong prefix)."""


class SpliceError(CaptureError):
    """The child's prompt cannot be built from the parent's ids: the template shows no unique boundary."""


class CallRefused(CaptureError, ValueError):
    """This request cannot be captured exactly, or was admitted before. A `ValueError`, so it is served as a 400."""


class LedgerError(WorkbenchError):
    """The custody ledger cannot do what was asked."""


class LedgerConflict(LedgerError):
    """A different row for a call that is already recorded."""


class LedgerCorrupt(LedgerError):
    """A ledger line that cannot be read stands before others."""


class RolloutFrozen(LedgerError):
    """A new call for a rollout whose trajectory is already closed."""


class EchoLost(WorkbenchError):
    """A response of the token-echo arm came without its ids or log-probs; names the field."""


class StagingError(WorkbenchError):
    """A staged row is missing, unreadable or not the one asked for.

    `cause` is a `workbench.wire.Cause` value (a string enum), `key` the staging key.
    """

    def __init__(self, message: str, *, cause: str, key: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        # Python rebuilds an exception from `args` alone; with keywords it could not come back from a Ray actor.
        return _rebuild, (type(self), self.args, self.__dict__)


class ReceiptRejected(WorkbenchError):
    """A rollout does not verify.

    `cause` is a `workbench.wire.Cause` value, `call_id` the model call and `position` the token position in the
    call's delta (or None where there is none), `detail` one sentence for the reader.
    """

    def __init__(
        self, cause: str, *, call_id: str | None = None, position: int | None = None, detail: str = ""
    ) -> None:
        place = f" at call {call_id}" if call_id else ""
        place += f", token {position}" if position is not None else ""
        super().__init__(f"{cause}{place}" + (f": {detail}" if detail else ""))
        self.cause = cause
        self.call_id = call_id
        self.position = position
        self.detail = detail

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class FinalizerError(WorkbenchError):
    """A group could not be finalised; names the group."""


class GroupsDropped(FinalizerError):
    """Group after group could not become rows; names the cause, and how many in a row."""


class TrainerError(WorkbenchError):
    """A training step could not be taken; names the step."""


class NothingToTrainOn(TrainerError):
    """Step after step had no row with a vote; names the commonest cause, with a rollout that has it."""


class ReplayBufferError(TrainerError):
    """A group was used out of turn: reserved twice, committed with other keys, or no room is left for it."""


class WeightSyncError(TrainerError):
    """New weights did not reach a worker, or sampler and trainer disagree on the fixed prompt afterwards."""


class GatewayError(WorkbenchError):
    """The gateway did not answer, or answered with a failure."""


class DeadlineExceeded(WorkbenchError):
    """A wait ran out. The message names what was waited for, for how long, and what to look at."""


class ComponentDied(WorkbenchError):
    """A process or actor is gone. The message names it and what was in flight."""


class DiskFull(WorkbenchError, OSError):
    """The disk, or a quota on it, is used up. The message names the file, what is free there and the next step."""


class RunStoreError(WorkbenchError):
    """A stored run is missing, damaged or being written by somebody else."""

    _render_traceback_ = _one_sentence


def _rebuild(kind: type[WorkbenchError], args: tuple[object, ...], state: dict[str, object]) -> WorkbenchError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def first_fault(error: Any) -> str:
    """The first fault of a pydantic `ValidationError` in one line: `key: what is wrong`, without the key where a rule
    is over the whole record."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(map(str, fault["loc"]))
    wrong = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else fault["msg"]
    return f"{place}: {wrong}" if place else wrong


def first_cause(group: BaseExceptionGroup) -> BaseException:
    """The deliberate error inside an exception group, or the first leaf: one failure is reported, not a tree."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    deliberate = [error for error in leaves if isinstance(error, WorkbenchError)]
    return (deliberate or leaves)[0]
