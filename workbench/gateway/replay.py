"""Replay log: what became of each call of a rollout, and where the bytes are that were served for it.

    begun ──▶ (content: the first byte leaves) ──▶ answer, fsynced ──▶ [ ledger row ] ──▶ delivered
      └─────────────────────────────────────────▶ ended: no 2xx answer, so the next request is a call of its own
One file a rollout, `<rollout>.replay.jsonl`, one line a step; all gateways of a ledger directory share it. Only answers
are fsynced: the other lines must outlive a killed process, which the page cache does. The log stays with the ledger;
the bytes (answers) go when nobody can want them any more.
Invariant: of all requests that are one call, in any process, exactly one begins it.
Not here: who waits for a running call, what a lost call means for custody (retries).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from workbench.errors import LedgerCorrupt
from workbench.gateway.answers import SUFFIX, AnswerFile, Place
from workbench.gateway.refusals import Refused
from workbench.ledger.journal import Journal
from workbench.wire import check_rollout_id

LOG_SUFFIX = ".replay.jsonl"
OPEN_LOGS = 1024


@dataclass
class Known:
    """One call as the log knows it. `lost`: its gateway is gone and left no outcome."""

    call_id: str
    gateway: str
    key: str | None
    body: str
    state: Literal["running", "answered", "ended", "lost"] = "running"
    content_left: bool = False
    delivered: bool = False
    answer: Answer | None = None


@dataclass(frozen=True)
class Answer:
    """A served 2xx response, and what its ledger row needs that the request does not say. `place`: of its bytes."""

    media_type: str
    captured: bool
    """False: the call was unresolved, and has its failure row since its admission."""
    parent: str | None
    admitted_at: float
    compaction_of: str | None = None
    place: Place | None = None


class ReplayLog:
    """The log of one rollout. Thread-safe; every method takes the file as other processes left it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollout_id = path.name.removesuffix(LOG_SUFFIX)
        self.lock = threading.RLock()
        self.unsettled: dict[str, Known] = {}
        """Calls for which this process has not seen yet that they have their ledger row."""
        self._journal = Journal(path, self._take, self._clear)
        self._answers = AnswerFile(path.with_name(self.rollout_id + SUFFIX))
        self._clear()

    def claim(
        self, call_id: str, gateway: str, key: str | None, body: str, retry: bool, alive: Callable[[Known], bool]
    ) -> Known | None:
        """The call that this request repeats, or None: it is a new one, and is begun under `call_id`.

        `body` is the digest of all that makes two requests the same, `retry` whether the client says that it repeats
        one. Raises `Refused` (422) for a key that came with another body before.
        """
        with self.lock, self._journal.exclusive() as append:
            for other in list(self.unsettled.values()):
                if other.state == "running" and (other.key == key if key else other.body == body) and not alive(other):
                    append({"kind": "lost", "call": other.call_id}, durable=False)
            known = None
            if key is not None:
                known = self._with_key(key, body)
            elif retry:
                known = self._undelivered(body)
            if known is None:
                line = {"kind": "begun", "call": call_id, "gateway": gateway, "body": body, "retry": retry}
                append(line if key is None else line | {"key": key}, durable=False)
            return known

    def settled(self, call_id: str) -> None:
        """This process has seen that the call has its ledger row. Waits for nothing and writes nothing."""
        self.unsettled.pop(call_id, None)

    def content_left(self, call_id: str) -> None:
        self._note("content", call_id)

    def answered(self, call_id: str, answer: Answer, raw: bytes) -> None:
        """Keep what will be served. Durable on return."""
        with self.lock, self._journal.exclusive() as append, self._answers.keep(raw) as place:
            append({"kind": "answer", "call": call_id, **asdict(answer), "place": asdict(place)})

    def bytes_of(self, answer: Answer) -> bytes | None:
        """What was served, byte for byte; None where it is no longer kept."""
        return self._answers.read(answer.place) if answer.place else None

    def forget(self, idle_s: float = 0.0) -> None:
        """Keep the served bytes no longer, unless an answer came in the last `idle_s` seconds."""
        with self.lock, self._journal.exclusive():
            self._answers.forget(idle_s)

    def ended(self, call_id: str) -> None:
        self._note("ended", call_id)

    def delivered(self, call_id: str) -> None:
        self._note("delivered", call_id)

    def state(self, call_id: str) -> str:
        with self.lock:
            self._journal.refresh()
            known = self._calls.get(call_id)
            return known.state if known else "ended"

    def refresh(self) -> None:
        with self.lock:
            self._journal.refresh()

    def answer(self, call_id: str) -> Answer | None:
        """What is known of a call's answer; None where it has none, or came to nothing after all."""
        with self.lock:
            self._journal.refresh()
            known = self._calls.get(call_id)
            return known.answer if known and known.state == "answered" else None

    def lost(self, call_id: str) -> None:
        """Its gateway is gone: nobody will answer it, and its next attempt is a call of its own."""
        self._note("lost", call_id)

    def _with_key(self, key: str, body: str) -> Known | None:
        known = self._by_key.get(key)
        if known is not None and known.body != body:
            raise Refused(
                422,
                f"Key {key!r} was used before in this rollout with another body (call {known.call_id}). "
                "Next: a new Idempotency-Key or x-request-id for a new request.",
                "idempotency_key_reused",
            )
        return known

    def _undelivered(self, body: str) -> Known | None:
        if self._failed[body]:
            # It repeats an attempt that failed; that another one with this body is under way says nothing.
            return None
        meant = [known for known in self._by_body[body] if known.state in ("running", "answered")]
        meant = [known for known in meant if not known.delivered]
        return meant[0] if len(meant) == 1 else None

    def _note(self, kind: str, call_id: str) -> None:
        with self.lock, self._journal.exclusive() as append:
            append({"kind": kind, "call": call_id}, durable=False)

    def _take(self, number: int, line: Any) -> None:
        try:
            self._apply(line["kind"], line["call"], line)
        except (KeyError, TypeError):
            raise LedgerCorrupt(
                f"{self.path}, line {number}: expected a step of a call, got {str(line)[:60]!r}. "
                "Next: keep the file, drop this rollout."
            ) from None

    def _apply(self, kind: str, call_id: str, line: dict[str, Any]) -> None:
        if kind == "begun":
            known = Known(call_id, line["gateway"], line.get("key"), line["body"])
            self._calls[call_id] = self.unsettled[call_id] = known
            self._by_body[known.body].append(known)
            if known.key is not None:
                self._by_key[known.key] = known
            if (line["retry"] or known.key is not None) and self._failed[known.body]:
                self._failed[known.body] -= 1
        elif call_id in self._calls:
            known = self._calls[call_id]
            if kind == "content":
                known.content_left = True
            elif kind == "answer":
                known.state = "answered"
                fields = {name: value for name, value in line.items() if name not in ("kind", "call", "place")}
                known.answer = Answer(**fields, place=Place(**line["place"]))
            elif kind == "delivered":
                known.delivered = True
                self.unsettled.pop(call_id, None)
            elif kind == "ended":
                self._release(known, "ended")
                self.unsettled.pop(call_id, None)
            elif kind == "lost":
                self._release(known, "lost")

    def _release(self, known: Known, state: Literal["ended", "lost"]) -> None:
        if known.state in ("ended", "lost"):
            return
        known.state = state
        self._failed[known.body] += 1
        if known.key is not None and self._by_key.get(known.key) is known:
            del self._by_key[known.key]

    def _clear(self) -> None:
        self._calls: dict[str, Known] = {}
        self._by_key: dict[str, Known] = {}
        self._by_body: defaultdict[str, list[Known]] = defaultdict(list)
        self._failed: Counter[str] = Counter()
        self.unsettled.clear()


class ReplayLogs:
    """The logs of a ledger directory. Thread-safe. A rollout has one `ReplayLog` here for as long as anybody holds it:
    what one request learned of a call, the next one knows. The last `OPEN_LOGS` are held here, and need not be read
    again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: WeakValueDictionary[str, ReplayLog] = WeakValueDictionary()
        self._recent: OrderedDict[str, ReplayLog] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, rollout_id: str) -> ReplayLog:
        with self._lock:
            log = self._held.get(rollout_id)
            if log is None:
                log = self._held[rollout_id] = self.fresh(rollout_id)
            self._recent[rollout_id] = log
            self._recent.move_to_end(rollout_id)
            if len(self._recent) > OPEN_LOGS:
                self._recent.popitem(last=False)
            return log

    def fresh(self, rollout_id: str) -> ReplayLog:
        """A log of one's own, for work on many rollouts, which is not to push out those that are asked for."""
        return ReplayLog(self._directory / f"{check_rollout_id(rollout_id)}{LOG_SUFFIX}")
