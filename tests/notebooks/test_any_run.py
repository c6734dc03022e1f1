"""The notebooks that take a run take it in any state, and any of its rollouts: what is not there is a sentence.

The cells are run in this process, without a kernel; a view is asked for its text and its picture, not for the pixels.
Notebooks that compute on one rollout or group stop where that is chosen, with the one sentence of a RunStoreError.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import polars as pl
import pytest
from stored_run import StoredRun, make_run, rewrite_json_line

from workbench import runs
from workbench.campaign.report.notebook_file import parameter_names
from workbench.demo import recorded_ledger, recorded_run
from workbench.errors import RunStoreError
from workbench.inspect.snapshot import StaticView
from workbench.places import shipped

LOOKING = ("02_prefix_chain", "03_tokens_and_logprobs", "10_campaign", "20_compare_arms", "30_watch_a_campaign")
COMPUTING = ("05_receipts", "06_grpo_by_hand")


def run_cells(name: str, **parameters: Any) -> str:
    """Everything that a notebook's cells print and show, in order."""
    path = shipped("notebooks") / f"{name}.ipynb"
    assert set(parameters) <= set(parameter_names(path))
    names: dict[str, Any] = {}
    said: list[str] = []
    names["print"] = lambda *values: said.append(" ".join(map(str, values)))
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        said.append(_shown(_value(cell.source, names)))
        if "parameters" in cell.metadata.get("tags", []):
            names.update(parameters)
    return "\n".join(said)


def _value(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression, as IPython has it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    awaiting = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for part in (tree, None if last is None else ast.Expression(last.value)):
        if part is not None:
            value = eval(compile(part, "cell", "eval" if part is not tree else "exec", flags=awaiting), names)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
    return value if last is not None else None


def _shown(value: Any) -> str:
    if not isinstance(value, StaticView):
        return "" if value is None else str(value)
    value.figure()
    return f"{value.sentence()}\n{value.html()}"


def _empty(path: Path) -> None:
    StoredRun(path).writer.close()


def _crashed_in_flight(path: Path) -> None:
    stored = StoredRun(path)
    stored.play("state.0.0.0", 2, kind="plain")
    stored.writer.close()
    with (path / "events.jsonl").open("ab") as events:
        events.write(b'{"at": 1.0, "kind": "gro')


def _nothing_valid(path: Path) -> None:
    stored = StoredRun(path)
    stored.group(1, 0, ["edit", "nan"])
    stored.finish()


def _untrained(path: Path) -> None:
    stored = StoredRun(path)
    stored.group(1, 0, ["plain", "edit", "retry"])
    stored.finish()


def _equal_rewards(path: Path) -> None:
    stored = StoredRun(path)
    stored.step(1, [["plain", "retry"], ["plain"]])
    stored.finish()
    for part in (path / "rows").glob("*.parquet"):
        pl.read_parquet(part).with_columns(reward=pl.lit(0.5)).write_parquet(part)


def _served(path: Path) -> None:
    """No step, and rollouts that were closed without a reward."""
    _untrained(path)
    rewrite_json_line(path / "status.json", 0, {"command": "serve"})
    rewrite_json_line(path / "groups.jsonl", 0, {"step": None, "reward_mean": None, "reward_std": None})
    for part in (path / "rows").glob("*.parquet"):
        pl.read_parquet(part).with_columns(reward=pl.lit(None, pl.Float64)).write_parquet(part)


def _damaged(path: Path) -> None:
    make_run(path, steps=1)
    steps = path / "steps.jsonl"
    steps.write_bytes(b"{broken\n" + steps.read_bytes())


def _damaged_part(path: Path) -> None:
    make_run(path, steps=2)
    for part in ("rows/g00000.parquet", "calls/g00001.parquet"):
        (path / part).write_bytes((path / part).read_bytes()[:200])


STATES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_empty, "has no calls yet"),
    "crashed in flight": (_crashed_in_flight, "not finalised yet: nothing is verified"),
    "nothing valid": (_nothing_valid, "rejected"),
    "untrained": (_untrained, "no step has trained it"),
    "equal rewards": (_equal_rewards, "trained in step 1"),
    "served": (_served, "2 valid rollouts, none trained · no reward given"),
    "damaged": (_damaged, "1 broken line left out (steps.jsonl, line 1 is not JSON"),
    "a damaged part": (_damaged_part, "2 damaged parts left out (calls/g00001.parquet is not a readable part of table"),
}


@pytest.fixture(scope="module", params=STATES)
def state(request, tmp_path_factory) -> tuple[Path, str]:
    make, words = STATES[request.param]
    path = tmp_path_factory.mktemp("any") / "state"
    make(path)
    return path, words


def test_looking_at_a_run_in_any_state_ends_in_sentences(state):
    path, words = state
    said = "\n".join(run_cells(name, **{_run_of(name): str(path)}) for name in LOOKING)
    assert words in said


def test_computing_on_a_run_in_any_state_computes_or_stops_with_a_sentence(state):
    path, _ = state
    for name in COMPUTING:
        try:
            run_cells(name, run=str(path))
        except RunStoreError as error:
            assert error._render_traceback_() == [f"RunStoreError: {error}"] and str(path.name) in str(error)


@pytest.mark.parametrize("name", LOOKING[:2])
def test_a_rollout_that_does_not_exist_is_answered_with_those_that_do(name):
    assert "demo.0.0.0" in run_cells(name, rollout="demo.9.9.9")


def test_a_group_that_does_not_exist_is_answered_with_those_that_do():
    assert "Run demo has no group 'g9'; it has 4: g00000, g00001, g00002, …" in run_cells("20_compare_arms", group="g9")
    with pytest.raises(RunStoreError, match="no group 'g9'"):
        run_cells("06_grpo_by_hand", group="g9")


def test_two_runs_are_compared_as_arms(tmp_path):
    other = shutil.copytree(recorded_run(), tmp_path / "other")
    assert "16 pairs, 0 flips" in run_cells("20_compare_arms", other_run=str(other))


@pytest.mark.parametrize("ledger", [recorded_ledger(), recorded_run() / "ledger"], ids=["foreign", "own"])
def test_a_ledger_is_looked_at_like_a_run(ledger):
    said = run_cells("02_prefix_chain", run=str(ledger))
    assert "holds no tokens" in said and "trained" not in said


def telling() -> list[str]:
    """One rollout of each shape: what its calls are to the chain, and its cause."""
    run = runs.open(recorded_run())
    shapes = run.calls.group_by("rollout_id", maintain_order=True).agg(pl.col("relation").unique().sort())
    shapes = shapes.join(run.rollouts.select("rollout_id", "cause"), on="rollout_id", maintain_order="left")
    return shapes.unique(["relation", "cause"], keep="first", maintain_order=True)["rollout_id"].to_list()


@pytest.mark.parametrize("rollout", telling())
def test_the_chain_notebook_answers_for_any_rollout(rollout):
    said = run_cells("02_prefix_chain", rollout=rollout)
    assert f"Rollout {rollout} ·" in said and "sampled tokens" in said


def _run_of(name: str) -> str:
    return "run_dir" if name == "10_campaign" else "run"
