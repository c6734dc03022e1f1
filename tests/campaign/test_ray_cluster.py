"""A Ray of the campaign's own: a start that was too slow is tried again, and leaves nothing of the first try. On a
cluster, no place is asked for while Ray counts a node that does not answer."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from workbench.campaign.machines.ray_cluster import TOO_SLOW, connect, start_own, wait_for_lost_nodes
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


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Ray's list of a node that answers and one whose processes are gone."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # nobody listens
        ports = there.getsockname()[1], gone.getsockname()[1]
        nodes = [
            {"NodeID": name * 56, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port, "Alive": True}
            for name, port in zip("ab", ports, strict=True)
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        yield nodes


def test_a_lost_node_is_waited_for_until_ray_has_given_it_up(two_nodes: list[dict[str, Any]]) -> None:
    said: list[str] = []

    def gives_up(words: str) -> None:
        said.append(words)
        two_nodes[1]["Alive"] = False

    wait_for_lost_nodes(60.0, gives_up)
    assert said == ["waiting until Ray gives up node 127.0.0.1 (bbbbbbbb), which does not answer"]
    wait_for_lost_nodes(60.0, said.append)
    assert len(said) == 1


def test_a_lost_node_that_ray_goes_on_counting_is_named_with_the_next_step(two_nodes: list[dict[str, Any]]) -> None:
    with pytest.raises(
        SetupError, match=r"still counts node 127\.0\.0\.1 \(bbbbbbbb\) as alive.* Next: ray stop there"
    ):
        wait_for_lost_nodes(0.01, lambda words: None)
