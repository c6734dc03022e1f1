"""The environment: an agent loop over tool calls, and a reward that runs the tests.

The reward plays the transcript's edits again on a fresh copy of the file and runs the tests in the sandbox, so it does
not depend on anything that the agent kept. A model that writes no tool call is told so and goes on; one whose window is
full ends with the file as it then is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, cast

from openai import AsyncOpenAI, BadRequestError

from workbench.campaign.environments.base import (
    AgentResult,
    Message,
    Reward,
    Task,
    WindowFull,
    ended_full,
    take_options,
)
from workbench.campaign.environments.file_fix.sandbox import Limits, TestRun, run_tests, weaknesses
from workbench.campaign.environments.file_fix.tasks import bugs, choose
from workbench.campaign.environments.file_fix.workspace import TOOLS, Workspace
from workbench.errors import DeadlineExceeded, RecipeError

SYSTEM = "You mend Python files. Use the tools; change as little as you can. Stop when all tests pass."
NO_CALL = "Call a tool: read_file, replace or run_tests."
MOST_CALLS = 4
"""Tool calls of one turn that are answered."""


class FileFix:
    """Options: `turns` (2 to 50), `force` (every answer must be a tool call, which a grammar then makes sure of),
    `timeout_s` and `memory_mib` of one run of the tests, `allow_weak_sandbox` (run the model's code on a machine whose
    kernel cannot shut it in)."""

    name = "file_fix"
    min_calls = 2
    components = ("tests_pass", "passing")

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        taken = take_options(
            self.name, options or {}, turns=6, force=False, timeout_s=5.0, memory_mib=256, allow_weak_sandbox=False
        )
        self.turns: int = taken["turns"]
        self.force: bool = taken["force"]
        self.allow_weak_sandbox: bool = taken["allow_weak_sandbox"]
        self.limits = Limits(taken["timeout_s"], taken["memory_mib"])
        if not 2 <= self.turns <= 50:
            raise RecipeError(f"environment.options.turns: expected 2 to 50, got {self.turns}")
        if not 0 < self.limits.timeout_s <= 300:
            raise RecipeError(f"environment.options.timeout_s: expected 0 to 300, got {self.limits.timeout_s:g}")
        if not 64 <= self.limits.memory_mib <= 16384:
            raise RecipeError(f"environment.options.memory_mib: expected 64 to 16384, got {self.limits.memory_mib}")

    def lacking(self) -> str:
        """Why this machine must not run it; empty where it may."""
        try:
            weak = [] if self.allow_weak_sandbox else weaknesses()
        except DeadlineExceeded as error:
            return str(error)
        return f"the sandbox cannot stop {', '.join(weak)} here" if weak else ""

    def task(self, seed: int) -> Task:
        number = choose(seed)
        return Task(f"{self.name}-{bugs()[number].name}-{number}", seed, {"bug": number})

    async def run(self, client: AsyncOpenAI, model: str, task: Task, rng: random.Random) -> AgentResult:
        bug = bugs()[task.data["bug"]]
        if lacking := await asyncio.to_thread(self.lacking):
            return AgentResult(None, [], error=f"{lacking}; set environment.options.allow_weak_sandbox to go on")
        workspace = Workspace(bug)
        before = await self._test(workspace)
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {
                "role": "user",
                "content": f"{bug.file} fails its tests in {bug.test_file}:\n{before.text}\nMend {bug.file}.",
            },
        ]
        response: dict[str, Any] | None = None
        for turn in range(self.turns):
            try:
                answer, response = await self._ask(client, model, messages)
            except WindowFull as full:
                return ended_full(response, messages, full)
            if turn + 1 == self.turns or await self._answer(workspace, answer, messages):
                break
        return AgentResult(response, messages)

    async def _ask(self, client: AsyncOpenAI, model: str, messages: list[Message]) -> tuple[Message, dict[str, Any]]:
        choice = {"tool_choice": "required"} if self.force else {}
        try:
            completion = await client.chat.completions.create(
                model=model, messages=cast(Any, messages), tools=cast(Any, TOOLS), **cast(Any, choice)
            )
        except BadRequestError as error:
            if (full := WindowFull.of(error)) is not None:
                raise full from error
            raise
        served = completion.choices[0].message.model_dump(mode="json", exclude_unset=True)
        # As it was served, to the character: text and calls are what name the parent of the next call.
        answer = {"role": "assistant", "content": served.get("content")}
        if served.get("tool_calls"):
            answer["tool_calls"] = served["tool_calls"]
        messages.append(answer)
        return answer, completion.model_dump(mode="json", exclude_unset=True)

    async def _answer(self, workspace: Workspace, answer: Message, messages: list[Message]) -> bool:
        """Append what the tools say; True once the tests pass."""
        calls = answer.get("tool_calls") or []
        if not calls:
            messages.append({"role": "user", "content": NO_CALL})
        passed = False
        for number, call in enumerate(calls):
            said = _too_many() if number >= MOST_CALLS else workspace.call(*_function(call))
            if said is None:
                run = await self._test(workspace)
                said, passed = run.text, run.passed
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        return passed

    async def _test(self, workspace: Workspace) -> TestRun:
        bug = workspace.bug
        return await asyncio.to_thread(run_tests, bug.file, workspace.source, bug.test_file, bug.tests, self.limits)

    def reward(self, task: Task, result: AgentResult) -> Reward:
        """1 when all tests pass; the component `passing` is the share that does."""
        workspace = Workspace(bugs()[task.data["bug"]])
        for message in result.transcript:
            for call in (message.get("tool_calls") or [])[:MOST_CALLS]:
                workspace.call(*_function(call))
        bug = workspace.bug
        run = run_tests(bug.file, workspace.source, bug.test_file, bug.tests, self.limits)
        passing = sum(run.results.values()) / len(run.results) if run.results else 0.0
        return Reward(float(run.passed), {"tests_pass": float(run.passed), "passing": passing})


def _function(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function") or {}
    return str(function.get("name")), str(function.get("arguments") or "")


def _too_many() -> str:
    return f"error: at most {MOST_CALLS} calls in one turn"
