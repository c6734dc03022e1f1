"""`workbench serve` and `workbench receipt` as two terminals have them: one served run, many receipts, a clean end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import psutil
import pytest

from workbench import runs
from workbench.campaign.served.ask_receipt import ask_receipt
from workbench.campaign.served.serve import greeting
from workbench.campaign.verify import verify_run
from workbench.config import load_recipe
from workbench.errors import ComponentDied, RunStoreError, WorkbenchError
from workbench.gateway.settings import CONTROL_TOKEN, WORKER_TOKEN
from workbench.inspect import PrefixChain
from workbench.runs.writer import RunWriter

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

SCRIPT = [
    {"text": "first"},
    {"text": "second"},
    {"text": "third"},
    {"rollout": "bad.*", "text": "not a number", "fault": "nan_logprob", "at": 1},
]
MARK_OF_THE_TEST = "WORKBENCH_TEST_SERVED"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


class Served:
    """A `workbench serve` in another process, over the scripted engine where no override says otherwise."""

    def __init__(self, folder: Path, *overrides: str, **options: Any) -> None:
        script = folder / "script.jsonl"
        script.write_bytes(b"\n".join(map(orjson.dumps, SCRIPT)))
        self.run_dir = folder / "reports" / "agent"
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.mark = uuid.uuid4().hex
        arguments = ["engine.kind=scripted", f"engine.script_path={script}", f"reports.dir={folder / 'reports'}"]
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [*CLI, "serve", "cpu_smoke", *arguments, *overrides, "--run", "agent"],
                stdout=out,
                stderr=err,
                env={**os.environ, MARK_OF_THE_TEST: self.mark},
                **options,
            )

    def wait_until_it_serves(self) -> Served:
        self.wait_for(lambda: "base URL" in self.stdout.read_text(), START_TIMEOUT_S)
        self.url = self.status()["url"]
        return self

    def status(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "status.json").read_text())

    def family(self) -> list[psutil.Process]:
        """Its processes that are alive, found by what they inherited from it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK_OF_THE_TEST) == self.mark:
                    found.append(process)
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STOP_TIMEOUT_S)

    def wait_for(self, condition: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.stderr.read_text()[-2000:]
            assert time.monotonic() < deadline, self.stderr.read_text()[-2000:]
            time.sleep(0.05)

    def talk(self, rollout_id: str, turns: int = 3, stream: bool = False) -> list[str]:
        """An append-only conversation; returns the ids of the responses."""
        ids = []
        with openai.OpenAI(base_url=f"{self.url}/ng-rollout/{rollout_id}/v1", api_key="unused") as client:
            messages: list[Any] = [{"role": "user", "content": "say something"}]
            for _ in range(turns):
                asked: Any = {"model": "policy", "messages": messages}
                if stream:
                    with client.chat.completions.stream(**asked) as events:
                        answer = events.get_final_completion()
                else:
                    answer = client.chat.completions.create(**asked)
                ids.append(answer.id)
                messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
        return ids

    def lines(self, rollout_id: str, count: int) -> list[str]:
        """The lines of that rollout's calls, waited for."""
        found: list[str] = []

        def all_there() -> bool:
            found[:] = [line for line in self.stdout.read_text().splitlines() if line.startswith(f"{rollout_id} ")]
            return len(found) >= count

        self.wait_for(all_there, 20.0)
        return found

    def receipt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return workbench("receipt", str(self.run_dir), *arguments)


CLI = [sys.executable, "-m", "workbench.campaign.cli"]


def workbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    try:
        yield server.wait_until_it_serves()
    finally:
        server.stop()


def test_a_rollout_becomes_a_verified_row_by_its_receipt(served: Served) -> None:
    served.talk("good.1", stream=True)
    first, second, third = served.lines("good.1", 3)
    assert re.fullmatch(r"good\.1  [0-9a-f]{12}  text  root  \d+ \+ 2 tokens  stop", first)
    assert re.fullmatch(rf"good\.1  [0-9a-f]{{12}}  token_in  after {first.split()[1]}  \d+ \+ 2 tokens  stop", second)
    assert f"after {second.split()[1]}" in third
    done = served.receipt("good.1", "--reward", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Rollout good.1: verified" in done.stdout
    assert "calls     3: 3 in the chain\n" in done.stdout
    run = runs.open(served.run_dir)
    assert run.campaign["state"].to_list() == ["running"]
    assert run.rollouts.filter(rollout_id="good.1").select("reward", "sample_mask").row(0) == (0.5, 1)
    assert run.receipt("good.1").terminal_selection == "heuristic"
    assert run.tokens("good.1")["sampled"].sum() == 6
    pieces = run.vocabulary().pieces
    said = b"".join(pieces.get(token, b"") for token in run.tokens("good.1")["token_id"])
    assert said.count(b"say something") == 1
    assert "verified" in repr(PrefixChain(run, "good.1"))
    again = served.receipt("good.1")
    assert again.returncode == 1
    assert "has its receipt already (group good.1)" in again.stderr and again.stderr.count("\n") == 1


def test_the_terminal_may_be_named_by_response_or_call(served: Served) -> None:
    second = served.talk("named.1")[1]
    served.talk("named.2")
    call = served.lines("named.2", 3)[0].split()[1]
    with pytest.raises(WorkbenchError, match="--terminal slip names no call of rollout"):
        ask_receipt(served.run_dir, ["named.1"], terminals=["slip"])
    done = served.receipt("named.1", "named.2", "--terminal", second, "--terminal", call, "--group", "pair")
    assert done.returncode == 0, done.stderr
    assert "3: 2 in the chain, 1 captured beside it\n" in done.stdout
    assert "3: 1 in the chain, 2 captured beside it\n" in done.stdout
    assert done.stdout.count("declared") == 2
    assert done.stdout.count("stored as group pair") == 2
    group = runs.open(served.run_dir).groups.filter(group_id="pair")
    assert group["rows"].to_list() == [2]
    # Closed without a reward: not known, and so never zero.
    rollouts = runs.open(served.run_dir).rollouts.filter(group_id="pair")
    assert rollouts["reward"].to_list() == [None, None] and group["reward_mean"].to_list() == [None]
    assert runs.open(served.run_dir).receipt("named.1").reward is None


def test_a_rejected_rollout_says_why_and_where(served: Served) -> None:
    served.talk("bad.1", turns=1)
    (line,) = served.lines("bad.1", 1)
    assert "NOT CAPTURED: worker_capture_failed  nonfinite_logprob" in line
    done = served.receipt("bad.1", "--reward", "1")
    assert done.returncode == 1
    assert f"rejected, worker_capture_failed at call {line.split()[1]}" in done.stdout
    assert "nonfinite_logprob" in done.stdout and "calls     1: 1 not captured" in done.stdout


def test_a_request_that_is_refused_has_its_line_with_the_next_step(served: Served) -> None:
    with httpx.Client(base_url=served.url) as agent:
        path = "/ng-rollout/refused.1/v1/chat/completions"
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "n": 2}
        assert agent.post(path, json=body, headers={"authorization": "Bearer sk-a-secret"}).status_code == 400
        assert agent.post("/ng-rollout/refused.2/chat/completions", json=body).status_code == 404
    assert "REFUSED 400 not_capturable: n=2 is not possible" in served.lines("refused.1", 1)[0]
    assert "REFUSED 404 unknown_route" in served.lines("refused.2", 1)[0]
    assert "Next: the base URL is" in served.lines("refused.2", 1)[0]
    assert "sk-a-secret" not in served.stdout.read_text()


@pytest.mark.parametrize(
    ("rollouts", "options", "code", "says"),
    [
        (["nobody.1"], {}, 1, "Rollout nobody.1 has no call in this run"),
        (["../elsewhere"], {}, 1, "rollout id"),
        (["a", "a"], {}, 2, "named twice"),
        (["a", "b"], {"rewards": [1.0]}, 2, "--reward: expected none, or one for each of 2 rollouts"),
        (["a"], {"rewards": [math.inf]}, 2, "--reward inf: expected a number between -1e+15 and 1e+15"),
        (["a"], {"rewards": [-1e20]}, 2, "--reward -1e+20: expected a number between"),
        (["a"], {"rewards": [math.nan]}, 2, "--reward nan: expected a number between"),
        (["a"], {"terminals": ["x", "y"]}, 2, "--terminal: expected none, or one for each of 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    served: Served, rollouts: list[str], options: dict[str, Any], code: int, says: str
) -> None:
    with pytest.raises(WorkbenchError, match=re.escape(says)) as refused:
        ask_receipt(served.run_dir, rollouts, **options)
    assert refused.value.exit_code == code


def test_only_its_owner_may_open_the_desk_and_no_secret_is_in_the_run(served: Served) -> None:
    desk = Path(served.status()["desk"])
    assert stat.S_IMODE(desk.stat().st_mode) == 0o600
    assert stat.S_IMODE(desk.parent.stat().st_mode) == 0o700
    environments = [process.environ() for process in served.family()]
    tokens = {e[name] for e in environments for name in (CONTROL_TOKEN, WORKER_TOKEN) if name in e}
    assert tokens
    written = [path for path in [served.stdout, served.stderr, *served.run_dir.rglob("*")] if path.is_file()]
    for path in written:
        held = path.read_bytes()
        assert not [token for token in tokens if token.encode() in held], path


def test_an_interrupt_ends_everything_and_the_run_says_so(served: Served) -> None:
    """Last: it ends the server that the tests before it use."""
    served.talk("open.1", turns=1)
    served.lines("open.1", 1)
    desk = Path(served.status()["desk"])
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(STOP_TIMEOUT_S) == 0
    assert served.family() == []
    assert not desk.parent.exists()
    said = served.stderr.read_text()
    assert said.count("stopping") == 1 and "stopping on Ctrl-C (SIGINT)" in said and "before it served" not in said
    assert re.search(
        r"stopped after it served \d+ rollouts with \d+ calls: \d+ captured, \d rollouts with a receipt", said
    )
    assert "without a receipt, and so without tokens now: open.1" in said
    assert runs.open(served.run_dir).campaign["state"].to_list() == ["done"]
    with pytest.raises(ComponentDied, match="The server of run agent is gone"):
        ask_receipt(served.run_dir, ["open.1"])
    report = verify_run(served.run_dir)
    assert report.ok, str(report)
    assert report.rows_valid == 3 and report.not_compared == ["1 call of 1 rollout without a receipt"]
    calls = runs.open(served.run_dir).calls.height
    assert report.calls == calls - 1 and f"{report.calls} calls (1 not captured)" in repr(report)
    assert os.listdir(served.run_dir / "receipts") != []


def test_a_stop_that_reaches_ray_too_before_it_serves_leaves_its_true_status(tmp_path: Path) -> None:
    server = Served(tmp_path, start_new_session=True)
    try:
        server.wait_for(lambda: "starting data plane" in server.stderr.read_text(), START_TIMEOUT_S)
        # As a service manager or a closed terminal does it: every process of the group at the same time.
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) != 0
    finally:
        server.stop()
    status = server.status()
    assert (status["status"], status["phase"]) == ("stopped", "stopped")
    assert status["error"] == "stopped by SIGTERM while it was still starting data plane"
    assert runs.open(server.run_dir).campaign["state"].to_list() == ["stopped"]
    assert runs.open(server.run_dir).events["kind"][0] == "set_up"
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while server.family():
        assert time.monotonic() < deadline, server.family()
        time.sleep(0.1)


def test_a_gateway_that_dies_ends_the_server_and_the_run_names_it(tmp_path: Path) -> None:
    server = Served(tmp_path)
    try:
        server.wait_until_it_serves().talk("open.1", turns=1)
        (gateway,) = [part for part in server.family() if "workbench.gateway" in part.cmdline()]
        gateway.kill()
        assert server.process.wait(STOP_TIMEOUT_S) == 1
    finally:
        server.stop()
    status = server.status()
    assert (status["status"], status["phase"]) == ("failed", "failed")
    assert status["error"].startswith("ComponentDied: ") and "gateway" in status["error"]
    said = server.stderr.read_text()
    assert status["error"].removeprefix("ComponentDied: ") in said and "Traceback" not in said
    assert server.family() == []


@pytest.mark.engine
def test_an_engine_that_is_killed_leaves_its_log_where_the_message_says(tmp_path: Path) -> None:
    server = Served(tmp_path, "engine.kind=vllm", "engine.script_path=null").wait_until_it_serves()
    (engine,) = (process for process in server.family() if "EngineCore" in process.name())
    engine.kill()
    assert server.process.wait(STOP_TIMEOUT_S) == 1
    said = server.stderr.read_text()
    named = re.search(r"(logs/PolicyWorker-\d+)\.out and \.err in the run's directory", said)
    assert named and f"what its parts wrote: {server.run_dir / 'logs'}" in said, said
    assert "EngineCore" in "".join(path.read_text() for path in server.run_dir.glob(f"{named[1]}.*"))


def test_the_greeting_says_when_the_model_never_sees_an_agents_tools(tmp_path: Path) -> None:
    recipe = load_recipe("serve_smollm2")
    assert "left out by the chat template" in greeting(recipe, tmp_path, "http://x", {"renders_tools": False})
    for probe in ({"renders_tools": True}, {"capture_enabled": False}):
        assert "tools" not in greeting(recipe, tmp_path, "http://x", probe)


def test_the_greeting_fits_a_terminal_of_80_columns() -> None:
    run_dir = Path("reports/serve-serve_smollm2-12")
    said = greeting(load_recipe("serve_smollm2"), run_dir, "http://127.0.0.1:54321", {"renders_tools": False})
    assert max(map(len, said.splitlines())) <= 80


def test_a_run_that_is_not_served_has_no_desk(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "done", "run": "other"}')
    with pytest.raises(RunStoreError, match="Run other is not served"):
        ask_receipt(tmp_path, ["a"])
    with pytest.raises(RunStoreError, match="No run in"):
        ask_receipt(tmp_path / "none", ["a"])


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"status": "running", "phase": "starting ray"}, "before it served, .*: the process that wrote .* is gone"),
        ({"status": "stopped", "error": "stopped by SIGTERM"}, "before it served, .*: stopped by SIGTERM"),
        ({"status": "failed", "error": "ComponentDied: Ray"}, "before it served, .*: ComponentDied: Ray"),
    ],
)
def test_a_run_that_has_not_served_has_no_rollouts(tmp_path: Path, status: dict[str, Any], says: str) -> None:
    (tmp_path / "status.json").write_bytes(orjson.dumps({"run": "early", "command": "serve", **status}))
    with pytest.raises(RunStoreError, match=f"Run early .*{says}"):
        ask_receipt(tmp_path, ["a"])


def test_a_run_that_does_not_serve_yet_says_where_it_is(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.status(status="running", phase="starting ray", run="early", command="serve")
        with pytest.raises(RunStoreError, match=r"Run early does not serve yet \(starting ray\)"):
            ask_receipt(tmp_path, ["a"])


def test_a_served_run_whose_status_cannot_be_read_is_not_taken_for_a_campaign(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.event("serving", url="http://x")
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(RunStoreError, match=r"is not a readable JSON object, so where a server .* is not known"):
        ask_receipt(tmp_path, ["a"])
