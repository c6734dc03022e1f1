"""Benchmarks: what their report says of figures, and that they measure what they say."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks import capture_core, frames, inputs, machine, report, throughput, verifier
from benchmarks.measure import Figure, in_turn, medians, timed_on, unmeasured
from workbench import runs
from workbench.finalizer import verify_and_linearize


@pytest.mark.parametrize(
    ("low", "value", "high", "reached", "said"),
    [
        (0.95, 0.97, 0.99, "yes", "yes"),
        (0.93, 0.96, 0.99, "within its interval", "within its interval (median: yes)"),
        (0.93, 0.94, 0.99, "within its interval", "within its interval (median: no)"),
        (0.91, 0.92, 0.94, "no", "**no**"),
        (None, 0.96, None, "yes", "yes"),
        (None, 0.94, None, "no", "**no**"),
    ],
)
def test_a_target_is_reached_by_the_whole_interval_or_within_it_or_not(low, value, high, reached, said):
    at_least = Figure("a", value, "×", low, high, at_least=0.95)
    at_most = Figure("b", -value, "×", high and -high, low and -low, at_most=-0.95)
    assert at_least.reached == at_most.reached == reached
    for line in shown(at_least, at_most).splitlines()[2:]:
        assert line.endswith(f"| {said} |")


def test_what_has_no_target_or_was_not_measured_is_neither_reached_nor_missed():
    assert Figure("a", 1.0, "ms", 0.9, 1.1).reached is None
    assert unmeasured("a", "ms", "no disk", at_most=1.0).reached is None


def test_notes_stand_below_the_table_once_each_under_the_number_in_their_rows():
    lines = shown(
        Figure("one", 1.0, "ms", note="Waits for\nthe disk."),
        Figure("two", 2.0, "ms"),
        Figure("three", 3.0, "×", note="Another reason."),
        Figure("four", 4.0, "ms", note="Waits for the disk."),
        unmeasured("five", "ms", "no such machine | at all"),
    ).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:7]] == [
        "| one <sup>1</sup>",
        "| two",
        "| three <sup>2</sup>",
        "| four <sup>1</sup>",
        "| five <sup>3</sup>",
    ]
    assert "not measured" in lines[6]
    assert lines[7:] == ["", "1. Waits for the disk.", "2. Another reason.", "3. no such machine | at all"]


def test_a_question_that_is_misspelt_is_answered_with_the_one_that_was_meant():
    asked = subprocess.run([sys.executable, "-m", "benchmarks", "verifer"], capture_output=True, text=True, check=False)
    assert asked.returncode == 2
    assert "python -m benchmarks: error: no question 'verifer', did you mean verifier? There are" in asked.stderr


def test_a_question_that_failed_says_why():
    said = report.table([{"question": "throughput", "failed": "no engine", "results": []}])
    assert "| throughput <sup>1</sup> | not measured |" in said and said.endswith("\n1. no engine\n")


def test_every_side_stands_in_every_place_equally_often():
    orders = [tuple(in_turn("abc", number)) for number in range(throughput.ROUNDS)]
    assert set(Counter(orders).values()) == {2} and len(set(orders)) == 6
    for sides in ("ab", "abcd", "abcde"):
        places = Counter(place for n in range(2 * len(sides)) for place in enumerate(in_turn(sides, n)))
        assert set(places.values()) == {2}


def test_a_commit_is_dirty_where_the_code_is_and_not_where_other_results_are(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "start_up.json").write_text("{}")
    clean = machine.describe()["commit"]
    (tmp_path / "code.py").write_text("")
    assert "-dirty" not in clean and machine.describe()["commit"] == f"{clean}-dirty"


def test_growth_is_drawn_through_medians():
    assert medians({"1": [1.0, 9.0, 2.0], "4": np.array([3.0, 4.0, 50.0])}, (1, 4)) == [2.0, 4.0]


def test_each_timed_call_has_a_thing_of_its_own():
    made, used = [], []
    timed_on(lambda: made.append(object()) or made[-1], used.append, repeats=3)()
    assert used == made and len(set(map(id, used))) == 3


def test_the_verifier_is_given_rows_and_a_receipt_that_nothing_was_done_with():
    fetch = verifier.fetched(3, 20)
    (one_receipt, one), (other_receipt, other) = fetch(), fetch()
    assert one_receipt is not other_receipt and one_receipt == other_receipt
    for call, again in zip(one, other, strict=True):
        assert call is not again and call.digest == again.digest
        assert not np.shares_memory(call.token_ids_delta, again.token_ids_delta)
    turns = inputs.turns(3, 20)
    assert verify_and_linearize(one_receipt, one).token_ids.tolist() == [*turns[-1].prompt, *turns[-1].sampled]


def test_the_workers_whole_path_stages_what_the_core_alone_stages():
    alone, _ = capture_core.captured(inputs.turns(4, 30))
    assert [call.cumulative_hash for call in capture_core.through_worker(4, 30)()] == [
        call.cumulative_hash for call in alone
    ]


def test_the_run_that_is_opened_has_what_its_steps_trained(tmp_path):
    whole = frames.make_run(tmp_path / "run", 9 * frames.A_GROUP)
    assert [path.name for path in sorted((whole / "train").iterdir())] == ["step-1.parquet", "step-2.parquet"]
    part = frames.first_groups(whole, tmp_path / "part", 6)
    steps = [step for step in (1, None) for _ in range(frames.A_GROUP * (4 if step else 2))]
    assert runs.open(part).rollouts["trained_step"].to_list() == steps


def test_throughput_says_what_each_part_costs_a_call_beside_what_the_target_allows():
    def batches(rate: float, **parts_ms: float) -> list[throughput.Batch]:
        parts = {part: parts_ms.get(part.lower(), 0.0) / 1e3 for part in throughput.PARTS}
        return [throughput.Batch(1 / rate, 0.2, 0.7, parts)] * 6

    captured = batches(94.0, engine=171.0, server=9.0, gateway=3.25, transferqueue=4.0)
    bare = batches(100.0, engine=170.0, server=4.0, gateway=0.25, transferqueue=2.0)
    scored = batches(98.0, engine=172.0, server=6.0, gateway=0.25, transferqueue=2.0)
    first = throughput.figures(dict(zip(throughput.KINDS, (captured, bare, scored), strict=True)))[0]
    assert first.value == pytest.approx(0.94) and first.reached == "no"
    assert "takes 176 ms of processor time in these parts, 170 of them" in first.note
    assert "0.95 allows 9.3 ms more" in first.note
    assert "capture takes 10.0 ms: 5.0 in server, 3.0 in gateway, 2.0 in TransferQueue. 2.0 ms of them" in first.note


def test_the_processor_time_of_a_part_is_that_of_the_processes_that_bear_its_name():
    with subprocess.Popen([sys.executable, "-c", SPINS, "workbench.gateway"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        before = throughput.by_part()["gateway"]
        child.stdout.readline()
        spent = throughput.by_part()["gateway"] - before
        child.kill()
    assert spent >= 0.2


SPINS = """
import time
while time.process_time() < 0.5: pass
print(flush=True)
time.sleep(60)
"""


def shown(*figures: Figure) -> str:
    """The table of these figures."""
    return report.table([{"question": "q", "results": [asdict(one) for one in figures]}])
