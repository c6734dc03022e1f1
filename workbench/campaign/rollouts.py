"""Rollouts: play one task with one agent and close its trajectory, in the order that custody needs.

    agent talks to the gateway  →  freeze  →  reward  →  receipt  →  RolloutOutcome (metadata only)

Invariant: nothing that happens after `freeze` (a late call, the reward computation, verification) can change which
calls make the trajectory. A rollout that fails is an outcome with a cause; only a gateway that does not answer, or
a fault of our own, raises.
Not here: which calls are captured (gateway, policy worker), tokens (finalizer), grouping (controller).
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import openai
import orjson

from workbench import own_code
from workbench.campaign.environments import AgentResult, Environment, Reward, Task, fit
from workbench.campaign.standstill import SHARE, StoodStill
from workbench.deadline import TooLate, await_with_deadline
from workbench.errors import DeadlineExceeded, GatewayError, LedgerCorrupt
from workbench.finalizer.messages import RolloutOutcome
from workbench.gateway.client import ControlClient
from workbench.ledger.receipts import OnNoWitness, assemble_receipt
from workbench.wire import Cause, RolloutManifest

T = TypeVar("T")

_LET_GO = "all other rollouts waited. Next: `await`, or work in `asyncio.to_thread`"


def rollout_name(run: str, group: int, index: int, attempt: int) -> str:
    """The id of a rollout: what a `RolloutPlan` with these will have."""
    return f"{run}.{group}.{index}.{attempt}"


@dataclass(frozen=True)
class RolloutPlan:
    """One rollout to play. `index` is its place in the group, `attempt` counts replacements of the same place. Where
    there is no task, `task` says why."""

    run: str
    group: int
    index: int
    attempt: int
    task: Task | str

    @property
    def rollout_id(self) -> str:
        return rollout_name(self.run, self.group, self.index, self.attempt)

    @property
    def task_id(self) -> str | None:
        return self.task.task_id if isinstance(self.task, Task) else None


class AgentRunner(ABC):
    """Runs agents against one gateway and scores what they leave behind; how a rollout is closed is its subclass's.

    `timeout_s` bounds a task, one agent from its first request to its last, and then its reward; `components` are parts
    that every reward must have.
    """

    def __init__(
        self,
        *,
        gateway_url: str,
        environment: Environment,
        model: str,
        timeout_s: float,
        request_timeout_s: float,
        seed: int,
        components: frozenset[str] = frozenset(),
    ) -> None:
        self._components = components
        self._gateway_url = gateway_url.rstrip("/")
        self._environment = environment
        self._model = model
        self._timeout_s = timeout_s
        self._seed = seed
        # One connection pool for all agents: 16 concurrent rollouts would otherwise open and close hundreds. The SDK's
        # own client class, so that its own transport errors come out; a proxy of the environment is not for loopback.
        self._http = openai.DefaultAsyncHttpxClient(timeout=request_timeout_s, trust_env=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @abstractmethod
    async def play(self, plan: RolloutPlan) -> RolloutOutcome:
        """Play one rollout and return what the finalizer needs to know of it: ids, receipt, reward; never tokens."""

    def _client(self, path: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self._gateway_url}{path}", api_key="unused", http_client=self._http, max_retries=0
        )

    async def task(self, seed: int) -> Task | str:
        """The task of a seed, or one sentence saying why there is none."""
        return await self._in_time(lambda: fit.task_of(self._environment, seed), f"task({seed})")

    async def _scored(self, plan: RolloutPlan, result: AgentResult | None, error: str | None) -> Reward | str:
        """The reward of a rollout, or one sentence saying why it has none: `error` where it has failed before."""
        if error is not None or result is None or isinstance(plan.task, str):
            return error or "the agent left nothing to score"
        task = plan.task
        return await self._in_time(lambda: self._score(task, result), "its reward")

    async def _in_time(self, work: Callable[[], T], what: str) -> T | str:
        # In a thread: this is code that we did not write, and all other rollouts wait for this loop. Not in the loop's
        # own pool: what never comes back would keep one of the few that its other work needs.
        try:
            return await await_with_deadline(work, self._timeout_s)
        except TooLate:
            return f"{what} did not come within rollouts.timeout_s={self._timeout_s:g}"

    def _score(self, task: Task, result: AgentResult) -> Reward | str:
        try:
            reward = fit.reward_of(self._environment, self._environment.reward(task, result))
            return fit.parts_fault(self._environment, reward, self._components) or reward
        except BaseException as error:  # `exit()` too: this thread is the reward's alone
            return f"its reward raised {own_code.raised(error)}"

    async def run_agent(self, plan: RolloutPlan, client: Any) -> tuple[AgentResult | None, str | None]:
        """What the agent came to: (result, None), or (result or None, a sentence why the rollout has no vote)."""
        if isinstance(plan.task, str):
            return None, plan.task
        task = plan.task
        # Seeded by place, not by process: a replayed campaign plays the same agents whatever finished first.
        rng = random.Random(f"{self._seed}/{plan.group}/{plan.index}/{plan.attempt}")
        limit = asyncio.timeout(self._timeout_s)
        mine = asyncio.current_task()
        try:
            async with limit:
                # A task of its own, so that a cancellation that the agent gives itself is not the campaign's end.
                run = partial(self._environment.run, client, self._model, task, rng)
                result, error = await asyncio.create_task(left_by(run))
        except TimeoutError:
            return None, self._too_late()
        except asyncio.CancelledError as cancelled:
            result, error = None, cancelled
        if error is not None:
            if isinstance(error, asyncio.CancelledError) and mine is not None and mine.cancelling():
                raise error  # the campaign ends
            if isinstance(error, KeyboardInterrupt) and own_code.by_ctrl_c(error):
                raise error
            if isinstance(error, asyncio.CancelledError) and limit.expired():
                return None, self._too_late()
            return None, self._said_of(error)
        if (fault := fit.result_fault(self._environment, result)) is not None:
            return None, fault
        assert result is not None  # that would have been a fault
        return result, None if result.error is None else own_code.plain(result.error)

    def _too_late(self) -> str:
        return f"the agent did not finish within rollouts.timeout_s={self._timeout_s:g}"

    def _said_of(self, error: BaseException) -> str:
        """What an agent raised, as the reason why its rollout has no vote."""
        if isinstance(error, StoodStill):
            at = own_code.raised_at(error)
            return f"the agent kept the event loop for {SHARE * self._timeout_s:g} s{at}: {_LET_GO}"
        if isinstance(error, openai.OpenAIError):
            return f"the agent's call failed: {own_code.named(error)}"
        return f"the agent raised {own_code.raised(error)}"


async def left_by(run: Callable[[], Awaitable[T]]) -> tuple[T, None] | tuple[None, BaseException]:
    """What an agent returned, and what it raised: it is code that we did not write, and whatever it raises makes its
    rollout data, not a crash. An `exit()` that left its task would end the event loop before anybody could catch it.
    A standstill is looked for in what this calls."""
    try:
        return await run(), None
    except GeneratorExit:
        raise  # nobody waits for this rollout any more
    except BaseException as error:
        return None, error


class RolloutPlayer(AgentRunner):
    """Plays captured rollouts; the control calls have their own deadlines.

    `on_no_witness` says what a scored response that matches no captured call means: `mask` (our own campaigns) or
    `heuristic`; `refuse` also puts aside a rollout that left no response.
    """

    def __init__(self, *, control: ControlClient, on_no_witness: OnNoWitness = "mask", **settings: Any) -> None:
        super().__init__(**settings)
        self._control = control
        self._on_no_witness = on_no_witness

    async def play(self, plan: RolloutPlan) -> RolloutOutcome:
        rollout_id = plan.rollout_id
        started = time.monotonic()
        result, error = await self.run_agent(plan, self._client(f"/ng-rollout/{rollout_id}/v1"))
        try:
            closed = await self._control.freeze(rollout_id)
        except LedgerCorrupt as damage:
            # Its custody cannot be read any more; the other rollouts of the group are untouched by that.
            return RolloutOutcome(
                rollout_id=rollout_id,
                index=plan.index,
                task_id=plan.task_id,
                failure=Cause.MISSING_RECEIPT,
                detail=str(damage),
                duration_s=time.monotonic() - started,
            )
        manifest = RolloutManifest.model_validate(closed["manifest"])
        reward = await self._scored(plan, result, error)
        # As plain JSON, as if it had come over a wire: objects of somebody's own witness nothing.
        response = orjson.loads(orjson.dumps(result.response if result is not None else None))
        receipt = assemble_receipt(
            manifest,
            rollout_id=rollout_id,
            reward=reward.total if isinstance(reward, Reward) else None,
            response=response,
            failure_reason=Cause.ROLLOUT_FAILED.value if isinstance(reward, str) else None,
            on_no_witness=self._on_no_witness,
        )
        outcome = outcome_of(plan, reward, result, started, receipt=receipt, failures=manifest.failures)
        if receipt.failure_reason != Cause.MISSING_TERMINAL or response is None:
            return outcome
        return outcome.model_copy(update={"detail": await self._nearest(rollout_id, response)})

    async def _nearest(self, rollout_id: str, response: Any) -> str | None:
        """What a response that no call gave nearly is, in words."""
        try:
            return (await self._control.freeze(rollout_id, response=response)).get("nearest")
        except (GatewayError, DeadlineExceeded):  # too long, no object, late: then the codes have to do
            return None


def outcome_of(
    plan: RolloutPlan, reward: Reward | str, result: AgentResult | None, started: float, **custody: Any
) -> RolloutOutcome:
    """The outcome of a rollout that began at `started` (monotonic, s); one without a reward has failed for the words
    that stand in its place."""
    given = None if isinstance(reward, str) else reward
    return RolloutOutcome(
        rollout_id=plan.rollout_id,
        index=plan.index,
        task_id=plan.task_id,
        failure=Cause.ROLLOUT_FAILED if given is None else None,
        detail=reward if isinstance(reward, str) else None,
        reward=None if given is None else given.total,
        reward_components={} if given is None else given.components,
        ended_early=None if result is None or result.ended_early is None else own_code.plain(result.ended_early),
        duration_s=time.monotonic() - started,
        **custody,
    )
