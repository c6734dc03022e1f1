"""Metrics: what a gateway counts, in Prometheus' text form.

Counted here is what only the gateway sees (fields an agent set, failures by reason); a campaign's own figures come from
its run store. The processes of one gateway write their counts to files of a directory that its parent names in the
environment (prometheus_client's multiprocess mode), so any of them answers for all.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from workbench.gateway.settings import METRICS_DIR

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """What one process counts; `render()` is the body of `/metrics`, for all processes of its gateway."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._shared = os.environ.get(METRICS_DIR)

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"workbench_{name}", doc, labels, registry=registry)

        def histogram(name: str, doc: str) -> Histogram:
            return Histogram(f"workbench_{name}", doc, registry=registry, buckets=_SECONDS)

        self.admissions = counter("admissions", "Tagged calls by mode: text, token_in or unresolved", "mode")
        self.unresolved = counter("unresolved", "Unresolved calls by their diagnosed cause", "cause")
        self.commits = counter("commits", "Custody rows written")
        self.failures = counter("failures", "Failure rows by wire reason", "reason")
        self.late = counter("late_rows", "Rows that came after freeze")
        self.overridden = counter("overridden_fields", "Sampling fields of agents that the recipe overrode", "field")
        self.stripped = counter("stripped_fields", "Fields of agents that may not pass", "field")
        self.refused = counter("refused", "Requests refused, by code", "code")
        self.repeated = counter("repeated_requests", "Requests answered by a call that was there already", "how")
        self.live = Gauge(
            "workbench_live_calls", "Tagged calls under way", registry=registry, multiprocess_mode="livesum"
        )
        self.duration_s = histogram("call_seconds", "From admission to release")
        self.staging_s = histogram("staging_seconds", "From the last token to the staged delta, as the worker says")
        self.custody_s = histogram("custody_seconds", "Coordinates and ledger row, while the last frame waits")

    def render(self) -> bytes:
        if self._shared is None:
            return generate_latest(self._registry)
        _forget_the_dead(Path(self._shared))
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._shared)
        return generate_latest(registry)


def _forget_the_dead(directory: Path) -> None:
    """What a killed process had under way is under way no longer. Its counters stay."""
    for path in directory.glob("gauge_live*.db"):
        pid = int(path.stem.rsplit("_", 1)[1])
        try:
            os.kill(pid, 0)
        except PermissionError:
            continue
        except ProcessLookupError:
            # Two processes may be asked at once.
            with contextlib.suppress(FileNotFoundError):
                mark_process_dead(pid, str(directory))
