"""A campaign whose agents swallow what they are refused: it trains, and its store says how often and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from campaign.scripted_fleet import STARTS_WITHIN_S, Running, empty_data_plane, scripted_recipe

from workbench import runs
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.summary import summarise
from workbench.campaign.verify import verify_run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(800)]

SWALLOWS = """
import openai
from workbench.campaign.environments.guess_number import GuessNumber

class Swallows(GuessNumber):
    async def run(self, client, model, task, rng):
        for message in ({"role": "user", "text": "a typo"}, {"role": "user", "content": "long " * 5000}):
            try:
                await client.chat.completions.create(model=model, messages=[message])
            except openai.BadRequestError:
                pass
        return await super().run(client, model, task, rng)
"""


@pytest_asyncio.fixture
async def shared_plane(tq: Any, tiny_model: Path) -> AsyncIterator[None]:
    yield
    await empty_data_plane()


async def test_requests_that_an_agent_swallowed_are_counted_by_rollout_and_reason(
    shared_plane: None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SWALLOWS)
    mine = f"environment.name={tmp_path / 'mine.py'}:Swallows"
    recipe = scripted_recipe(tmp_path, "train.steps=1", "finalizer.actors=1", mine)
    async with Running(recipe, tmp_path / "run") as running:
        result = await asyncio.wait_for(running.task, STARTS_WITHIN_S + 100)
    assert result.steps == 1
    run = runs.open(tmp_path / "run")
    played = set(run.rollouts["rollout_id"])
    counted = run.refused.filter(run.refused["rollout_id"].is_in(played))
    assert set(run.rollouts["sample_mask"]) == {1}
    for code, by in (("content_not_read", "gateway"), ("context_length_exceeded", "engine")):
        own = counted.filter(code=code, by=by)
        assert set(own["rollout_id"]) == played and set(own["requests"]) == {1}, counted
    summary = summarise(tmp_path / "run", notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=1.0)
    assert f"content_not_read ({run.refused.filter(code='content_not_read')['requests'].sum()})" in summary.text()
    assert verify_run(tmp_path / "run").ok
