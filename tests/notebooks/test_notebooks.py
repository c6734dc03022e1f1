"""The shipped notebooks: sources are clean, they run, and what their checked cells say stays the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from record_expected import CHECKED, NOTEBOOKS

from workbench.campaign.notebook_file import MAX_BYTES, parameter_names
from workbench.demo import recorded_run
from workbench.places import shipped

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected"


def source(name: str) -> nbformat.NotebookNode:
    return nbformat.read(shipped("notebooks") / name, as_version=4)


def nbval(*paths: Path) -> subprocess.CompletedProcess[str]:
    """nbval as a reader would run it: every cell has to run, checked cells have to say what is kept."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-q",
         "-p", "no:cacheprovider", "-p", "no:asyncio",
         "--nbval-sanitize-with", str(HERE / "sanitise.cfg"), "-c", os.devnull, "--rootdir", str(HERE),
         "-W", "ignore", *map(str, paths)],
        capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "WORKBENCH_DISPLAY": "static", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_sources_are_committed_without_outputs(name):
    for cell in source(name).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert len(cell.source.splitlines()) <= 14, "a cell does one thing; longer code belongs into the package"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_expected_notebooks_belong_to_the_present_sources(name):
    kept = nbformat.read(EXPECTED / name, as_version=4)
    assert [c.source for c in kept.cells] == [c.source for c in source(name).cells], (
        "the notebook has changed; run: python tests/notebooks/record_expected.py"
    )
    checked = [c for c in kept.cells if CHECKED in c.metadata.get("tags", [])]
    assert len(checked) >= 3 and all(cell.outputs for cell in checked)


def test_the_campaign_notebook_has_the_parameters_the_runner_gives():
    assert parameter_names(shipped("notebooks") / "10_campaign.ipynb") == ["recipe", "overrides", "run_dir"]


def test_the_recorded_run_is_small():
    assert sum(path.stat().st_size for path in recorded_run().rglob("*") if path.is_file()) <= 300_000


@pytest.mark.kernel
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run_and_say_what_they_said(name):
    done = nbval(EXPECTED / name)
    assert done.returncode == 0, done.stdout[-4_000:]
    assert "passed" in done.stdout


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
    code = (
        "import sys; from pathlib import Path; from workbench.campaign.runner import report; report(Path(sys.argv[1]))"
    )
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
    assert pictures == 6
    page = (run_dir / "campaign.html").read_text()
    assert page.count("data:image/png;base64") == pictures and "<script" not in page
