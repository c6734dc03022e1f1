"""Echo rollouts: play one task in the token-echo arm, where the responses bring their ids to the driver.

    agent talks through an EchoClient  →  reward  →  chain of its calls to the echo finalizer  →  RolloutOutcome
There is no custody here: no ledger, no freeze, no receipt. Which calls make the row is read off the scored response's
own history.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from workbench.campaign.rollouts import AgentRunner, RolloutPlan, outcome_of
from workbench.echo.calls import chain_of
from workbench.echo.client import EchoClient
from workbench.echo.finalizer import EchoFinalizer
from workbench.finalizer.messages import RolloutOutcome
from workbench.serving.sampling import SamplingPins


class EchoPlayer(AgentRunner):
    """Plays rollouts of the token-echo arm and leaves each one's calls with `finalizer`."""

    def __init__(
        self, *, finalizer: EchoFinalizer, sampling: SamplingPins, weight_version: Callable[[], int], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._finalizer = finalizer
        self._sampling = sampling
        self._weight_version = weight_version

    async def play(self, plan: RolloutPlan) -> RolloutOutcome:
        rollout_id = plan.rollout_id
        started = time.monotonic()
        echo = EchoClient(self._client("/v1"), self._sampling, self._weight_version, rollout_id)
        result, error = await self.run_agent(plan, echo)
        reward = await self._scored(plan, result, error)
        response = result.response if result is not None else None
        self._finalizer.chains[rollout_id] = chain_of(echo.calls, str((response or {}).get("id")))
        return outcome_of(plan, reward, result, started)
