"""Machine: what this computer has, measured with the standard library alone.

`tools/set_up.py` asks before anything is installed and `workbench doctor` asks again afterwards, so both say the same
thing in the same words. Each check returns a `Finding`; a bad one carries the cure. Sizes are in GiB.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
NO_LIMIT = 2**60
MEMORY_GIB = 8.0
"""A campaign with a model of two layers, beside what else a machine runs."""
COMFORT_GIB = 12.0
"""The default campaign, beside what else a machine runs."""
SMALL_PEAK_GIB = 4.0
"""Of a campaign with a model of two layers."""
PEAK_GIB = 9.4
"""Of `cpu_smollm2`, proportional set size: trainer 4.3, engine and its worker 2.8, Ray, TransferQueue and notebook."""
AS_SOLD = 0.93
"""A machine sold as 8 GB reports a little less."""
INSTALL_GIB = 7.0
"""4.5 installed, 1.4 in downloads, the model 0.3; the rest is room for runs."""
RUN_GIB = 2.0
"""One campaign's weights and records."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `cure` is empty where nothing is wrong; `optional` is no reason to refuse: what only tests
    need, or what suffices for some campaigns."""

    what: str
    found: str
    cure: str = ""
    optional: bool = False

    @property
    def good(self) -> bool:
        return not self.cure


def python_version() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        return Finding("python", found, "needs 3.11 to 3.14; on Debian: apt-get install python3.11 python3.11-venv")
    return Finding("python", found)


def venv_module() -> Finding:
    """Debian ships Python without the part of `venv` that brings pip."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        return Finding("venv", "missing", f"on Debian: apt-get install {package}")
    return Finding("venv", "present")


def memory_gib() -> float:
    """Physical memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return min([total, *(limit for limit, _ in _limits())])


def memory(takes_gib: float | None = None) -> Finding:
    """Against what a campaign takes at its peak; None: which one it will be is not known, and the default is likely."""
    total = memory_gib()
    limited = ", the limit of this container (cgroup)" if any(limit <= total for limit, _ in _limits()) else ""
    found = f"{total:.1f} GiB{limited}"
    raised = "raise the limit" if limited else "use a larger machine"
    if total < MEMORY_GIB * AS_SOLD:
        needs = f"needs {MEMORY_GIB:.0f} GB: engine and trainer hold a model each"
        return Finding("memory", found, f"{needs}; {raised}")
    reason = f"the default campaign takes {PEAK_GIB:g} GiB at its peak; {raised}, or run the smaller recipe cpu_smoke"
    if takes_gib is not None and total + _swap_gib("SwapTotal") < takes_gib:
        return Finding("memory", found, f"needs {COMFORT_GIB:.0f} GB: {reason}")
    if (takes_gib is None or takes_gib >= PEAK_GIB) and total < COMFORT_GIB * AS_SOLD:
        return Finding("memory", found, f"{COMFORT_GIB:.0f} GB are better: {reason}", optional=True)
    return Finding("memory", found)


def free_memory(takes_gib: float | None = None) -> Finding:
    """What others have left of it."""
    free = free_memory_gib()
    found = f"{free:.1f} GiB"
    if free + _swap_gib("SwapFree") < (takes_gib or SMALL_PEAK_GIB):
        takes = f"a small campaign takes {SMALL_PEAK_GIB:.0f} GiB, the default one {PEAK_GIB:g}"
        cure = f"{takes}; stop what holds it: ps aux --sort=-rss"
        return Finding("free memory", found, cure)
    return Finding("free memory", found)


def free_memory_gib() -> float:
    """Memory that can still be had: the machine's, or the container's where that is less."""
    return min([_meminfo_gib("MemAvailable"), *(limit - used for limit, used in _limits())])


def _limits() -> Iterator[tuple[float, float]]:
    """Every limit of memory that this process is under, its own group's and those of the groups around it, with what
    is used of it. Cached files count as used there and are given up when memory is asked for, so they are left out."""
    for group, limit, used in _groups():
        try:
            most, now = (group / limit).read_text().strip(), (group / used).read_text().strip()
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        cached = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
        # No limit is "max", in the older hierarchy a number beyond any machine's.
        if most.isdigit() and int(most) < NO_LIMIT:
            yield int(most) / GIB, max(0, int(now) - int(cached)) / GIB


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Directories of this process's memory group and those around it, with the names of two files there. In a container
    the path may be one of the machine's, which is not there: its own group is then the root."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for each in (group, *group.parents):
            if each.is_relative_to(top):
                yield (each, *names)


def _swap_gib(field: str) -> float:
    """Swap of the machine; a container's limit is taken as the whole of what it gets."""
    return 0.0 if any(True for _ in _limits()) else _meminfo_gib(field)


def _meminfo_gib(field: str) -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024 / GIB


def disk(where: Path, needed_gib: float) -> Finding:
    free = shutil.disk_usage(where).free / GIB
    if free < needed_gib:
        return Finding("disk", f"{free:.1f} GiB free at {where}", f"needs {needed_gib:.0f} GiB free there; make room")
    return Finding("disk", f"{free:.1f} GiB free at {where}")


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place(environment: str) -> Finding:
    """Where the packages lie: torch hands their path to the linker unquoted when it compiles the engine's kernels."""
    if any(character.isspace() for character in environment):
        return Finding("place", f"{environment!r} has a space", "torch cannot link there; move the checkout elsewhere")
    return Finding("place", environment)


def compiler() -> Finding:
    """The C++ compiler and Python's headers: vLLM compiles small kernels at the first call, and dies without them."""
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    found = shutil.which("g++")
    if found is None:
        return Finding("compiler", "no g++", f"on Debian: apt-get install g++ {package}")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return Finding("compiler", f"no {header}", f"on Debian: apt-get install {package}")
    return Finding("compiler", found)
