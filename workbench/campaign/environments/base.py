"""Environment: a task, an agent that plays it, and the programmatic reward.

The agent is an ordinary async function that holds an `openai.AsyncOpenAI` client and a model name; the client's base
URL is all it knows of Workbench. It neither sees token ids nor knows that its calls are captured. The controller's
order is: `task` → `run` → freeze → `reward`, so nothing that happens during scoring can change the trajectory.

A rollout that goes wrong is data: an agent whose window is full ends with what it has and says so in
`AgentResult.ended_early`, and its chain still trains. Every other refusal of the endpoint is a fault of the agent and
is raised, as faults of the connection are: the rollout has no vote. Sampling settings are not the agent's: they belong
to the recipe, and the gateway replaces others and counts them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion

from workbench.errors import RecipeError
from workbench.gateway.refusals import CONTEXT_LENGTH_EXCEEDED

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One task: the same for every rollout of a group. `data` is the environment's own."""

    task_id: str
    seed: int
    data: dict[str, Any]


@dataclass(frozen=True)
class AgentResult:
    """What an agent leaves behind.

    `response` is the last served object as JSON, the witness of which call ended the trajectory; None when no call
    came back. `transcript` holds the messages, the model's answers among them. `error` says why the rollout has no
    vote (None: it has one). `ended_early` says why a valid one stopped before its end (None: it didn't); it is stored
    with the rollout, and counted by what stands before its first colon.
    `misbehaved` names the fault that the agent committed on purpose (None: none).
    """

    response: dict[str, Any] | None
    transcript: list[Message]
    error: str | None = None
    ended_early: str | None = None
    misbehaved: str | None = None


@dataclass(frozen=True)
class Reward:
    """`total`, a number between -1e15 and 1e15; `components` are its parts by name. Those shipped are in [0, 1]."""

    total: float
    components: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """A task family. `min_calls` is how many calls every undisturbed rollout makes at least.

    One that cannot run on every machine has a method `lacking()`: one sentence on what is missing here, or nothing.
    One that names the `components` of its rewards, a tuple of texts, has a recipe held against them before it runs.
    """

    name: str
    min_calls: int

    def task(self, seed: int) -> Task:
        """The task of a seed; the same seed gives the same task."""
        ...

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        """Play the task once. Raises what the client raises when the connection fails."""
        ...

    def reward(self, task: Task, result: AgentResult) -> Reward:
        """Score one result; pure, and without the model."""
        ...


class WindowFull(Exception):
    """The endpoint refused a request as too long; the conversation before it stands."""

    @classmethod
    def of(cls, error: BadRequestError) -> WindowFull | None:
        """What a refusal (400) says of the window; None where it was refused for anything else."""
        return cls(str(error)) if error.code == CONTEXT_LENGTH_EXCEEDED else None


async def say(client: AsyncOpenAI, model: str, messages: list[Message]) -> tuple[str, dict[str, Any]]:
    """Ask for the next turn and append it to `messages`. Returns its text and the served object as JSON.

    Raises WindowFull when the endpoint refuses the request as longer than the window; other failures of the client,
    other refusals among them, pass through.
    """
    try:
        completion: ChatCompletion = await client.chat.completions.create(model=model, messages=cast(Any, messages))
    except BadRequestError as error:
        if (full := WindowFull.of(error)) is not None:
            raise full from error
        raise
    text = completion.choices[0].message.content or ""
    # The history must hold the text as it was served, to the character: it is what names the parent call.
    messages.append({"role": "assistant", "content": text})
    return text, completion.model_dump(mode="json", exclude_unset=True)


async def say_once(client: AsyncOpenAI, model: str, messages: list[Message]) -> AgentResult:
    """Play a task of one turn: the agent's only request is `messages`."""
    try:
        _, response = await say(client, model, messages)
    except WindowFull as full:
        return AgentResult(None, messages, error=f"the only request was refused: {full}")
    return AgentResult(response, messages)


def ended_full(response: dict[str, Any] | None, messages: list[Message], full: WindowFull) -> AgentResult:
    """A conversation whose window is full: what there is of it stands; an error where that is nothing."""
    if response is None:
        return AgentResult(None, messages, error=f"the first request was refused: {full}")
    return AgentResult(response, messages, ended_early=f"window full: {full}")


def weigh(components: dict[str, float], weights: Mapping[str, float]) -> Reward:
    """The weighted sum, rounded so that a full score is exactly 1 and equal answers have equal rewards."""
    return Reward(round(sum(weights[part] * value for part, value in components.items()), 9), components)


def take_options(environment: str, options: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The options with their defaults; a whole number is taken for a float.

    Raises RecipeError on an unknown name or another type than the default's.
    """
    taken = dict(options)
    for key, value in options.items():
        if key not in defaults:
            allowed = ", ".join(defaults) or "none"
            raise RecipeError(f"environment.options.{key}: {environment} has no such option; allowed: {allowed}")
        expected = type(defaults[key])
        if expected is float and type(value) is int:
            taken[key] = float(value)
        elif type(value) is not expected:
            raise RecipeError(
                f"environment.options.{key}: expected {expected.__name__}, like {defaults[key]!r}; got {value!r}"
            )
    return {**defaults, **taken}
