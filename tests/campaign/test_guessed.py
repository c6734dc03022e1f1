"""A rollout whose last call nobody named: every place that sums a run up says that it was guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_run import StoredRun

from workbench import runs
from workbench.campaign.report.listing import list_lines, rollout_lines
from workbench.campaign.report.notebook_file import Outcome
from workbench.campaign.report.summary import Summary, summarise
from workbench.campaign.verify import verify_run
from workbench.demo.bench import Bench, open_bench
from workbench.inspect import CampaignBoard, Engagement
from workbench.runs.shelf import overview


async def played(bench: Bench, rollout_id: str, talks: int, witness: bool) -> Any:
    for talk in range(talks):
        ask = [{"role": "user", "content": f"Question {talk}?"}]
        last = await bench.say(rollout_id, ask)
    return await bench.finish(rollout_id, last if witness else None)


async def summed_up(rollouts: list[tuple[int, bool]], directory: Path) -> tuple[Summary, Any, str]:
    async with open_bench([{"text": "It rains."}], path=directory) as bench:
        for number, (talks, witness) in enumerate(rollouts):
            await bench.finalise(str(number), [await played(bench, f"run.{number}.0.0", talks, witness)])
        summary = summarise(bench.run.path, notebook=Path("n.ipynb"), outcome=Outcome("done"), seconds=1.0)
        listed = "\n".join(rollout_lines(bench.run, 9))
        return summary, verify_run(bench.run.path), listed


async def test_a_guessed_last_call_is_counted_and_explained(tmp_path: Path) -> None:
    summary, verified, listed = await summed_up([(1, True), (1, False), (3, False)], tmp_path)
    assert summary.heuristic_fraction == pytest.approx(2 / 3)
    said = "the last call of 2 of 3 valid rollouts was named by nobody and chosen by heuristic"
    left_out = (
        "1 of them had other conversations too, which were left out, so that what was trained may not be what the "
    )
    left_out += "reward was for. Next: return the served response"
    assert f"  LAST CALLS GUESSED         {said}" in summary.text() and left_out in summary.text()
    assert summary.text().index("LAST CALLS GUESSED") < summary.text().index("notebook ")
    few = replace(summary, heuristic_fraction=0.05).text()
    assert f"  last calls guessed         {said}" in few and "GUESSED" not in few
    ((page, loud),) = Engagement(runs.open(tmp_path)).remarks()
    assert page.startswith(f"Guessed: {said}") and loud
    (line,) = list_lines(overview([tmp_path]))[2:]
    assert line == "  last calls guessed in 2 of 3 valid rollouts"
    assert verified.ok
    (remark,) = [each for each in verified.remarks if "heuristic" in each]
    assert remark.startswith(said) and "(heuristic_fraction 0.667)" in remark and left_out in remark
    assert listed.count("verified, terminal by heuristic, ") == 2


async def test_where_every_last_call_was_named_nothing_is_said_of_it(tmp_path: Path) -> None:
    summary, verified, listed = await summed_up([(1, True), (3, True)], tmp_path)
    assert (summary.heuristic_fraction, summary.guessed) == (0.0, None)
    assert "heuristic" not in summary.text() + str(verified) + listed
    assert Engagement(runs.open(tmp_path)).remarks() == []


def test_the_board_has_a_tile_for_guessed_last_calls_where_there_are_some(tmp_path: Path) -> None:
    boards = []
    for named in (True, False):
        stored = StoredRun(tmp_path / str(named), named=named)
        stored.step(1, [["plain", "plain"], ["plain", "edit"]])
        boards.append(CampaignBoard(runs.open(stored.finish())).html())
    assert "heuristic" not in boards[0]
    assert "last calls chosen by heuristic" in boards[1] and "4 of 4" in boards[1]
