"""The shipped notebooks: sources are clean, they run, and what their checked cells say stays the same.

Every notebook runs twice in a test session: once by `executed_notebooks` (sizes, pages without scripts, the second
run), once under nbval against what is kept in `expected/`.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from papermill import inspect_notebook
from record_expected import CHECKED, NOTEBOOKS, environment, execute_notebook, is_checked, kept_of

from workbench.campaign.report.notebook_file import MAX_BYTES, parameter_names
from workbench.demo import recorded_ledger, recorded_run
from workbench.places import shipped

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected"
WITH_PARAMETERS = {
    "02_prefix_chain.ipynb": ["run", "rollout"],
    "03_tokens_and_logprobs.ipynb": ["run", "rollout"],
    "05_receipts.ipynb": ["run", "rollout"],
    "06_grpo_by_hand.ipynb": ["run", "group"],
    "07_router_replay.ipynb": ["replayed", "alone"],
    "10_campaign.ipynb": ["recipe", "overrides", "run_dir", "resume"],
    "20_compare_arms.ipynb": ["run", "other_run", "group"],
    "30_watch_a_campaign.ipynb": ["run"],
    "40_sweep.ipynb": ["folder"],
}


def source(name: str) -> nbformat.NotebookNode:
    return nbformat.read(shipped("notebooks") / name, as_version=4)


def nbval(*paths: Path) -> subprocess.CompletedProcess[str]:
    """nbval as a reader would run it: every cell has to run, checked cells have to say what is kept."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-q",
         "-p", "no:cacheprovider", "-p", "no:asyncio",
         "--nbval-sanitize-with", str(HERE / "sanitise.cfg"), "-c", os.devnull, "--rootdir", str(HERE),
         "-W", "ignore", *map(str, paths)],
        capture_output=True, text=True, timeout=280, check=False, env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_sources_are_committed_without_outputs(name):
    for cell in source(name).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert len(cell.source.splitlines()) <= 14, "a cell does one thing; longer code belongs into the package"


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_papermill_reads_every_parameter_of_a_notebook(name, caplog):
    found = inspect_notebook(str(shipped("notebooks") / name))
    assert list(found) == WITH_PARAMETERS[name] and all(each["help"] for each in found.values())
    assert caplog.messages == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_expected_notebooks_belong_to_the_present_sources(name):
    kept = nbformat.read(EXPECTED / name, as_version=4)
    assert [c.source for c in kept.cells] == [c.source for c in source(name).cells], (
        "the notebook has changed; run: python tests/notebooks/record_expected.py"
    )
    checked = [c for c in kept.cells if CHECKED in c.metadata.get("tags", [])]
    assert len(checked) >= 3 and all(cell.outputs for cell in checked)


def test_the_changed_history_that_the_first_capture_proposes_runs_to_the_end():
    changed = source("01_capture_one_rollout.ipynb")
    (second_turn,) = (cell for cell in changed.cells if cell.source.startswith("messages += [answer"))
    second_turn.source = 'answer["content"] = "It snows."\n' + second_turn.source
    said = [cell.outputs for cell in execute_notebook(changed).cells if cell is second_turn]
    assert said[0][0].text.startswith("served, but it continues no recorded call")


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_notebook_has_the_parameters_that_papermill_is_told(name):
    assert parameter_names(shipped("notebooks") / name) == WITH_PARAMETERS[name]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_written_for_a_reader(name):
    """A title, a paragraph before the first cell, and a word before every cell that is not plain set-up."""
    cells = source(name).cells
    first = cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and "\n\n" in first.source
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for other in re.findall(r"`(\d\d_\w+\.ipynb)`", text):
        assert other in NOTEBOOKS, f"{name} sends its reader to {other}, which is not there"


def test_damage_that_a_notebook_makes_on_purpose_is_announced_before_the_run_tells_of_it():
    text = " ".join(source("04_poisoning.ipynb").cells[0].source.split())
    assert "The broken line that the run below says it left out is one of the exhibits" in text


def test_the_list_of_notebooks_is_complete():
    listed = re.findall(r"^\| `(\w+)` \|", (shipped("notebooks") / "README.md").read_text(), re.MULTILINE)
    assert [f"{name}.ipynb" for name in listed] == list(NOTEBOOKS)


def test_the_recorded_run_and_ledger_are_small():
    for folder, limit in ((recorded_run(), 350_000), (recorded_ledger(), 60_000)):
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= limit


def test_every_sanitising_rule_has_its_reason():
    lines = (HERE / "sanitise.cfg").read_text().splitlines()
    rules = configparser.ConfigParser()
    rules.read_string("\n".join(lines))
    for section in rules.sections():
        assert lines[lines.index(f"[{section}]") + 1].startswith("; "), f"rule {section} says no reason"


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_executed_notebooks_are_small_and_carry_no_widget_state(executed_notebooks):
    for name, path in executed_notebooks.all().items():
        assert path.stat().st_size <= MAX_BYTES, name
        notebook = nbformat.read(path, as_version=4)
        assert "widgets" not in notebook.metadata and "application/vnd.jupyter.widget" not in path.read_text(), name
        for cell in notebook.cells:
            streams = [o for o in cell.get("outputs", []) if o.output_type == "stream"]
            assert not any(o.name == "stderr" for o in streams), f"{name}: {streams}"


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_notebooks_run_and_say_what_they_said():
    halves = [[EXPECTED / name for name in NOTEBOOKS[k::2]] for k in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda half: nbval(*half), halves))
    for half, done in zip(halves, results, strict=True):
        assert done.returncode == 0, done.stdout[-6_000:]
        cells = sum(cell.cell_type == "code" for path in half for cell in source(path.name).cells)
        assert f"{cells} passed" in done.stdout, done.stdout[-2_000:]


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_two_runs_in_a_row_say_the_same(executed_notebooks):
    """What nbval compared with, against one more run; to the letter but for what the sanitising rules name."""
    rules = configparser.ConfigParser()
    rules.read(HERE / "sanitise.cfg")

    def said(notebook):
        text = [[output.get("data") or output.text for output in c.outputs] for c in notebook.cells if is_checked(c)]
        plain = str(text)
        for section in rules.sections():
            plain = re.sub(rules[section]["regex"], rules[section]["replace"], plain)
        return plain

    for name, path in executed_notebooks.all().items():
        again = said(kept_of(nbformat.read(path, as_version=4)))
        assert again == said(nbformat.read(EXPECTED / name, as_version=4)), name


@pytest.mark.kernel
def test_a_changed_output_fails_the_comparison(tmp_path):
    kept = nbformat.read(EXPECTED / "00_start_here.ipynb", as_version=4)
    cell = next(c for c in kept.cells if CHECKED in c.metadata.get("tags", []))
    kept.cells = [cell]
    output = cell.outputs[0]
    output.data["text/plain"] = output.data["text/plain"].replace("Run ", "Another run ")
    nbformat.write(kept, tmp_path / "changed.ipynb")
    done = nbval(tmp_path / "changed.ipynb")
    assert done.returncode == 1 and "Another run" in done.stdout


@pytest.mark.kernel
def test_a_report_of_a_stored_run_says_the_same_twice_and_stays_small(tmp_path):
    from stored_run import make_run

    run_dir = make_run(tmp_path / "stored")
    imports = "import sys; from pathlib import Path; from workbench.campaign.report.runner import report"
    code = f"{imports}; report(Path(sys.argv[1]))"
    outputs = []
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", code, str(run_dir)], check=True, timeout=100, capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
        executed = nbformat.read(run_dir / "campaign.ipynb", as_version=4)
        outputs.append([cell.get("outputs") for cell in executed.cells])
        assert (run_dir / "campaign.ipynb").stat().st_size < MAX_BYTES
    assert outputs[0] == outputs[1]
    pictures = sum("image/png" in o.get("data", {}) for cell in outputs[0] for o in cell or [])
    assert pictures == 7
    page = (run_dir / "campaign.html").read_text()
    assert page.count("data:image/png;base64") == pictures and "<script" not in page
