"""Part logs: what the parts of a run wrote, kept when it fails, and where a part's own words are.

    SESSION/logs/worker-…-PID.out, .err  ─►  RUN/logs/PolicyWorker-PID.out, .err

In: the directory of a Ray of the run's own, before it is removed. Out: the end of every log in it that says something.
Invariant: no token of the run and no other secret of its environment stands in what is kept.
Not here: the logs of a cluster that was joined; they stay on its nodes, in the session of that Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from workbench.places import is_ray_directory

LOGS = "logs"
KEPT_BYTES = 1 << 20
"""Of each log, its end."""

_WORKER = re.compile(r"worker-.+-(\d+)\.(?:out|err)")
_OF_RAY = ("raylet.err", "gcs_server.err")
# Ray's own first lines: whose log it is.
_HEAD = re.compile(rb"^:(?:job_id|actor_name|task_name):(.*)\n?", re.MULTILINE)
_ACTOR = re.compile(rb"^:actor_name:([\w.-]+)", re.MULTILINE)
_SECRET = rb"\w*(?:TOKEN|SECRET|PASSWORD|_KEY)"
_NAMED = re.compile(rb"(\b" + _SECRET + rb"\b['\"]?\s*[=:]\s*['\"]?|\b[Bb]earer\s+)[^\s'\",;&}]+")
_VARIABLE = re.compile(rb"^" + _SECRET + rb"=(.{8,})$", re.DOTALL)
_HIDDEN = b"***"


def keep(ray_directory: Path, run_dir: Path, secrets: Iterable[bytes] = ()) -> None:
    """Copy into `run_dir/logs` what the parts wrote under `ray_directory`, without `secrets` and those of this process.
    What cannot be read or written is left out: it must not hide why the run ended."""
    hidden = {*secrets, *secrets_in(b"%s=%s" % pair for pair in os.environb.items())}
    for log in sorted(ray_directory.glob("session_*/logs/*")):
        # `session_latest` is a link to the session.
        if log.parent.parent.is_symlink() or not (_WORKER.fullmatch(log.name) or log.name in _OF_RAY):
            continue
        with contextlib.suppress(OSError):
            if text := _scrubbed(_end_of(log), hidden):
                (run_dir / LOGS).mkdir(exist_ok=True)
                (run_dir / LOGS / f"{_kept_name(log)}{log.suffix}").write_bytes(text)


def kept(run_dir: Path, since: float) -> Path | None:
    """The run's folder of logs where something was put there after `since` (seconds since the epoch)."""
    folder = run_dir / LOGS
    with contextlib.suppress(OSError):
        if any(log.stat().st_mtime >= since for log in folder.iterdir()):
            return folder
    return None


def own_log() -> str:
    """Where the words of this process and of its children are to be found after it has failed, for a sentence."""
    try:
        log = Path(os.readlink("/proc/self/fd/2"))
    except OSError:
        log = Path()
    if not _WORKER.fullmatch(log.name):
        return "what its process wrote on stderr"
    if any(map(is_ray_directory, log.parents)):
        return f"{LOGS}/{_kept_name(log)}.out and .err in the run's directory"
    return f"{log.with_suffix('')}.out and .err on {socket.gethostname()}"


def secrets_in(variables: Iterable[bytes]) -> set[bytes]:
    """Values, out of `NAME=value`, of the variables whose name says that nobody else may know it."""
    return {found[1] for variable in variables if (found := _VARIABLE.match(variable))}


def _kept_name(log: Path) -> str:
    """The class of the actor whose log it is, with its process id; of Ray's own processes their name."""
    if not (worker := _WORKER.fullmatch(log.name)):
        return log.stem
    with contextlib.suppress(OSError), log.open("rb") as file:
        if actor := _ACTOR.search(file.read(4096)):
            return f"{actor[1].decode()}-{worker[1]}"
    return f"worker-{worker[1]}"


def _end_of(log: Path) -> bytes:
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - KEPT_BYTES))
        text = file.read(KEPT_BYTES)
    if size > KEPT_BYTES:
        text = text.partition(b"\n")[2]  # of a cut line the beginning is missing, and with it a secret's name
    return _HEAD.sub(b"", text)


def _scrubbed(text: bytes, secrets: set[bytes]) -> bytes:
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return _NAMED.sub(rb"\1" + _HIDDEN, text)
