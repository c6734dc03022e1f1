"""The data plane when parts of it are missing or die: a typed error within the deadline, never a hang."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chains import Chain

from workbench import dataplane
from workbench.capture.staging import TransferQueueSink, TransferQueueSource
from workbench.errors import ComponentDied, DeadlineExceeded, SetupError, StagingError
from workbench.wire import Cause


@pytest.fixture(scope="class")
def stopped(tq):
    """The session's data plane, stopped; started again afterwards, whatever the tests left."""
    dataplane.stop()
    yield
    dataplane.stop()
    dataplane.start(storage_units=2, send_recv_timeout_s=5.0, max_attempts=1, start_timeout_s=300.0)


@pytest.fixture
def breakable(tq):
    """The session's data plane, to be broken; a fresh one is started afterwards."""
    yield
    dataplane.stop()
    dataplane.start(storage_units=2, send_recv_timeout_s=5.0, max_attempts=1, start_timeout_s=300.0)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def kill(actor):
    """SIGKILL the actor's process and wait until it is gone (a zombie counts), so that nothing answers any more."""
    pid = await actor.__ray_call__.remote(lambda _: os.getpid())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_importing_it_imports_neither_ray_nor_torch_nor_transferqueue():
    code = (
        "import sys, workbench.dataplane, workbench.capture.staging;"
        "sys.exit(bool({'ray', 'torch', 'transfer_queue', 'tensordict'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_other_backends_and_a_missing_ray_are_refused_with_the_reason():
    with pytest.raises(SetupError, match=r"'MooncakeStore' is refused: its clear blocks"):
        dataplane.start(backend="MooncakeStore")


def test_a_call_that_never_returns_ends_at_its_deadline():
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for the moon"):
        dataplane._call(lambda: time.sleep(30), 0.1, "the moon")
    assert time.monotonic() - began < 5
    with pytest.raises(ComponentDied, match="ZeroDivisionError"):
        dataplane._call(lambda: 1 / 0, 5.0, "arithmetic")


def test_actors_get_limits_that_show_a_dead_storage_unit_soon():
    assert dataplane.environment(7.4, 2) == {
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "7",
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "2",
        "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "2",
    }


@pytest.mark.ray
class TestWhileItIsStopped:
    def test_too_few_logical_cpus_are_refused_in_one_line_that_names_the_recipe_keys(self, stopped):
        began = time.monotonic()
        with pytest.raises(SetupError) as error:
            dataplane.start(storage_units=20)
        message = str(error.value)
        assert (
            "needs 21 logical CPUs of Ray (1 controller + 20 storage units)" in message and "of 8 are free" in message
        )
        assert "ray.num_cpus" in message and "data_plane.storage_units" in message and "\n" not in message
        assert time.monotonic() - began < 10

    async def test_without_a_running_data_plane_nothing_waits(self, stopped):
        with pytest.raises(ComponentDied, match="is not running"):
            await dataplane.connect()
        with pytest.raises(StagingError) as error:
            await TransferQueueSink(5.0).stage_async(Chain("run.0.0.0").call())
        assert error.value.cause == Cause.SINK_ERROR


@pytest.mark.ray
def test_a_second_data_plane_in_one_ray_is_refused(tq):
    with pytest.raises(SetupError, match="runs a data plane already"):
        dataplane.start(storage_units=1)


@pytest.mark.ray
async def test_a_dead_storage_unit_loses_its_own_rows_only(breakable, ray_cluster):
    from transfer_queue import interface

    sink, source = TransferQueueSink(20.0), TransferQueueSource(20.0)
    chain = Chain("run.0.0.0")
    for parent in (None, "c0", "c1", "c2"):
        await sink.stage_async(chain.call(parent))
    await kill(interface._TQ_STORAGE["SimpleStorage"]["TransferQueueStorageUnit#0"])
    began = time.monotonic()
    answers = await source.fetch([call.staging_key for call in chain.staged])
    assert time.monotonic() - began < 30
    lost = [a for a in answers if isinstance(a, StagingError)]
    assert [a.cause for a in lost] == [Cause.MISSING_STAGING_ROW] * 2
    assert [a for a in answers if not isinstance(a, StagingError)] == [
        call for call, answer in zip(chain.staged, answers, strict=True) if not isinstance(answer, StagingError)
    ]


@pytest.mark.ray
async def test_a_dead_controller_is_a_typed_error_within_the_deadline(breakable, ray_cluster):
    sink, source = TransferQueueSink(3.0), TransferQueueSource(3.0)
    chain = Chain("run.0.0.0")
    await sink.stage_async(chain.call())
    await kill(ray_cluster.get_actor("TransferQueueController", namespace="transfer_queue"))
    began = time.monotonic()
    with pytest.raises(StagingError) as error:
        await sink.stage_async(chain.call("c0"))
    assert error.value.cause == Cause.SINK_TIMEOUT
    with pytest.raises(ComponentDied, match="controller has not answered"):
        await source.fetch(["run.0.0.0/c0", "run.0.0.0/c1"])
    with pytest.raises(DeadlineExceeded, match="clear of key"):
        await source.clear(["run.0.0.0/c0"])
    assert time.monotonic() - began < 20


def test_an_interpreter_in_a_path_with_a_space_survives_rays_shell(monkeypatch):
    monkeypatch.setattr("sys.executable", "/home/a user/.venv/bin/python")
    assert shlex.split(f"exec {dataplane.interpreter()} -u") == ["exec", "/home/a user/.venv/bin/python", "-u"]
