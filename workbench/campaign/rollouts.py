"""Rollouts: play one task with one agent and close its trajectory, in the order that custody needs.

    agent talks to the gateway  →  freeze  →  reward  →  receipt  →  RolloutOutcome (metadata only)

Invariant: nothing that happens after `freeze` (a late call, the reward computation, verification) can change which
calls make the trajectory. A rollout that fails is an outcome with a cause; only a gateway that does not answer, or
a fault of our own, raises.
Not here: which calls are captured (gateway, policy worker), tokens (finalizer), grouping (controller).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sysconfig
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai

from workbench.campaign.environments import AgentResult, Environment, Reward, Task
from workbench.errors import LedgerCorrupt
from workbench.finalizer.messages import RolloutOutcome
from workbench.gateway.client import ControlClient
from workbench.ledger.receipts import OnNoWitness, assemble_receipt
from workbench.wire import Cause, RolloutManifest

T = TypeVar("T")
_NOT_OWN = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")),
)
"""Where code lies that a person who writes an environment has not written."""


@dataclass(frozen=True)
class RolloutPlan:
    """One rollout to play. `index` is its place in the group, `attempt` counts replacements of the same place."""

    run: str
    group: int
    index: int
    attempt: int
    task: Task

    @property
    def rollout_id(self) -> str:
        return f"{self.run}.{self.group}.{self.index}.{self.attempt}"


class AgentRunner(ABC):
    """Runs agents against one gateway and scores what they leave behind; how a rollout is closed is its subclass's.

    `timeout_s` bounds one agent from its first request to its last, and then its reward.
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
    ) -> None:
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

    async def _scored(self, plan: RolloutPlan, result: AgentResult) -> tuple[float, dict[str, float], str | None]:
        """(reward, its parts, None), or (0, {}, one sentence saying why this rollout cannot be scored)."""
        # In a thread: a reward is code that we did not write, and all other rollouts wait for this loop. In one of its
        # own: a reward that never comes back would keep one of the few that the loop's other work needs.
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _in_own_thread(lambda: self._score(plan, result))
        except TimeoutError:
            return 0.0, {}, f"its reward did not come within rollouts.timeout_s={self._timeout_s:g}"

    def _score(self, plan: RolloutPlan, result: AgentResult) -> tuple[float, dict[str, float], str | None]:
        try:
            reward = self._environment.reward(plan.task, result)
        except BaseException as error:  # `exit()` too: this thread is the reward's alone
            return 0.0, {}, f"its reward raised {_raised(error)}"
        if not isinstance(reward, Reward):
            return 0.0, {}, f"reward() returned {_a(reward)}, expected Reward(…)"
        try:
            total = float(reward.total)
            components = {name: float(part) for name, part in reward.components.items()}
        except Exception as error:
            return 0.0, {}, f"reward() returned {reward!r:.200}, and a reward and its parts are numbers: {error}"
        if not all(math.isfinite(value) for value in (total, *components.values())):
            return 0.0, {}, f"its reward is {total}, with the parts {components}; a reward is a finite number"
        return total, components, None

    async def _run_agent(self, plan: RolloutPlan, client: Any) -> tuple[AgentResult | None, str | None]:
        """(result, None) or (result or None, one sentence saying why the rollout has no vote)."""
        # Seeded by place, not by process: a replayed campaign plays the same agents whatever finished first.
        rng = random.Random(f"{self._seed}/{plan.group}/{plan.index}/{plan.attempt}")
        try:
            # In this task: an `exit()` in one of its own would end the event loop before anybody could catch it.
            async with asyncio.timeout(self._timeout_s):
                result = await self._environment.run(client, self._model, plan.task, rng)
        except TimeoutError:
            return None, f"the agent did not finish within rollouts.timeout_s={self._timeout_s:g}"
        except openai.OpenAIError as error:
            return None, f"the agent's call failed: {type(error).__name__}: {error}"
        except (Exception, SystemExit) as error:
            # An agent is code that we did not write: whatever it raises makes this rollout data, not a crash.
            return None, f"the agent raised {_raised(error)}"
        if not isinstance(result, AgentResult):
            return None, f"run() returned {_a(result)}, expected AgentResult(…)"
        if not isinstance(result.response, dict | None):
            expected = "the served object as JSON (`model_dump(mode='json')`) or None"
            return None, f"run() returned an AgentResult whose response is {_a(result.response)}, expected {expected}"
        return result, result.error


class RolloutPlayer(AgentRunner):
    """Plays captured rollouts; the control calls have their own deadlines.

    `on_no_witness` says what a scored response that matches no captured call means: `mask` (our own campaigns) or
    `heuristic`.
    """

    def __init__(self, *, control: ControlClient, on_no_witness: OnNoWitness = "mask", **settings: Any) -> None:
        super().__init__(**settings)
        self._control = control
        self._on_no_witness = on_no_witness

    async def play(self, plan: RolloutPlan) -> RolloutOutcome:
        rollout_id = plan.rollout_id
        started = time.monotonic()
        result, error = await self._run_agent(plan, self._client(f"/ng-rollout/{rollout_id}/v1"))
        response = result.response if result is not None else None
        try:
            closed = await self._control.freeze(rollout_id, response=response)
        except LedgerCorrupt as damage:
            # Its custody cannot be read any more; the other rollouts of the group are untouched by that.
            return RolloutOutcome(
                rollout_id=rollout_id,
                index=plan.index,
                task_id=plan.task.task_id,
                failure=Cause.MISSING_RECEIPT,
                detail=str(damage),
                duration_s=time.monotonic() - started,
            )
        manifest = RolloutManifest.model_validate(closed["manifest"])
        total: float = 0.0
        components: dict[str, float] = {}
        if error is None and result is not None:
            total, components, error = await self._scored(plan, result)
        receipt = assemble_receipt(
            manifest,
            rollout_id=rollout_id,
            reward=total,
            response=response,
            failure_reason=Cause.ROLLOUT_FAILED.value if error is not None else None,
            on_no_witness=self._on_no_witness,
        )
        return RolloutOutcome(
            rollout_id=rollout_id,
            index=plan.index,
            task_id=plan.task.task_id,
            receipt=receipt,
            failures=manifest.failures,
            failure=Cause.ROLLOUT_FAILED if error is not None else None,
            detail=error,
            reward=total,
            reward_components=components,
            duration_s=time.monotonic() - started,
        )


def _raised(error: BaseException) -> str:
    """`KeyError: 'score' at my_env.py:31`, the place being the deepest one that neither Python nor a package has."""
    # The first frame is ours. The one that we called counts where all are of packages: that is where theirs begins.
    called = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<")]
    own = [frame for frame in called if not any(Path(frame.filename).is_relative_to(place) for place in _NOT_OWN)]
    place = [f" at {Path(frame.filename).name}:{frame.lineno}" for frame in (own or called[:1])[-1:]]
    return f"{type(error).__name__}: {error}{''.join(place)}"


def _a(value: Any) -> str:
    """What came in place of what was expected: `None`, `a float`, `an int`."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _in_own_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work()`, which must not raise, returns; the thread ends with the process where it has not ended before."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T) -> None:
        if not future.done():  # else nobody waits any more
            future.set_result(value)

    def body() -> None:
        value = work()
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=body, name="workbench-reward", daemon=True).start()
    return future
