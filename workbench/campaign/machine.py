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
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
MEMORY_GIB = 8.0
"""A campaign with a model of two layers, beside what else a machine runs."""
FREE_MEMORY_GIB = 4.0
"""Of a campaign with a model of two layers."""
PEAK_GIB = 9.4
"""Of `cpu_smollm2`, proportional set size: trainer 4.3, engine and its worker 2.8, Ray, TransferQueue and notebook."""
INSTALL_GIB = 7.0
"""4.5 installed, 1.4 in downloads, the model 0.3; the rest is room for runs."""
RUN_GIB = 2.0
"""One campaign's weights and records."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `cure` is empty where nothing is wrong; `optional` is what no campaign needs."""

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
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text) / GIB)
    return total


def memory() -> Finding:
    total = memory_gib()
    # A machine sold as 8 GB reports a little less.
    if total < MEMORY_GIB * 0.93:
        return Finding(
            "memory",
            f"{total:.1f} GiB",
            f"needs {MEMORY_GIB:.0f} GB: engine and trainer hold a model each; use a larger machine or raise the limit",
        )
    return Finding("memory", f"{total:.1f} GiB")


def free_memory() -> Finding:
    """What others have left of it."""
    free = free_memory_gib()
    found = f"{free:.1f} GiB"
    if free < FREE_MEMORY_GIB:
        takes = f"a small campaign takes {FREE_MEMORY_GIB:.0f} GiB, the default one {PEAK_GIB:g}"
        cure = f"{takes}; stop what holds it: ps aux --sort=-rss"
        return Finding("free memory", found, cure)
    return Finding("free memory", found)


def free_memory_gib() -> float:
    """Memory that can still be had: the machine's, or the container's where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024 / GIB
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text().strip()
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if limit.isdigit():
        # Cached files count as used there and are given up when memory is asked for.
        free = min(free, (int(limit) - int(used) + int(cached.get("inactive_file", 0))) / GIB)
    return free


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
