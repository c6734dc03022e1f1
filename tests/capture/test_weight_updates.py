"""New weights and running calls, on a scripted engine: who waits for whom, and what leaves before the proof."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from capture.scripted_worker import DEADLINE_S, USER, Agent, rows_of, serving, until, write_script

from workbench.capture.staging import MemorySink
from workbench.errors import CaptureError, ComponentDied, DeadlineExceeded, WeightSyncError
from workbench.serving.settings import WorkerConfig
from workbench.serving.worker import PolicyServer


@contextlib.asynccontextmanager
async def one_call_running(
    folder: Path, script: Path, monkeypatch: Any, **settings: Any
) -> AsyncIterator[tuple[PolicyServer, MemorySink, asyncio.Task[Any]]]:
    """A server in the middle of one call, and that call."""
    async with serving(folder, script, monkeypatch, **settings) as (server, sink):
        running = asyncio.create_task(Agent(server, "run.0.0.0").call([USER]))
        await until(lambda: server.gate.running == 1)
        yield server, sink, running


async def test_weight_update_waits_for_running_calls_and_holds_new_ones(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(
        tmp_path, {"text": "The capital of France", "rollout": "slow.*", "delay_s": 0.5}, {"text": "quick"}
    )
    async with serving(chatml_folder, script, monkeypatch, quiet_timeout_s=5.0) as (server, sink):
        slow, quick = Agent(server, "slow.0.0.0"), Agent(server, "run.0.0.0")
        running = asyncio.create_task(slow.call([USER]))
        await until(lambda: server.gate.running == 1)
        update = asyncio.create_task(server.update_weights("unused", 1))
        await until(lambda: not server.gate._open.is_set())
        held = asyncio.create_task(quick.call([USER]))
        old, _, outcome = await running
        assert outcome["coords"]["weight_version"] == 0
        assert (await update)["quiet_s"] > 0
        _, _, outcome = await held
        assert outcome["coords"]["weight_version"] == 1
        assert (await rows_of(sink, slow, old))[0].weight_version == 0
        assert (await quick.http.get("/workbench/status")).json()["weight_version"] == 1


async def test_calls_stay_held_after_an_update_until_it_was_proved(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    async with serving(chatml_folder, write_script(tmp_path, {"text": "one"}), monkeypatch) as (server, _):
        await server.update_weights("unused", 1, hold=True)
        held = asyncio.create_task(Agent(server, "run.0.0.0").call([USER]))
        await until(lambda: server.capture.board.live_calls == 1)
        assert (await asyncio.wait([held], timeout=0.1))[0] == set()
        assert server.gate.running == 0
        server.resume()
        _, _, outcome = await held
        assert outcome["coords"]["weight_version"] == 1
        await server.update_weights("unused", 2)
        assert not server.gate.held


async def test_a_call_that_may_straddle_is_not_waited_for_and_nothing_of_it_leaves_before_the_proof(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "The capital of France", "delay_s": 0.2})
    async with one_call_running(chatml_folder, script, monkeypatch, quiet_timeout_s=0.01) as (server, sink, running):
        assert (await server.update_weights("unused", 1, hold=True, straddle=True))["straddling"] == 1
        held = asyncio.create_task(Agent(server, "run.0.1.0").call([USER]))
        assert (await asyncio.wait([running, held], timeout=0.5))[0] == set()
        assert sink.rows == {}
        server.resume()
        assert (await running)[2]["coords"]["weight_version"] == 0
        assert (await held)[2]["coords"]["weight_version"] == 1


async def test_a_reader_who_leaves_during_a_long_update_gets_the_call_staged_all_the_same(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """What was sampled waits for the proof; that wait is not the engine's slowness to abort."""
    monkeypatch.setattr("workbench.capture.engine.ABORT_TIMEOUT_S", 0.5)
    script = write_script(tmp_path, {"text": "The capital of France is Paris.", "delay_s": 0.05})
    async with serving(chatml_folder, script, monkeypatch) as (server, sink):
        asked: list[str] = []
        stop = server.engine.abort

        async def abort(call_id: str) -> None:
            asked.append(call_id)
            await stop(call_id)

        monkeypatch.setattr(server.engine, "abort", abort)
        running = asyncio.create_task(Agent(server, "run.0.0.0").call([USER]))
        await until(lambda: server.gate.running == 1)
        await server.update_weights("unused", 1, hold=True, straddle=True)
        running.cancel()
        # One every fifth of a second: for longer than the engine has for an abort.
        await until(lambda: len(asked) > 6)
        assert server.gate.running == 1 and sink.rows == {}
        server.resume()
        await until(lambda: server.gate.running == 0)
        (row,) = await sink.fetch(list(sink.rows))
        assert (row.weight_version, row.extras["finish_reason"]) == (0, "abort")


def server_over(engine: Any, folder: Path, monkeypatch: Any, **settings: Any) -> PolicyServer:
    monkeypatch.setenv("WORKBENCH_WORKER_TOKEN", "t")
    (folder / "config.json").write_text("{}")
    server = PolicyServer(WorkerConfig(model_path=str(folder), capture_enabled=False, **settings))
    server.engine = engine
    return server


async def test_after_an_update_that_failed_while_it_loaded_nothing_is_sampled(monkeypatch: Any, tmp_path: Path) -> None:
    """The engine says which weights it kept only after it has loaded; a call let in then would have those of nobody."""
    engine = EngineThatKeepsOtherWeights()
    server = server_over(engine, tmp_path, monkeypatch)
    for straddle in (False, True):
        with pytest.raises(WeightSyncError, match="kept other weights"):
            await server.update_weights(str(tmp_path), 1, hold=True, straddle=straddle)
        assert server.gate.in_doubt and server.weight_version() == 0
        call = asyncio.create_task(server.gate.call().__aenter__())
        assert (await asyncio.wait([call], timeout=0.05))[0] == set()
        call.cancel()
    engine.keeps_others = False
    loading = asyncio.create_task(server.update_weights(str(tmp_path), 1))
    with pytest.raises(CaptureError, match="already in progress"):
        while not loading.done():
            await asyncio.sleep(0)
            async with server.gate.alone(1.0):
                break
    await loading
    async with asyncio.timeout(DEADLINE_S), server.gate.call():
        assert (server.weight_version(), server.gate.in_doubt) == (1, False)


class EngineThatKeepsOtherWeights:
    """What a worker asks of vLLM in an update, with a load that fails after it has changed weights."""

    errored = False
    keeps_others = True

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[dict[str, float]]:
        await asyncio.sleep(0)
        if self.keeps_others:
            raise WeightSyncError(f"{args[0]}: the engine kept other weights")
        return [{"load_s": 0.0}]

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return reset_running_requests

    async def update_weight_version(self, version: str) -> None: ...

    async def pause_generation(self, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...


class StubbornEngine(EngineThatKeepsOtherWeights):
    """An engine that does all that it is asked but for one thing."""

    keeps_others = False

    def __init__(self, stubborn: str) -> None:
        self.stubborn = stubborn

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[dict[str, float]]:
        if self.stubborn == "load":
            await asyncio.Event().wait()
        return await super().collective_rpc(method, args)

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        if self.stubborn == "reset":
            await asyncio.Event().wait()
        return self.stubborn != "cache"

    async def update_weight_version(self, version: str) -> None:
        if self.stubborn == "label":
            await asyncio.Event().wait()

    async def resume_generation(self) -> None:
        if self.stubborn == "resume":
            await asyncio.Event().wait()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        if self.stubborn == "pause":
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("stubborn", "error", "says", "in_doubt"),
    [
        ("pause", DeadlineExceeded, r"did not pause within 0\.05 s", True),
        ("load", DeadlineExceeded, r"did not load .* within 0\.05 s; its weights are in doubt", True),
        ("cache", WeightSyncError, "kept its prefix cache", True),
        ("reset", DeadlineExceeded, "did not load", True),
        ("label", DeadlineExceeded, "did not load", True),
        ("resume", DeadlineExceeded, "did not load", True),
    ],
)
async def test_an_engine_that_does_not_do_its_part_of_an_update_is_named(
    monkeypatch: Any, tmp_path: Path, stubborn: str, error: type[Exception], says: str, in_doubt: bool
) -> None:
    server = server_over(StubbornEngine(stubborn), tmp_path, monkeypatch, load_timeout_s=0.05)
    with pytest.raises(error, match=says):
        async with asyncio.timeout(DEADLINE_S):
            await server.update_weights(str(tmp_path), 1, hold=True, straddle=True)
    assert server.weight_version() == 0
    assert server.gate.in_doubt == in_doubt


async def test_an_engine_that_may_be_paused_gets_no_calls_until_an_update_has_let_it_go_on(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """A call let in would wait in the engine for ever, with nobody to resume it."""
    engine = EngineThatPausesLate()
    server = server_over(engine, tmp_path, monkeypatch, load_timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match="did not pause"):
        await server.update_weights(str(tmp_path), 1, hold=True, straddle=True)
    assert engine.paused
    call = asyncio.create_task(server.gate.call().__aenter__())
    assert (await asyncio.wait([call], timeout=0.05))[0] == set()
    await server.update_weights(str(tmp_path), 1)
    await asyncio.wait_for(call, DEADLINE_S)
    assert not engine.paused


class EngineThatPausesLate(EngineThatKeepsOtherWeights):
    """It pauses, but says so only when nobody waits for it any more."""

    keeps_others = False
    paused = False

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await asyncio.Event().wait()

    async def resume_generation(self) -> None:
        self.paused = False


def test_an_engine_that_is_gone_is_noticed(monkeypatch: Any, tmp_path: Path) -> None:
    server = server_over(EngineThatKeepsOtherWeights(), tmp_path, monkeypatch)
    server.check_alive()
    monkeypatch.setattr(server.engine, "errored", True, raising=False)
    with pytest.raises(ComponentDied, match="engine of the policy worker is gone"):
        server.check_alive()


async def test_weight_update_gives_up_at_its_deadline_and_lets_calls_go_on(
    chatml_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    script = write_script(tmp_path, {"text": "The capital of France", "delay_s": 0.8})
    async with one_call_running(chatml_folder, script, monkeypatch, quiet_timeout_s=0.1) as (server, _, running):
        with pytest.raises(DeadlineExceeded, match="1 generations still ran"):
            await server.update_weights("unused", 1)
        _, _, outcome = await running
        assert outcome["coords"]["weight_version"] == server.weight_version() == 0
