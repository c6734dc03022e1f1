"""Metrics: what one gateway process counts, in Prometheus' text form.

Counted here is what only the gateway sees (fields an agent set, failures by reason); a campaign's own figures come from
its run store.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Counters of one process; `render()` is the body of `/metrics`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.calls = Counter("workbench_calls", "Tagged calls by how they were admitted", ["status"], registry=registry)
        self.commits = Counter("workbench_commits", "Custody rows written", registry=registry)
        self.late = Counter("workbench_late_rows", "Rows that came after freeze", registry=registry)
        self.failures = Counter("workbench_failures", "Failure rows by wire reason", ["reason"], registry=registry)
        self.drift = Counter("workbench_drift", "Unresolved calls by diagnosis", ["cause"], registry=registry)
        self.overridden = Counter(
            "workbench_overridden_fields",
            "Sampling fields of agents that the recipe overrode",
            ["field"],
            registry=registry,
        )
        self.stripped = Counter(
            "workbench_stripped_fields", "Fields of agents that may not pass", ["field"], registry=registry
        )
        self.refused = Counter("workbench_refused", "Requests refused, by code", ["code"], registry=registry)
        self.repeated = Counter(
            "workbench_repeated_requests",
            "Requests answered by a call that was there already",
            ["how"],
            registry=registry,
        )
        self.live = Gauge("workbench_live_calls", "Tagged calls under way", registry=registry)
        self.duration_s = Histogram(
            "workbench_call_seconds", "From admission to release", registry=registry, buckets=_SECONDS
        )
        self.custody_s = Histogram(
            "workbench_custody_seconds",
            "Coordinates and ledger row, while the last frame waits",
            registry=registry,
            buckets=_SECONDS,
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)
