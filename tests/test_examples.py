"""The examples run as they stand: real gateway, capture and receipts; only the model is a script."""

from __future__ import annotations

import html
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from workbench import runs
from workbench.campaign.cli import main
from workbench.campaign.environments import make_environment
from workbench.campaign.rollouts import RolloutPlan, RolloutPlayer
from workbench.campaign.verify import verify_run
from workbench.config import load_recipe
from workbench.demo.bench import open_bench
from workbench.errors import RecipeError
from workbench.inspect import PoisonTable, PrefixChain
from workbench.wire import Cause

EXAMPLES = Path(__file__).parents[1] / "examples"


async def played(example: str, script: list[dict], path: Path, folder: Path = EXAMPLES):
    """One rollout of an example's environment on a bench: (its outcome, the summary of its row)."""
    environment = make_environment(load_recipe("cpu_smoke", [f"environment.name={folder / example}"]))
    async with open_bench(script, path=path / "run") as bench:
        player = RolloutPlayer(
            gateway_url=bench.url,
            control=bench.control,
            environment=environment,
            model="policy",
            timeout_s=60.0,
            request_timeout_s=30.0,
            seed=0,
        )
        try:
            outcome = await player.play(RolloutPlan("example", 0, 0, 0, environment.task(1)))
        finally:
            await player.close()
        (summary,) = await bench.finalise("0", [outcome])
    return outcome, summary


async def test_an_environment_in_a_file_is_played_scored_and_captured(tmp_path):
    word = random.Random(1).choice(["light", "stone", "train", "cloud", "spring", "table"])
    outcome, summary = await played("rhyme.py:Rhyme", [{"text": "Banana."}, {"text": f"Re{word}."}], tmp_path)
    assert outcome.reward_components == {"turn_1": 0.0, "turn_2": 1.0} and outcome.reward == 0.5
    assert summary.sample_mask == 1 and len(outcome.receipt.manifest) == 2
    assert summary.terminal_selection == "response_id"


async def test_the_environment_in_the_documents_is_played_and_scored(tmp_path):
    page = (EXAMPLES.parent / "docs" / "your_own.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    outcome, summary = await played("mine.py:Letters", [{"text": "Tree."}, {"text": "Moon."}], tmp_path, tmp_path)
    assert (outcome.reward, outcome.reward_components, summary.sample_mask) == (0.5, {"letter": 0.5}, 1)
    assert len(outcome.receipt.manifest) == 2
    names: dict[str, Any] = {}
    exec(code, names)

    async def refuse(**request: Any) -> None:
        answer: Any = httpx.Response(400, request=httpx.Request("POST", "http://gateway"))
        raise openai.BadRequestError("too long", response=answer, body={"code": "context_length_exceeded"})

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=refuse)))
    environment = names["Letters"]({})
    full = await environment.run(client, "policy", environment.task(1), random.Random(1))
    assert full.error == "the first request was refused: too long"
    assert environment.reward(environment.task(1), full).total == 0.0


@pytest.mark.parametrize(
    ("second_turn", "vote", "said"),
    [
        ('"word " * 4000', 1, "window full: Error code: 400 - This model's maximum context length is "),
        ('{"text": "an object"}', 0, "the agent's call failed: BadRequestError: Error code: 400 - Message "),
        # An agent's own words are no sign of a full window.
        ('[{"type": "maximum context length"}, 7]', 0, "the agent's call failed: BadRequestError: Error code: 400 - "),
    ],
)
async def test_of_the_refusals_only_that_of_a_full_window_trains(tmp_path, second_turn, vote, said):
    page = (EXAMPLES.parent / "docs" / "your_own.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = code.replace('"content": ask}', f'"content": {second_turn} if turn else ask}}')
    (tmp_path / "mine.py").write_text(code)
    outcome, summary = await played("mine.py:Letters", [{"text": "Tree."}], tmp_path, tmp_path)
    assert (summary.sample_mask, summary.cause) == (vote, None if vote else Cause.ROLLOUT_FAILED)
    assert (summary.ended_early if vote else summary.detail).startswith(said)
    row = runs.open(tmp_path / "run").rollouts.row(0, named=True)
    assert row["ended_early"] == summary.ended_early == outcome.ended_early
    assert (row["ended_early"] is not None) == bool(vote)


async def test_a_black_box_trains_on_the_chain_that_its_output_names(tmp_path):
    outcome, summary = await played("black_box.py:BlackBox", [{"text": "The Nile"}, {"text": "Nile."}], tmp_path)
    assert outcome.reward == 1.0
    assert summary.sample_mask == 1 and len(outcome.receipt.manifest) == 2
    assert summary.terminal_selection == "content"


async def test_a_black_box_whose_output_two_calls_gave_has_no_vote(tmp_path):
    _, summary = await played("black_box.py:BlackBox", [{"text": "The Nile"}], tmp_path)
    assert (summary.sample_mask, summary.cause) == (0, Cause.CONTENT_AMBIGUOUS)


async def test_a_black_box_that_does_not_end_is_ended_and_said(tmp_path):
    (tmp_path / "black_box.py").write_text((EXAMPLES / "black_box.py").read_text().replace("60.0", "0.5"))
    (tmp_path / "anyones_agent.py").write_text("import time\n\ntime.sleep(60)\n")
    _, summary = await played("black_box.py:BlackBox", [{"text": "Nile."}], tmp_path, tmp_path)
    assert (summary.cause, summary.detail) == (Cause.ROLLOUT_FAILED, "the agent did not end within 0.5 s")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "usage: OPENAI_BASE_URL=http"),
        ({"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, "usage: OPENAI_BASE_URL=http"),
        # Without an address its client would ask a service on the net.
        ({"OPENAI_API_KEY": "unused"}, "usage: OPENAI_BASE_URL=http"),
        (
            {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "unused"},
            "no connection to http://127.0.0.1:9/v1/: [Errno 111] Connection refused",
        ),
    ],
)
def test_the_black_boxs_agent_says_in_one_line_what_it_lacks(given, said):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")} | given
    command = [sys.executable, str(EXAMPLES / "anyones_agent.py"), "Name a river."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


async def test_a_reward_that_raises_is_told_with_its_line_wherever_the_rollout_is_shown(tmp_path):
    reward = "def reward(self, task, result):\n"
    source = (EXAMPLES / "rhyme.py").read_text().replace(reward, f"{reward}        {{}}['score']\n")
    (tmp_path / "mine.py").write_text(source)
    line = next(n for n, text in enumerate(source.splitlines(), start=1) if "{}['score']" in text)
    outcome, summary = await played("mine.py:Rhyme", [{"text": "Banana."}, {"text": "Night."}], tmp_path, tmp_path)
    fault = f"its reward raised KeyError: 'score' at mine.py:{line}"
    assert (summary.cause, summary.reward, summary.detail) == (Cause.ROLLOUT_FAILED, None, fault)
    assert (outcome.reward, outcome.receipt.reward) == (None, None) and len(outcome.receipt.manifest) == 2
    run = runs.open(tmp_path / "run")
    assert run.rollouts.select("reward", "reward_components").row(0) == (None, "{}")
    assert run.groups["reward_mean"].to_list() == [None]
    chain = PrefixChain(run, "example.0.0.0")
    assert chain.to_text().splitlines()[1].startswith(f"Custody: rejected, rollout_failed: {fault} · digest ")
    assert html.escape(fault) in chain.html() and html.escape(fault) in PoisonTable(run).html()
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "run"), "example.0.0.0"])
    assert shown.exit_code == 0 and fault in shown.output
    assert verify_run(tmp_path / "run").ok


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:Rhyme", "no file "),
        (f"{EXAMPLES / 'rhyme.py'}:Rime", "has no 'Rime', did you mean Rhyme"),
        (f"{EXAMPLES / 'rhyme.py'}:WORDS", "is no environment: it lacks name, min_calls, task, run, reward"),
        ("workbench.nowhere:Thing", "No module named 'workbench.nowhere'"),
    ],
)
def test_a_path_that_leads_to_no_environment_is_refused_in_one_line(name, says):
    with pytest.raises(RecipeError, match=r"environment\.name") as refused:
        make_environment(load_recipe("cpu_smoke", [f"environment.name={name}"]))
    assert says in str(refused.value) and "\n" not in str(refused.value)
