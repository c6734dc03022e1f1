"""Pace: what is said of the time to go is about steps as they are now, not about how the process began."""

from __future__ import annotations

import pytest

from workbench.campaign.pace import Pace


def line(step: int, seconds: float) -> dict[str, float]:
    return {"step": step, "rollout_s": seconds - 3, "train_s": 1.0, "publish_s": 1.0, "sync_s": 1.0}


def test_a_first_step_that_waited_for_its_groups_counts_only_while_it_is_the_only_one() -> None:
    pace = Pace()
    pace.took(60.0)
    assert pace.for_steps(5) == pytest.approx(300.0)
    pace.took(10.0)
    assert pace.for_steps(4) == pytest.approx(40.0)


def test_right_after_a_resume_the_time_to_go_is_by_the_steps_before_it() -> None:
    pace = Pace([line(1, 50.0), line(2, 10.0), line(3, 10.0)])
    pace.took(90.0)  # a first batch from an empty pipeline
    assert pace.for_steps(10) == pytest.approx(100.0)


def test_first_steps_of_the_processes_before_do_not_count_either() -> None:
    stored = [line(1, 50.0), line(2, 10.0), line(3, 70.0), line(4, 60.0)]
    assert Pace(stored, {1, 3, 4}).for_steps(3) == pytest.approx(30.0)
    assert Pace(stored[2:], {3, 4}).for_steps(3) == pytest.approx(180.0)


def test_one_slow_step_is_no_trend_and_a_lasting_change_is_followed() -> None:
    pace = Pace([line(step, 10.0) for step in range(1, 9)])
    for seconds in (70.0, 10.0, 80.0, 10.0):
        pace.took(seconds)
    assert pace.for_steps(1) == pytest.approx(10.0)
    for _ in range(8):
        pace.took(30.0)
    assert pace.for_steps(1) == pytest.approx(30.0)


def test_a_step_whose_line_was_made_up_at_a_resume_has_no_times_and_is_left_out() -> None:
    pace = Pace([line(1, 12.0), {"step": 2, "train_s": 4.0}])
    pace.took(90.0)
    assert pace.for_steps(2) == pytest.approx(24.0)
