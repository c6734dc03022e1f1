"""Environments: tasks by seed, shaped rewards, two turns always, and misbehaviour as it reaches the endpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import httpx
import openai
import pytest

from workbench.campaign.environments import ENVIRONMENTS, AgentResult, Environment, base, make_environment
from workbench.campaign.environments.add_up import AddUp
from workbench.campaign.environments.answer_form import read_answer
from workbench.campaign.environments.guess_number import GuessNumber
from workbench.campaign.environments.misbehave import Misbehaving
from workbench.config import load_recipe
from workbench.errors import RecipeError
from workbench.recipe_schema import Misbehave


class Endpoint:
    """An OpenAI endpoint in this process: answers from a list (the last one for ever) and keeps every request."""

    code = "context_length_exceeded"
    """Of its refusals."""

    def __init__(self, answers: Sequence[str], refuse: Callable[[dict], bool] = lambda body: False) -> None:
        self.requests: list[dict] = []
        self._answers = list(answers)
        self._refuse = refuse

    def client(self) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._serve))
        return openai.AsyncOpenAI(base_url="http://endpoint/v1", api_key="unused", http_client=http, max_retries=0)

    def _serve(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if self._refuse(body):
            return httpx.Response(400, json={"error": {"message": "longer than the window", "code": self.code}})
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(body)
        head = {"id": f"chatcmpl-{len(self.requests)}", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
            return httpx.Response(200, json={**head, "object": "chat.completion", "choices": [choice]})
        deltas = [{"role": "assistant", "content": ""}, *({"content": letter} for letter in answer), {}]
        frames = []
        for position, delta in enumerate(deltas):
            finish = "stop" if position == len(deltas) - 1 else None
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            frames.append(json.dumps({**head, "object": "chat.completion.chunk", "choices": [choice]}))
        text = "".join(f"data: {frame}\n\n" for frame in [*frames, "[DONE]"])
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def made(*overrides: str) -> Environment:
    return make_environment(load_recipe("cpu_smollm2", overrides))


async def play(environment: Environment, endpoint: Endpoint, seed: int = 1) -> AgentResult:
    return await environment.run(endpoint.client(), "policy", environment.task(seed), random.Random(seed))


def answers(result: AgentResult) -> list[str]:
    return [message["content"] for message in result.transcript if message["role"] == "assistant"]


@pytest.mark.parametrize(
    ("text", "form", "number"),
    [
        ("Guess: 42", 1.0, 42),
        ("  Guess: 42\n", 1.0, 42),
        ("I say Guess: 42!", 0.5, 42),
        ("guess 42", 0.2, 42),
        ("Guess: 4200000000000000", 0.0, None),
        ("Guess: seven", 0.0, None),
        ("", 0.0, None),
    ],
)
def test_the_answer_form_is_scored_in_steps(text, form, number):
    reading = read_answer("Guess", text)
    assert (reading.form, reading.number) == (form, number)


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_a_task_is_its_seed(name):
    environment = ENVIRONMENTS[name]({})
    assert environment.task(3) == environment.task(3)
    assert len({json.dumps(environment.task(seed).data) for seed in range(40)}) > 5


def test_the_secret_is_in_the_range_and_never_the_example():
    secrets = {GuessNumber({"low": 5, "high": 9}).task(seed).data["secret"] for seed in range(100)}
    assert secrets == {5, 6, 8, 9}


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
@pytest.mark.parametrize("answer", ["", "Guess: 7", "Answer: 7", "x" * 300, "-5", "Guess: 999999999"])
async def test_rewards_stay_between_0_and_1_whatever_the_model_says(name, answer):
    environment = ENVIRONMENTS[name]({})
    task = environment.task(1)
    reward = environment.reward(task, await play(environment, Endpoint([answer])))
    assert 0.0 <= reward.total <= 1.0
    assert all(0.0 <= part <= 1.0 for part in reward.components.values())


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_a_rollout_without_an_answer_scores_0(name):
    environment = ENVIRONMENTS[name]({})
    assert environment.reward(environment.task(1), AgentResult(None, [])).total == 0.0


async def test_the_reward_rises_from_form_to_hints_to_the_number():
    environment = GuessNumber({"turns": 3})
    task = environment.task(1)
    secret = task.data["secret"]
    assert 3 < secret < 18, "the seed was chosen so that there is room on both sides"

    async def total(*said: str) -> float:
        return environment.reward(task, await play(environment, Endpoint(said))).total

    nothing = await total("Well.")
    number = await total("It may be 1 or so")
    form = await total("Guess: 1")
    hints = await total("Guess: 1", "Guess: 20", "Guess: 3")
    right = await total("Guess: 1", f"Guess: {secret}")
    assert nothing < number < form < hints < right
    assert right == 1.0


async def test_at_least_two_turns_are_played_and_a_right_guess_ends_the_game():
    environment = GuessNumber({"turns": 5})
    right = Endpoint([f"Guess: {environment.task(1).data['secret']}"])
    await play(environment, right)
    assert len(right.requests) == 2
    wrong = Endpoint(["Guess: 0"])
    await play(environment, wrong)
    assert len(wrong.requests) == 5


async def test_the_history_holds_the_answers_as_they_were_served():
    odd = " Guess:  7 \n\t"
    endpoint = Endpoint([odd])
    result = await play(GuessNumber(), endpoint)
    assert endpoint.requests[1]["messages"][2] == {"role": "assistant", "content": odd}
    assert answers(result)[0] == odd
    assert result.response["id"] == f"chatcmpl-{len(endpoint.requests)}"


async def test_agents_set_no_sampling():
    endpoint = Endpoint(["Guess: 7"])
    await play(GuessNumber(), endpoint)
    assert set(endpoint.requests[0]) == {"model", "messages"}


async def test_a_full_window_ends_the_rollout_with_what_it_has():
    endpoint = Endpoint(["Guess: 0"], refuse=lambda body: len(body["messages"]) > 4)
    result = await play(GuessNumber(), endpoint)
    assert result.error is None
    assert "longer than the window" in result.ended_early
    assert result.response["id"] == "chatcmpl-2"
    refused = await play(GuessNumber(), Endpoint(["Guess: 0"], refuse=lambda body: True))
    assert refused.response is None
    assert "refused" in refused.error


async def test_a_full_window_ends_any_of_the_games():
    briefly = Endpoint(["Rain."], refuse=lambda body: len(body["messages"]) > 2)
    result = await play(made("environment={name: say_briefly, options: {turns: 2}}"), briefly)
    assert "longer than the window" in result.ended_early and result.response["id"] == "chatcmpl-1"
    refused = await play(made("environment.name=add_up"), Endpoint(["1"], refuse=lambda body: True))
    assert refused.response is None and "the only request was refused" in refused.error


@pytest.mark.parametrize("game", ["guess_number", "say_briefly", "add_up", "file_fix"])
async def test_any_other_refusal_is_raised_and_is_no_full_window(game: str):
    endpoint = Endpoint(["Rain."], refuse=lambda body: len(body["messages"]) > (0 if game == "add_up" else 2))
    endpoint.code = "invalid_request"
    options = ["environment.options={turns: 2}"] if game == "say_briefly" else []
    with pytest.raises(openai.BadRequestError, match="longer than the window"):
        await play(made(f"environment.name={game}", *options), endpoint)


def test_a_whole_number_is_taken_for_an_option_that_is_a_float_and_a_bool_is_not():
    taken = base.take_options("mine", {"timeout_s": 30}, timeout_s=60.0, turns=2)
    assert taken == {"timeout_s": 30.0, "turns": 2} and type(taken["timeout_s"]) is float
    for wrong in (True, "30", None):
        with pytest.raises(RecipeError, match=r"environment\.options\.timeout_s: expected float, like 60\.0; got "):
            base.take_options("mine", {"timeout_s": wrong}, timeout_s=60.0)
    for wrong in (True, 2.0):
        with pytest.raises(RecipeError, match=r"expected int, like 2; got "):
            base.take_options("mine", {"turns": wrong}, turns=2)


async def test_an_agent_that_shows_none_of_its_answers_has_nothing_to_edit():
    class Forgets(AddUp):
        min_calls = 2

        async def run(self, client, model, task, rng):
            await super().run(client, model, task, rng)
            return await super().run(client, model, task, rng)

    endpoint = Endpoint(["7", "8"])
    result = await play(Misbehaving(Forgets({}), Misbehave(edit=1.0), window_tokens=64), endpoint)
    assert len(endpoint.requests) == 2
    assert (result.error, result.misbehaved) == (None, None)


def test_a_task_of_one_call_has_no_answer_to_rewrite():
    with pytest.raises(
        RecipeError, match=r"environment\.misbehave\.edit: expected 0, because add_up may make one call"
    ):
        made("environment.name=add_up", "environment.misbehave.edit=0.5")


async def test_a_retry_sends_the_same_body_twice_and_goes_on_with_the_second_answer():
    endpoint = Endpoint(["Guess: 1", "Guess: 2", "Guess: 3", "Guess: 4"])
    result = await play(made("environment.misbehave.retry=1.0"), endpoint)
    assert result.misbehaved == "retry"
    assert len(endpoint.requests) == 4
    twice = [n for n in range(3) if endpoint.requests[n] == endpoint.requests[n + 1]]
    assert len(twice) == 1
    said = ["Guess: 1", "Guess: 2", "Guess: 3", "Guess: 4"]
    del said[twice[0]]
    assert answers(result) == said


async def test_a_branch_leaves_the_main_line_untouched():
    endpoint = Endpoint(["Guess: 0", "Quite sure.", "Guess: 0"])
    result = await play(made("environment.misbehave.branch=1.0"), endpoint)
    assert result.misbehaved == "branch"
    side, main_line = endpoint.requests[1]["messages"], endpoint.requests[2]["messages"]
    assert side[:-1] == main_line
    assert "Quite sure." not in answers(result)


async def test_an_overflow_exceeds_the_window_and_the_earlier_chain_stands():
    window = load_recipe("cpu_smollm2").model.max_model_len
    endpoint = Endpoint(["Guess: 0"], refuse=lambda body: len(str(body["messages"]).split()) > window)
    result = await play(made("environment.misbehave.overflow=1.0"), endpoint)
    assert result.misbehaved == "overflow"
    assert len(endpoint.requests) == 1
    assert result.error is None
    assert result.response["id"] == "chatcmpl-1"


async def test_an_edit_changes_an_earlier_answer_in_all_later_requests():
    endpoint = Endpoint(["Guess: 0"])
    result = await play(made("environment.misbehave.edit=1.0"), endpoint)
    assert result.misbehaved == "edit"
    for request in endpoint.requests[1:]:
        assert request["messages"][2]["content"] != "Guess: 0"
    assert answers(result) == ["Guess: 0"] * 3


async def test_a_streamed_rollout_says_the_same_as_another():
    streamed, plain = Endpoint(["Guess: 0"]), Endpoint(["Guess: 0"])
    result = await play(made("environment.misbehave.stream=1.0"), streamed)
    assert all(request["stream"] for request in streamed.requests)
    reference = await play(made(), plain)
    assert result.transcript == reference.transcript
    assert result.misbehaved is None
    assert result.response["choices"][0]["message"]["content"] == "Guess: 0"
    assert result.response["id"] == "chatcmpl-3"


async def test_faults_come_in_their_shares_and_again_with_the_same_rng():
    environment = make_environment(load_recipe("cpu_misbehave", ["environment.misbehave.stream=0.0"]))

    async def faults() -> list[str | None]:
        return [(await play(environment, Endpoint(["Guess: 0"]), seed)).misbehaved for seed in range(200)]

    first = await faults()
    assert first == await faults()
    shares = {fault: first.count(fault) / len(first) for fault in ("retry", "branch", "overflow", "edit", None)}
    expected = {"retry": 0.2, "branch": 0.2, "overflow": 0.15, "edit": 0.2, None: 0.25}
    assert all(abs(shares[fault] - expected[fault]) < 0.1 for fault in expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("environment.name=gues_number", "no environment 'gues_number', did you mean guess_number? Allowed: add_up"),
        ("environment.options.trns=3", "environment.options.trns: guess_number has no such option; allowed: turns"),
        ("environment.options.turns=x", "environment.options.turns: expected int, like 3; got 'x'"),
        ("environment.options.turns=1", "environment.options.turns: expected 2 to 16, got 1"),
        ("environment.options.low=30", "expected 0 ≤ low < high"),
        (
            "environment={name: say_briefly, options: {words: 1}}",
            "environment.options.words: expected at least 2, got 1",
        ),
        ("environment={name: add_up, options: {high: 0}}", "environment.options.high: expected at least 1, got 0"),
        ("environment={name: say_briefly, options: {turns: 9}}", "environment.options.turns: expected 1 to 8, got 9"),
    ],
)
def test_a_wrong_environment_is_refused_in_one_line(override, expected):
    with pytest.raises(RecipeError) as caught:
        made(override)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "reward"), [("Salt.", 1.0), ("salt and waves", 0.5), ("a b c d e f", 0.0), ("", 0.0), ("  ", 0.0)]
)
async def test_say_briefly_pays_for_few_words_but_not_for_none(answer, reward):
    environment = made("environment.name=say_briefly", "environment.options={words: 5}")
    result = await play(environment, Endpoint([answer]))
    assert environment.reward(environment.task(1), result).total == reward


async def test_say_briefly_asks_as_often_as_its_option_says_and_pays_the_mean():
    environment = made("environment.name=say_briefly", "environment.options={words: 5, turns: 2}")
    result = await play(environment, Endpoint(["Salt.", "salt and waves"]))
    assert environment.min_calls == 2 and [m["role"] for m in result.transcript] == ["user", "assistant"] * 2
    assert environment.reward(environment.task(1), result).total == 0.75


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_an_environment_names_as_the_components_of_its_rewards_is_what_they_have(name):
    environment = ENVIRONMENTS[name]({})
    answered = AgentResult({"id": "x"}, [{"role": "assistant", "content": "Guess: 3"}])
    for result in (answered, AgentResult(None, [])):
        reward = environment.reward(environment.task(3), result)
        assert sorted(reward.components) == sorted(environment.components)
