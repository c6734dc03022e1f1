"""Fit: whether an environment of somebody's own, and what its methods give, is what the campaign can use.

    the environment, once ──unfit──▶ why it is refused before anything starts
    task(), run(), reward() ──task_of, result_fault, reward_of──▶ the value, or why this group or rollout has none
Every answer is one sentence with the method, its file and line, what came and what was expected. Invariant: whatever
somebody's code returns or raises is answered, not raised. Not here: what follows for the rollout (rollouts).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import orjson

from workbench import own_code
from workbench.campaign.environments.base import AgentResult, Environment, Reward, Task

LARGEST = 1e15
"""Of a reward: advantages of larger ones would make the gradient infinite, or their squares would."""
_CALLED_WITH = {
    "task": ("seed",),
    "run": ("client", "model", "task", "rng"),
    "reward": ("task", "result"),
}


def unfit(environment: Environment) -> str | None:
    """What of an environment cannot be used as it will be; nothing of its code is run."""
    calls: Any = environment.min_calls
    if not own_code.is_text(environment.name):
        return f"name is {own_code.shown(environment.name)}, expected a text"
    if isinstance(calls, bool) or not isinstance(calls, Integral) or int(calls) < 0:
        return f"min_calls is {own_code.shown(calls)}, expected a whole number, 0 or more"
    for part, arguments in _CALLED_WITH.items():
        function, expected = getattr(environment, part), f"def {part}(self, {', '.join(arguments)})"
        if not callable(function):
            return f"{part} is {own_code.shown(function)}, expected {expected}"
        where, inner = _where(environment, part), inspect.unwrap(function)
        if part == "run" and not inspect.iscoroutinefunction(inner):
            said = "yields" if inspect.isasyncgenfunction(inner) else "is not async"
            return f"{where} {said}, expected async {expected}"
        if part != "run" and inspect.iscoroutinefunction(inner):
            return f"{where} is async, and nobody awaits it; expected {expected}"
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            return f"{where} does not take what it is given ({error}), expected {expected}"
        except ValueError:  # something built in, which does not say what it takes
            continue
    return None


def task_of(environment: Environment, seed: int) -> Task | str:
    """The task of a seed, or why there is none."""
    try:
        task: Any = environment.task(seed)
    except BaseException as error:  # `exit()` too: this thread is the task's alone
        return f"task({seed}) raised {own_code.raised(error)}"
    came = f"{_where(environment, 'task')} returned, for seed {seed},"
    if not isinstance(task, Task):
        return f"{came} {own_code.a(task)}, expected Task(task_id, seed, data)"
    if not own_code.is_text(task.task_id):
        return f"{came} a Task whose task_id is {own_code.shown(task.task_id)}, expected a text"
    return task


def result_fault(environment: Environment, result: Any) -> str | None:
    """What is wrong with what an agent returned; None where nothing is."""
    came = f"{_where(environment, 'run')} returned"
    if not isinstance(result, AgentResult):
        return f"{came} {own_code.a(result)}, expected AgentResult(…)"
    if not isinstance(result.error, str | None):
        return f"{came} an AgentResult whose error is {own_code.shown(result.error)}, expected a text or None"
    if not isinstance(result.ended_early, str | None):
        early = own_code.shown(result.ended_early)
        return f"{came} an AgentResult whose ended_early is {early}, expected a text or None"
    expected = "expected the served object as JSON (`model_dump(mode='json')`) or None"
    if not isinstance(result.response, dict | None):
        return f"{came} an AgentResult whose response is {own_code.a(result.response)}, {expected}"
    try:
        orjson.dumps(result.response)
    except TypeError as error:
        return f"{came} an AgentResult whose response is no JSON ({own_code.plain(str(error))}), {expected}"
    return None


def reward_of(environment: Environment, reward: Any) -> Reward | str:
    """A reward as plain numbers, or what is wrong with it. Numbers are what `float` takes: bools, scalars of numpy and
    torch too, texts not."""
    came = f"{_where(environment, 'reward')} returned"
    if not isinstance(reward, Reward):
        return f"{came} {own_code.a(reward)}, expected Reward(total, components)"
    if not isinstance(reward.components, Mapping):
        return f"{came} a Reward whose components are {own_code.shown(reward.components)}, expected a dict of numbers"
    if wrong := _wrong(total := _number(reward.total)):
        return f"{came} a Reward whose total is {own_code.shown(reward.total)}, {wrong}"
    parts: dict[str, float] = {}
    for name, value in reward.components.items():
        if not own_code.is_text(name):
            return f"{came} a Reward with a component named {own_code.shown(name)}, expected a text"
        parts[name] = _number(value)
        if wrong := _wrong(parts[name]):
            return f"{came} a Reward whose component {name!r:.80} is {own_code.shown(value)}, {wrong}"
    return Reward(total, parts)


def parts_fault(environment: Environment, reward: Reward | str, needed: frozenset[str]) -> str | None:
    """What is wrong with a reward that lacks one of the components that are trained on; None where nothing is."""
    if isinstance(reward, str) or needed <= reward.components.keys():
        return None
    lacking = ", ".join(sorted(needed - reward.components.keys()))
    has = ", ".join(sorted(reward.components)) or "none"
    came = f"{_where(environment, 'reward')} returned a Reward without the component {lacking}"
    return f"{came}, which the recipe's estimator needs of every one; it has {has}"


def _wrong(number: float) -> str:
    """What was expected in its place; empty where nothing is wrong with it."""
    if not math.isfinite(number):
        return "expected a finite number"
    return "" if abs(number) <= LARGEST else f"expected a number between {-LARGEST:g} and {LARGEST:g}"


def _number(value: Any) -> float:
    """As `float`, and NaN for what is no number."""
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return math.nan  # `float` reads numbers in texts, and takes arrays of one
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _where(environment: Environment, part: str) -> str:
    """`reward() (my_env.py:37)`; of the environment as somebody wrote it, without what the recipe put around it."""
    written = getattr(environment, "inner", environment)
    return f"{part}(){own_code.place_of(getattr(written, part))}"
