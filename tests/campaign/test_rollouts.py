"""One rollout, played against a control plane that only remembers: what becomes of rewards that are none."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.campaign.environments import AgentResult, Reward, Task
from workbench.campaign.rollouts import RolloutPlan, RolloutPlayer
from workbench.wire import Cause


class Control:
    async def freeze(self, rollout_id: str, response: Any = None) -> dict[str, Any]:
        return {"manifest": {"rollout_id": rollout_id, "records": [], "failures": []}}


class Scoring:
    """An environment whose agent answers at once and whose reward is what the test says."""

    def __init__(self, reward: Any) -> None:
        self._reward = reward

    async def run(self, client: Any, model: str, task: Task, rng: Any) -> AgentResult:
        return AgentResult(response=None, transcript=[])

    def reward(self, task: Task, result: AgentResult) -> Reward:
        if isinstance(self._reward, Exception):
            raise self._reward
        return self._reward


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (ValueError("no number in it"), "its reward raised ValueError: no number in it"),
        (Reward(float("nan"), {}), "a reward is a finite number"),
        (Reward(1.0, {"form": float("inf")}), "a reward is a finite number"),
    ],
)
async def test_a_reward_that_is_none_costs_its_rollout_the_vote_and_not_the_run(reward: Any, says: str) -> None:
    player = RolloutPlayer(
        gateway_url="http://127.0.0.1:9",
        control=Control(),  # type: ignore[arg-type]
        environment=Scoring(reward),  # type: ignore[arg-type]
        model="policy",
        timeout_s=5.0,
        request_timeout_s=5.0,
        seed=0,
    )
    try:
        outcome = await player.play(RolloutPlan("run", 0, 0, 0, Task("t", 0, {})))
    finally:
        await player.close()
    assert (outcome.failure, outcome.reward, outcome.reward_components) == (Cause.ROLLOUT_FAILED, 0.0, {})
    assert outcome.detail is not None
    assert says in outcome.detail
    assert outcome.receipt is not None
    assert outcome.receipt.failure_reason == "rollout_failed"
