"""What a tagged request may say about sampling."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.gateway.pins import pin
from workbench.gateway.refusals import Refused
from workbench.gateway.settings import Sampling

RECIPE = Sampling(temperature=0.7, top_p=0.9, top_k=50, min_p=0.0, max_tokens=128)


def test_the_recipes_values_go_out_whatever_came() -> None:
    came = {"temperature": 0.0, "top_p": 0.9, "min_p": 0.2, "max_tokens": 4096, "messages": []}
    pinned = pin(came, RECIPE)
    assert pinned.body == {
        "messages": [],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.0,
        "max_tokens": 128,
    }
    assert set(pinned.overridden) == {"temperature", "min_p", "max_tokens"}
    assert came["temperature"] == 0.0, "the agent's own body is left as it came"


def test_an_agent_may_ask_for_fewer_tokens_under_any_name() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        pinned = pin({name: 5}, RECIPE)
        assert (pinned.body[name], pinned.overridden) == (5, ())
        assert pin({name: 500}, RECIPE).body[name] == 128


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 100}),
        ("min_tokens", 3),
        ("allowed_token_ids", [1]),
    ],
)
def test_nothing_else_may_change_the_distribution(field: str, value: Any) -> None:
    pinned = pin({field: value}, RECIPE)
    assert field not in pinned.body
    assert pinned.overridden == (field,)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p"])
@pytest.mark.parametrize("value", ["high", [1], {}])
def test_a_setting_that_is_no_number_is_overridden_like_any_other(field: str, value: Any) -> None:
    pinned = pin({field: value}, RECIPE)
    assert pinned.overridden == (field,) and pinned.body[field] == getattr(RECIPE, field)


@pytest.mark.parametrize("field", ["presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "n", "echo"])
def test_a_neutral_value_is_not_counted(field: str) -> None:
    neutral = {"repetition_penalty": 1.0, "logit_bias": {}, "logprobs": False, "n": 1, "echo": False}.get(field, 0)
    pinned = pin({field: neutral}, RECIPE)
    assert (pinned.stripped, pinned.overridden) == ((), ())


@pytest.mark.parametrize("field", ["logprobs", "top_logprobs", "return_token_ids", "request_id"])
def test_what_would_carry_ids_or_logprobs_is_stripped(field: str) -> None:
    pinned = pin({field: "x" if field == "request_id" else 1}, RECIPE)
    assert field not in pinned.body
    assert pinned.stripped == (field,)


@pytest.mark.parametrize("body", [{"n": 2}, {"n": 0}, {"best_of": 3}, {"echo": True}, {"add_generation_prompt": False}])
def test_what_has_no_single_sampled_sequence_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        pin(body, RECIPE)
    assert (refused.value.status, refused.value.param) == (400, next(iter(body)))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_call_of_no_tokens_is_refused_here_and_not_taken_for_a_full_window(name: str) -> None:
    for most in (0, -1):
        with pytest.raises(Refused, match=f"{name}={most} is not possible") as refused:
            pin({name: most}, RECIPE)
        assert (refused.value.status, refused.value.param) == (400, name)
