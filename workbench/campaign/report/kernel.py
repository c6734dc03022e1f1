"""Kernel: this very interpreter as a notebook kernel, and the certainty that nothing of it is left behind.

In: nothing that is installed globally (a `python3` kernelspec may belong to another environment). Out: a kernel manager
whose kernel is `sys.executable`, in a session of its own, so that a Ctrl-C in the terminal reaches the runner only.
Inspectors show themselves as snapshots there: what is executed unattended is read without a kernel.
Invariant: every process that the kernel started, directly or not, carries the kernel's mark in its environment, so all
of them can be found and ended, the ones that have detached themselves too, and nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import orjson
from jupyter_client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from workbench.campaign.processes import end_marked
from workbench.inspect.mode import VARIABLE as DISPLAY
from workbench.places import MARK

KERNEL_NAME = "workbench-run"


class OwnKernel:
    """A kernel of this interpreter, not yet started. `manager` goes to nbclient or papermill as `km`.

    The logs of a Ray that it leaves behind go into the run directory `logs_to`.
    """

    def __init__(self, logs_to: Path | None = None) -> None:
        self._logs_to = logs_to
        self.mark = uuid.uuid4().hex
        self._specs = tempfile.TemporaryDirectory(prefix="workbench-kernel-", ignore_cleanup_errors=True)
        spec = Path(self._specs.name) / KERNEL_NAME
        spec.mkdir()
        (spec / "kernel.json").write_bytes(
            orjson.dumps(
                {
                    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                    "display_name": f"Workbench ({Path(sys.prefix).name})",
                    "language": "python",
                    "env": {MARK: self.mark, DISPLAY: "static", "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
                }
            )
        )
        specs = KernelSpecManager(kernel_dirs=[self._specs.name], ensure_native_kernel=False)
        self.manager = AsyncKernelManager(kernel_name=KERNEL_NAME, kernel_spec_manager=specs)
        self.manager.connection_file = str(Path(self._specs.name) / "kernel.json")
        # Sockets in a directory of our own are seen by nobody else; their paths must fit into sockaddr_un (108 bytes).
        if len(self.manager.connection_file) < 90:
            self.manager.transport = "ipc"

    @property
    def pid(self) -> int | None:
        """The kernel's process id, once it has one."""
        return getattr(self.manager.provisioner, "pid", None)

    def hears(self) -> bool:
        """Whether SIGINT would come to what it runs: ipykernel ignores it before the first cell and between two."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return True
        ignored = next((line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), "0")
        return not int(ignored, 16) >> (signal.SIGINT - 1) & 1

    def interrupt(self) -> bool:
        """SIGINT to the kernel alone (its children have to end by its hand, in order). False when there is none."""
        if self.pid is None:
            return False
        try:
            os.kill(self.pid, signal.SIGINT)
        except ProcessLookupError:
            return False
        self._wake()
        return True

    def _wake(self) -> None:
        """Send a message that needs no answer. ipykernel turns SIGINT into a cancellation by setting a future in the
        signal handler, which a loop that waits for nothing but time does not notice until something else wakes it."""
        client = BlockingKernelClient(connection_file=self.manager.connection_file)
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            client.load_connection_file()
            client.start_channels(shell=True, iopub=False, stdin=False, hb=False, control=False)
            client.kernel_info()
            time.sleep(0.2)
            client.stop_channels()

    def end(self, grace_s: float = 5.0) -> int:
        """End everything that carries the mark: SIGTERM, `grace_s` to comply, SIGKILL. Returns how many there were."""
        ended = end_marked(self.mark, grace_s, self._logs_to)
        self._specs.cleanup()
        return ended
