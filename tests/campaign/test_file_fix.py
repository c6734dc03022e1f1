"""file_fix as an agent meets it: tool calls over several turns, wrong calls, a full window, and a reward of its own."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletion

from workbench.campaign.environments import make_environment
from workbench.campaign.environments.file_fix import FileFix
from workbench.campaign.environments.file_fix import environment as module
from workbench.campaign.environments.file_fix.tasks import bugs
from workbench.campaign.environments.file_fix.workspace import MAX_SOURCE, Workspace
from workbench.campaign.machines import doctor
from workbench.config import load_recipe
from workbench.errors import RecipeError

OPTIONS = {"timeout_s": 30.0, "turns": 4}


def served(number: int, *calls: tuple[str, Any], text: str | None = None) -> ChatCompletion:
    """A completion as the endpoint serves it; a call's arguments are JSON, or text as it is."""
    tools = [
        {
            "id": f"call-{number}-{place}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for place, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": tools} if tools else {})}
    choice = {"index": 0, "finish_reason": "tool_calls" if tools else "stop", "message": message}
    return ChatCompletion.model_validate(
        {"id": f"chat-{number}", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    )


class Client:
    """Answers in order; an int stands for a refusal with that status. Keeps what it was asked."""

    def __init__(self, *answers: ChatCompletion | int) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request: Any) -> ChatCompletion:
        self.asked.append({**request, "messages": [dict(message) for message in request["messages"]]})
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            response = httpx.Response(answer, request=httpx.Request("POST", "http://x"))
            raise BadRequestError("too long", response=response, body={"code": "context_length_exceeded"})
        return answer


async def play(*answers: ChatCompletion | int, seed: int = 3, **options: Any):
    environment = FileFix({**OPTIONS, **options})
    task, client = environment.task(seed), Client(*answers)
    result = await environment.run(client, "policy", task, random.Random(0))
    return environment, task, client, result


def the_bug(seed: int = 3):
    return bugs()[FileFix().task(seed).data["bug"]]


async def test_an_agent_that_reads_mends_and_runs_the_tests_earns_1():
    bug = the_bug()
    mend = {"old": bug.wrong, "new": bug.right}
    environment, task, client, result = await play(
        served(1, ("read_file", {"path": bug.file}), text="I look."),
        served(2, ("replace", mend), ("run_tests", {})),
        turns=6,
    )
    assert result.error is None and result.ended_early is None and result.response["id"] == "chat-2"
    assert environment.reward(task, result).total == 1.0
    first, second = (request["messages"] for request in client.asked)
    assert second[: len(first)] == first and "tests pass" in first[1]["content"]
    assert second[2]["content"] == "I look." and second[2]["tool_calls"][0]["function"]["name"] == "read_file"
    assert second[3] == {"role": "tool", "tool_call_id": "call-1-0", "content": bug.source}
    assert result.transcript[-2]["content"] == "replaced"
    assert {tool["function"]["name"] for tool in client.asked[0]["tools"]} == {"read_file", "replace", "run_tests"}


async def test_the_reward_is_of_the_edits_not_of_what_the_agent_says():
    environment, task, _, result = await play(
        served(1, text="All tests pass!"), served(2, text="Done."), served(3, text="Done."), served(4, text="Done.")
    )
    reward = environment.reward(task, result)
    assert (reward.total, reward.components["tests_pass"]) == (0.0, 0.0) and 0 < reward.components["passing"] < 1
    assert sum(message["role"] == "assistant" for message in result.transcript) == 4


async def test_wrong_calls_are_answered_in_words_and_the_rollout_goes_on():
    wrong = [("no_tool", {}), ("read_file", "{"), ("replace", {"old": "x"}), ("run_tests", {}), ("run_tests", {})]
    environment, task, _, result = await play(served(1, *wrong), served(2), turns=2)
    said = [message["content"] for message in result.transcript if message["role"] == "tool"]
    assert said[0].startswith("error: no tool 'no_tool'") and "no JSON" in said[1]
    assert said[2] == "error: replace needs a text for new" and "tests pass" in said[3]
    assert said[4] == "error: at most 4 calls in one turn"
    assert environment.reward(task, result).total == 0.0


async def test_a_full_window_ends_the_rollout_with_the_file_as_it_is():
    bug = the_bug()
    environment, task, _, result = await play(served(1, ("replace", {"old": bug.wrong, "new": bug.right})), 400)
    assert result.ended_early.startswith("window full") and result.error is None
    assert result.response["id"] == "chat-1" and environment.reward(task, result).total == 1.0
    *_, result = await play(400)
    assert result.response is None and "the first request was refused" in result.error


async def test_forced_calls_are_asked_for():
    _, _, client, _ = await play(served(1), served(2), turns=2, force=True)
    assert client.asked[0]["tool_choice"] == "required"


def test_the_workspace_bounds_the_file_and_names_what_there_is():
    workspace = Workspace(the_bug())
    assert "at most" in workspace.call("replace", json.dumps({"old": workspace.bug.wrong, "new": "x" * MAX_SOURCE}))
    assert "occurs 0 times" in workspace.call("replace", json.dumps({"old": "", "new": "x"}))
    assert workspace.bug.test_file in workspace.call("read_file", json.dumps({"path": "/etc/passwd"}))
    assert "no Unicode" in workspace.call("replace", json.dumps({"old": workspace.bug.wrong, "new": "\ud800"}))
    assert workspace.source == workspace.bug.source


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"turns": 1}, "2 to 50"),
        ({"timeout_s": 0.0}, "0 to 300"),
        ({"memory_mib": 1}, "64 to 16384"),
        ({"tries": 1}, "no such option"),
    ],
)
def test_wrong_options_are_refused(options, expected):
    with pytest.raises(RecipeError, match=expected):
        FileFix(options)


@pytest.mark.parametrize("name", ["cpu_smoke", "cpu_smollm2", "cpu_misbehave", "cpu_learns", "cpu_tiny_learns"])
def test_it_is_an_environment_of_every_cpu_recipe_by_name(name):
    recipe = load_recipe(name, ["environment.name=file_fix"])
    assert make_environment(recipe).task(1).task_id == FileFix().task(1).task_id


def test_a_machine_that_cannot_shut_code_in_must_be_told_to_go_on(monkeypatch):
    monkeypatch.setattr(module, "weaknesses", lambda: ["reading and writing other files"])
    assert "cannot stop reading and writing other files" in FileFix().lacking()
    assert FileFix({"allow_weak_sandbox": True}).lacking() == ""


async def test_a_weak_sandbox_is_asked_for_nothing_and_the_rollout_says_why(monkeypatch):
    monkeypatch.setattr(module, "weaknesses", lambda: ["reading and writing other files"])
    client = Client()
    result = await FileFix().run(client, "policy", FileFix().task(1), random.Random(1))
    assert client.asked == [] and "set environment.options.allow_weak_sandbox" in result.error


@pytest.mark.parametrize("shares", [[], ["environment.misbehave.retry=0.5"]])
def test_what_the_machine_lacks_is_said_at_set_up_however_the_agents_behave(monkeypatch, shares):
    monkeypatch.setattr(module, "weaknesses", lambda: ["reading and writing other files"])
    recipe = load_recipe("cpu_smoke", ["environment.name=file_fix", *shares])
    found = doctor.environment(recipe)
    assert not found.good and "reading and writing other files" in found.found and "allow_weak_sandbox" in found.cure
