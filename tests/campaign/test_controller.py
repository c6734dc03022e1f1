"""The controller without its fleet: one failing pump ends the campaign with one plain error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from workbench import runs
from workbench.campaign.controller import Campaign, run_campaign
from workbench.campaign.watch import Watch
from workbench.config import load_recipe
from workbench.errors import ComponentDied, RecipeError, first_cause


class _Failing(Campaign):
    """Two pumps, of which one fails inside a task group of its own."""

    def __init__(self) -> None:
        self.recipe = load_recipe("cpu_smoke")
        self.fleet = SimpleNamespace(
            timings_s={}, probe={}, gateway_url="http://127.0.0.1:1", control=None, finalizers=None, heartbeats=dict
        )
        self.writer = SimpleNamespace(event=lambda kind, **fields: None)
        self.environment = None
        self.state = SimpleNamespace(recipe=self.recipe, watch=Watch(60.0), sweeper=SimpleNamespace(run=self._sleep))

    async def _sleep(self) -> None:
        await asyncio.sleep(60)

    async def _run_pumps(self, sampling, training) -> None:
        await super()._run_pumps(SimpleNamespace(run=self._sample), SimpleNamespace(run=self._sleep))

    async def _sample(self) -> None:
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self._die())

    async def _die(self) -> None:
        raise ComponentDied("the gateway is gone")


async def test_a_failing_pump_is_one_error_that_a_notebook_can_show():
    with pytest.raises(ComponentDied, match="the gateway is gone") as caught:
        await _Failing().run()
    # IPython prints an error with a group behind it as text, and the runner then sees no error at all.
    error = caught.value.__context__
    while error is not None:
        assert not isinstance(error, BaseExceptionGroup)
        error = error.__context__


def test_of_several_failures_the_deliberate_one_is_reported_however_deep_it_lies():
    """A connection that broke because the gateway died is not what the reader has to know."""
    died = ComponentDied("the gateway is gone")
    group = BaseExceptionGroup("", [OSError("broken"), BaseExceptionGroup("", [asyncio.CancelledError(), died])])
    assert first_cause(group) is died
    first = OSError("broken")
    assert first_cause(BaseExceptionGroup("", [BaseExceptionGroup("", [first]), ValueError("later")])) is first


async def test_an_environment_that_does_not_fit_ends_the_run_before_its_parts_start(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: ...")
    recipe = load_recipe("cpu_smoke", [f"environment.name={tmp_path / 'mine.py'}:Mine"])
    with pytest.raises(RecipeError, match="it lacks name, min_calls, task, run, reward"):
        await run_campaign(recipe, tmp_path / "run", make_fleet=lambda *_, **__: pytest.fail("it has been started"))
    assert "it lacks name" in runs.open(tmp_path / "run").campaign["error"][0]
    assert runs.open(tmp_path / "run").events["kind"].to_list() == ["set_up", "failed"]  # it began when it was set up
