"""One rollout, played against a control plane that only remembers: what becomes of rewards that are none."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chains import Chain

from workbench.campaign import standstill
from workbench.campaign.controller import Campaign
from workbench.campaign.echo_rollouts import EchoPlayer
from workbench.campaign.environments import AgentResult, Reward, Task
from workbench.campaign.rollouts import AgentRunner, RolloutPlan, RolloutPlayer, left_by
from workbench.config import load_recipe
from workbench.errors import DeadlineExceeded, GatewayError
from workbench.finalizer.verdicts import Rejection, verdict_of
from workbench.serving.sampling import SamplingPins
from workbench.wire import Cause


class Control:
    async def freeze(self, rollout_id: str) -> dict[str, Any]:
        return {"manifest": {"rollout_id": rollout_id, "records": [], "failures": []}}


class Scoring:
    """An environment whose agent answers at once and whose reward is what the test says."""

    def __init__(self, reward: Any) -> None:
        self._reward = reward

    async def run(self, client: Any, model: str, task: Task, rng: Any) -> AgentResult:
        return AgentResult(response=None, transcript=[])

    def reward(self, task: Task, result: AgentResult) -> Reward:
        if isinstance(self._reward, BaseException):
            raise self._reward
        return self._reward() if callable(self._reward) else self._reward


def captured(reward: Any, timeout_s: float) -> AgentRunner:
    return RolloutPlayer(control=Control(), **_settings(reward, timeout_s))  # type: ignore[arg-type]


def echoed(reward: Any, timeout_s: float) -> AgentRunner:
    return EchoPlayer(
        finalizer=SimpleNamespace(chains={}),  # type: ignore[arg-type]
        sampling=SamplingPins.of(load_recipe("cpu_smoke").sampling, 0),
        weight_version=lambda: 0,
        **_settings(reward, timeout_s),
    )


def _settings(reward: Any, timeout_s: float) -> dict[str, Any]:
    return {
        "gateway_url": "http://127.0.0.1:9",
        "environment": Scoring(reward),
        "model": "policy",
        "timeout_s": timeout_s,
        "request_timeout_s": 5.0,
        "seed": 0,
    }


async def _returned(value: Any) -> Any:
    return value


async def _raised(error: BaseException) -> Any:
    raise error


class Sudden(BaseException):
    """No `Exception`, as KeyboardInterrupt is none."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RUN = f"run() ({Path(__file__).name}:LINE) returned"
PLAN = RolloutPlan("run", 0, 0, 0, Task("t", 0, {}))


@pytest.mark.parametrize("make", [captured, echoed])
async def test_the_loop_goes_on_while_a_reward_is_computed(make: Callable[..., AgentRunner]) -> None:
    loop_went_on = threading.Event()
    player = make(lambda: Reward(float(loop_went_on.wait(20.0)), {}), timeout_s=60.0)
    playing = asyncio.create_task(player.play(PLAN))
    while not playing.done():
        await asyncio.sleep(0.01)
        loop_went_on.set()
    await player.close()
    assert (await playing).reward == 1.0


async def test_an_agent_that_keeps_the_event_loop_is_told_of_and_costs_its_rollout_alone(monkeypatch) -> None:
    monkeypatch.setattr(standstill, "TOLD_AFTER_S", 0.5)
    told: list[str] = []

    class Blocking(Scoring):
        async def run(self, client: Any, model: str, task: Task, rng: Any) -> AgentResult:
            while task.seed == 1:
                pass
            return AgentResult(response=None, transcript=[])

    player = captured(Reward(1.0, {}), timeout_s=4.0)
    player._environment = Blocking(Reward(1.0, {}))  # type: ignore[assignment]
    watching = asyncio.create_task(standstill.Standstill(4.0, left_by, told.append).run())
    plans = [replace(PLAN, index=seed, task=Task("t", seed, {})) for seed in range(3)]
    outcomes = await asyncio.gather(*map(player.play, plans))
    watching.cancel()
    await player.close()
    here, line = Path(__file__).name, Blocking.run.__code__.co_firstlineno
    assert [outcome.reward for outcome in outcomes] == [1.0, None, 1.0]
    detail = outcomes[1].detail or ""
    assert detail.startswith(f"the agent kept the event loop for 2 s at {here}:")
    assert int(detail.split(f"{here}:")[1].split(":")[0]) - line in (1, 2)
    assert len(told) == 1 and told[0].startswith(f"the event loop has stood still for 0.5 s at {here}:")


@pytest.mark.parametrize("strict", [False, True])
async def test_a_recipe_may_refuse_a_rollout_whose_last_call_nobody_named(strict: bool) -> None:
    chain = Chain(PLAN.rollout_id)
    staged = chain.call()

    class One(Control):
        async def freeze(self, rollout_id: str) -> dict[str, Any]:
            records = [record.model_dump(mode="json") for record in chain.records]
            return {"manifest": {"rollout_id": rollout_id, "records": records, "failures": []}}

    recipe = load_recipe("cpu_smoke", [f"rollouts.require_terminal_witness={str(strict).lower()}"])
    fleet: Any = SimpleNamespace(gateway_url="http://127.0.0.1:1", control=One(), finalizers=None)
    campaign: Any = SimpleNamespace(recipe=recipe, fleet=fleet, environment=Scoring(Reward(1.0, {})))
    player = Campaign._player(campaign)
    outcome = await player.play(PLAN)
    await player.close()
    verdict = verdict_of(outcome, {chain.records[0].staging_key: staged})
    if strict:
        assert isinstance(verdict, Rejection) and verdict.cause is Cause.MISSING_TERMINAL
        assert verdict.detail == "no_response_object"
    else:
        assert not isinstance(verdict, Rejection)
        assert outcome.receipt is not None and outcome.receipt.terminal_selection == "heuristic"


@pytest.mark.parametrize("refuses", [None, GatewayError("It answered 413."), DeadlineExceeded("No answer in 30 s.")])
async def test_an_answer_that_no_call_gave_is_put_aside_with_what_it_nearly_is(refuses: Exception | None) -> None:
    left = {"choices": [{"message": {"role": "assistant", "content": "It rains.\n"}}]}
    chain = Chain(PLAN.rollout_id)
    staged = chain.call()

    class Printed(Scoring):
        async def run(self, client: Any, model: str, task: Task, rng: Any) -> AgentResult:
            return AgentResult(response=left, transcript=[])

    class Near(Control):
        async def freeze(self, rollout_id: str, response: Any = None) -> dict[str, Any]:
            if response is not None and refuses is not None:
                raise refuses
            records = [record.model_dump(mode="json") for record in chain.records]
            closed = {"manifest": {"rollout_id": rollout_id, "records": records, "failures": []}}
            return closed | ({} if response is None else {"nearest": "it has a newline. Next: leave it."})

    player = RolloutPlayer(control=Near(), **_settings(Reward(1.0, {}), 5.0))  # type: ignore[arg-type]
    player._environment = Printed(Reward(1.0, {}))  # type: ignore[assignment]
    outcome = await player.play(PLAN)
    await player.close()
    verdict = verdict_of(outcome, {chain.records[0].staging_key: staged})
    assert isinstance(verdict, Rejection) and verdict.cause is Cause.MISSING_TERMINAL
    said = "response_has_no_id,no_content_match"
    assert verdict.detail == (said if refuses else f"{said}; it has a newline. Next: leave it.")


async def test_a_real_ctrl_c_in_an_agent_ends_more_than_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    player = captured(Reward(1.0), timeout_s=5.0)

    async def run(*_: Any) -> AgentResult:
        raise KeyboardInterrupt

    player._environment.run = run  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        await player.run_agent(PLAN, None)
    await player.close()


async def test_a_task_that_cannot_be_had_is_a_sentence_and_one_that_never_comes_holds_nobody_up() -> None:
    never = threading.Event()

    def task(seed: int) -> Task:
        if seed == 2:
            raise KeyError("words")
        if seed == 5:
            raise KeyboardInterrupt
        never.wait(20.0 if seed == 3 else 0.0)
        return Task(f"t-{seed}", seed, {})

    player = captured(lambda: 1.0, timeout_s=0.5)
    player._environment.task = task  # type: ignore[method-assign]
    try:
        assert await player.task(1) == Task("t-1", 1, {})
        place = f"{Path(__file__).name}:{task.__code__.co_firstlineno + 2}"
        assert await player.task(2) == f"task(2) raised KeyError: 'words' at {place}"
        assert str(await player.task(5)).startswith("task(5) raised KeyboardInterrupt at test_rollouts.py")
        waiting = asyncio.create_task(player.task(3))
        assert await player.task(4) == Task("t-4", 4, {}) and not waiting.done()
        assert await waiting == "task(3) did not come within rollouts.timeout_s=0.5"
    finally:
        never.set()
        await player.close()


@pytest.mark.parametrize("make", [captured, echoed])
async def test_rewards_that_never_come_cost_their_rollouts_the_vote_and_hold_nobody_else_up(
    make: Callable[..., AgentRunner],
) -> None:
    never = threading.Event()
    player = make(lambda: Reward(float(never.wait()), {}), timeout_s=0.1)
    try:
        # More than the loop has threads for all its other work.
        outcomes = await asyncio.wait_for(asyncio.gather(*(player.play(PLAN) for _ in range(40))), 30)
        assert {outcome.detail for outcome in outcomes} == {"its reward did not come within rollouts.timeout_s=0.1"}
        assert {(outcome.failure, outcome.reward) for outcome in outcomes} == {(Cause.ROLLOUT_FAILED, None)}
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    finally:
        never.set()
        await player.close()


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (ValueError("no number in it"), "its reward raised ValueError: no number in it"),
        (SystemExit(3), "its reward raised SystemExit: 3"),
        (KeyboardInterrupt(), "its reward raised KeyboardInterrupt at test_rollouts.py"),
        (Sudden("mine"), "its reward raised Sudden: mine"),
        (Unprintable(), "its reward raised Unprintable: (it cannot be printed)"),
        (ValueError("two\nlines \ud800"), "its reward raised ValueError: two lines ?"),
        (lambda: None, "returned None, expected Reward(total, components)"),
        (lambda: 0.5, "returned a float, expected Reward("),
        (lambda: True, "returned a bool, expected Reward("),
        (lambda: np.float64(0.5), "returned a float64, expected Reward("),
        (lambda: [0.5], "returned a list, expected Reward("),
        (lambda: _returned(Reward(1.0)), "returned a coroutine that nobody awaited, expected Reward("),
        (Reward("0.5"), "a Reward whose total is '0.5' (a str), expected a finite number"),  # type: ignore[arg-type]
        (Reward([0.5]), "a Reward whose total is [0.5] (a list), expected a finite number"),  # type: ignore[arg-type]
        (Reward(np.array([0.5])), "a Reward whose total is array([0.5]) (a ndarray), expected a finite number"),  # type: ignore[arg-type]
        (Reward(None), "a Reward whose total is None, expected a finite number"),  # type: ignore[arg-type]
        (Reward(float("nan")), "a Reward whose total is nan (a float), expected a finite number"),
        (Reward(10**400), "expected a finite number"),
        (Reward(-1e30), "a Reward whose total is -1e+30 (a float), expected a number between -1e+15 and 1e+15"),
        (Reward(1.0, {"form": 1e308}), "is 1e+308 (a float), expected a number between -1e+15 and 1e+15"),
        (Reward(1.0, None), "a Reward whose components are None, expected a dict of numbers"),  # type: ignore[arg-type]
        (Reward(1.0, [1.0]), "a Reward whose components are [1.0] (a list), expected a dict of numbers"),  # type: ignore[arg-type]
        (Reward(1.0, {"form": float("inf")}), "whose component 'form' is inf (a float), expected a finite number"),
        (Reward(1.0, {"form": "1"}), "whose component 'form' is '1' (a str), expected a finite number"),  # type: ignore[dict-item]
        (Reward(1.0, {1: 1.0}), "a Reward with a component named 1 (an int), expected a text"),  # type: ignore[dict-item]
        (Reward(1.0, {"\ud800": 1.0}), "(a str), expected a text"),
    ],
)
async def test_a_reward_that_is_none_costs_its_rollout_the_vote_and_not_the_run(reward: Any, says: str) -> None:
    player = captured(reward, timeout_s=5.0)
    try:
        outcome = await player.play(PLAN)
    finally:
        await player.close()
    assert (outcome.failure, outcome.reward, outcome.reward_components) == (Cause.ROLLOUT_FAILED, None, {})
    assert outcome.detail is not None
    assert says in outcome.detail
    if "returned" in says:
        assert outcome.detail.startswith(f"reward() ({Path(__file__).name}:")
    assert outcome.receipt is not None
    assert (outcome.receipt.failure_reason, outcome.receipt.reward) == ("rollout_failed", None)


@pytest.mark.parametrize("total", [True, 1, np.float32(1.0), np.bool_(True), np.array(1.0)])
async def test_a_reward_may_be_a_number_of_any_kind(total: Any) -> None:
    player = captured(Reward(total, {"form": total}), timeout_s=5.0)
    outcome = await player.play(PLAN)
    await player.close()
    assert (outcome.failure, outcome.reward, outcome.reward_components) == (None, 1.0, {"form": 1.0})
    assert type(outcome.reward) is float


@pytest.mark.parametrize("make", [captured, echoed])
@pytest.mark.parametrize(
    ("run", "timeout_s", "says"),
    [
        (lambda client: asyncio.Event().wait(), 0.5, "the agent did not finish within rollouts.timeout_s=0.5"),
        (
            lambda client: client.chat.completions.create(model="policy", messages=[]),
            60.0,
            "the agent's call failed: API",
        ),
        (lambda client: asyncio.to_thread(int, "x"), 60.0, "the agent raised ValueError: invalid literal"),
        (lambda client: sys.exit(3), 60.0, "the agent raised SystemExit: 3"),
        (lambda client: _raised(KeyboardInterrupt()), 60.0, "the agent raised KeyboardInterrupt at test_rollouts.py"),
        (lambda client: _raised(Sudden("mine")), 60.0, "the agent raised Sudden: mine at test_rollouts.py"),
        (lambda client: _raised(TimeoutError("mine")), 60.0, "the agent raised TimeoutError: mine at test_rollouts.py"),
        (lambda client: _raised(asyncio.CancelledError()), 60.0, "the agent raised CancelledError at test_rollouts.py"),
        (lambda client: _returned(None), 60.0, f"{RUN} None, expected AgentResult(…)"),
        (lambda client: _returned({"a": 1}), 60.0, f"{RUN} a dict, expected AgentResult(…)"),
        (lambda client: _returned(_returned(7)), 60.0, f"{RUN} a coroutine that nobody awaited, expected AgentResult"),
        (lambda client: _returned(AgentResult(client, [])), 60.0, f"{RUN} an AgentResult whose response is a"),
        (
            lambda client: _returned(AgentResult({"choices": [client]}, [])),
            60.0,
            f"{RUN} an AgentResult whose response is no JSON (Type is not JSON serializable: ",
        ),
        (
            lambda client: _returned(AgentResult({("a", 1): 2}, [])),
            60.0,
            f"{RUN} an AgentResult whose response is no JSON (Dict key must",
        ),
        (
            lambda client: _returned(AgentResult(None, [], error=ValueError("x"))),  # type: ignore[arg-type]
            60.0,
            f"{RUN} an AgentResult whose error is ValueError('x') (a ValueError), expected a text or None",
        ),
        (lambda client: _returned(AgentResult(None, [], error="gave\nup \ud800")), 60.0, "gave up ?"),
    ],
)
async def test_an_agent_that_fails_costs_its_rollout_the_vote_and_not_the_run(
    make: Callable[..., AgentRunner],
    run: Callable[[Any], Any],
    timeout_s: float,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def played(self: Scoring, client: Any, model: str, task: Task, rng: Any) -> AgentResult:
        return await run(client)

    monkeypatch.setattr(Scoring, "run", played)
    player = make(Reward(1.0, {}), timeout_s=timeout_s)
    outcome = await player.play(PLAN)
    await player.close()
    assert (outcome.failure, outcome.reward) == (Cause.ROLLOUT_FAILED, None)
    assert outcome.detail is not None
    assert outcome.detail.replace(str(played.__code__.co_firstlineno), "LINE").startswith(says)


async def test_what_a_reward_or_an_agent_raises_is_told_with_the_line_of_ones_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def score(text: str) -> Reward:
        return Reward(float(json.loads(text)["score"]))

    here, line = Path(__file__).name, score.__code__.co_firstlineno + 1
    player = captured(lambda: score("{}"), timeout_s=5.0)
    outcome = await player.play(PLAN)
    assert outcome.detail == f"its reward raised KeyError: 'score' at {here}:{line}"
    # What raises is the library; who called it is told.
    player = captured(lambda: score("no JSON"), timeout_s=5.0)
    detail = (await player.play(PLAN)).detail
    assert detail is not None and "JSONDecodeError" in detail and detail.endswith(f" at {here}:{line}")

    async def run(self: Scoring, client: Any, model: str, task: Task, rng: Any) -> AgentResult:
        return score("{}")  # type: ignore[return-value]

    monkeypatch.setattr(Scoring, "run", run)
    outcome = await player.play(PLAN)
    assert outcome.detail == f"the agent raised KeyError: 'score' at {here}:{line}"
    await player.close()


async def test_a_player_that_is_cancelled_is_cancelled_and_its_rollout_no_failure() -> None:
    player = captured(lambda: Reward(1.0), timeout_s=60.0)
    never = asyncio.Event()

    async def run(*_: Any) -> AgentResult:
        await never.wait()
        return AgentResult(None, [])

    player._environment.run = run  # type: ignore[method-assign]
    playing = asyncio.create_task(player.play(PLAN))
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await player.close()


async def test_an_agent_that_returns_an_exception_has_returned_it_and_ends_nothing() -> None:
    async def run(*_: Any) -> Any:
        return KeyboardInterrupt()

    player = captured(lambda: Reward(1.0), timeout_s=20.0)
    player._environment.run = run  # type: ignore[method-assign]
    result, error = await player.run_agent(PLAN, None)
    assert result is None and error is not None and "returned" in error and "expected" in error
    await player.close()


@pytest.mark.parametrize("then", ["waits", "returns"])
@pytest.mark.parametrize("make", [captured, echoed])
async def test_an_agent_that_cancels_its_own_task_costs_its_rollout_alone(
    make: Callable[..., AgentRunner], then: str
) -> None:
    async def run(*_: Any) -> AgentResult:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if then == "waits":
            await asyncio.sleep(30.0)
        return AgentResult(None, [])

    player = make(lambda: Reward(1.0), timeout_s=20.0)
    player._environment.run = run  # type: ignore[method-assign]
    async with asyncio.timeout(10.0):
        result, error = await player.run_agent(PLAN, None)
    assert result is None and error is not None and error.startswith("the agent raised CancelledError")
    mine = asyncio.current_task()
    assert mine is not None and not mine.cancelling()
    await player.close()


@pytest.mark.parametrize("make", [captured, echoed])
async def test_without_a_task_nothing_is_played_and_the_rollout_says_why(make: Callable[..., AgentRunner]) -> None:
    player = make(Reward(1.0), timeout_s=5.0)
    outcome = await player.play(RolloutPlan("run", 0, 0, 0, "task(7) raised KeyError: 'words' at my_env.py:12"))
    await player.close()
    assert (outcome.failure, outcome.reward, outcome.task_id) == (Cause.ROLLOUT_FAILED, None, None)
    assert outcome.detail == "task(7) raised KeyError: 'words' at my_env.py:12"
