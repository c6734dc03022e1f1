"""A Ray of the campaign's own: a start that was too slow is tried again, and leaves nothing of the first try."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import pytest
import ray

from workbench.campaign.ray_cluster import TOO_SLOW, connect, start_own
from workbench.config import load_recipe
from workbench.errors import ComponentDied, SetupError


class SlowRay:
    """Fails as Ray does on a busy machine, `times` times, and leaves a process behind each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, says: str = f"The node {TOO_SLOW}.") -> None:
        self.left: list[subprocess.Popen[bytes]] = []
        self.tries, self._times, self._says = 0, times, says
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)

    def init(self, **options: Any) -> None:
        self.tries += 1
        if self.tries <= self._times:
            self.left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception(self._says)  # as bare as Ray's own


def test_a_start_that_was_too_slow_is_tried_again_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(monkeypatch, times=1)
    start_own({}, 60.0)
    assert slow.tries == 2
    assert [process.wait(10) for process in slow.left] == [-9]


def test_when_the_time_is_over_the_key_that_gives_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(monkeypatch, times=9)
    with pytest.raises(ComponentDied, match=rf"within 0\.01 s: .*{TOO_SLOW}.* raise deadlines\.start_s"):
        start_own({}, 0.01)
    assert [process.wait(10) for process in slow.left] == [-9] * slow.tries


def test_another_failure_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(monkeypatch, times=9, says="no space left on device")
    with pytest.raises(ComponentDied, match="Ray did not start: no space left on device Next: workbench doctor"):
        start_own({}, 60.0)
    assert slow.tries == 1
    assert slow.left[0].wait(10) == -9


def test_a_cluster_that_answers_and_lets_nobody_in_is_named_with_what_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        slow = SlowRay(monkeypatch, times=1, says="Authentication token is wrong.\n  Ask for another.")
        with pytest.raises(SetupError) as refused:
            connect(load_recipe("cpu_smoke", [f"ray.address={address}"]))
        slow.left[0].kill()
        slow.left[0].wait(10)
    said = str(refused.value)
    assert said.startswith(f"ray.address: what listens at {address} lets this process not in: Authentication token is")
    assert "RAY_AUTH_TOKEN" in said and "\n" not in said
