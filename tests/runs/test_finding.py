"""Finding a run: the same path means the same run in a terminal, in a notebook's folder and in one below it."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored_run import make_run

from workbench import runs
from workbench.errors import RunStoreError
from workbench.inspect.sweep_view import SweepView


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one run in reports/ and an empty notebooks/, where the kernel works."""
    make_run(tmp_path / "reports" / "first")
    (tmp_path / "notebooks" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


@pytest.mark.parametrize("where", ["", "notebooks", "notebooks/mine"])
@pytest.mark.parametrize("path", ["reports/first", "first"])
def test_a_path_from_the_readme_opens_wherever_the_kernel_works(checkout, monkeypatch, where, path):
    monkeypatch.chdir(checkout / where)
    assert runs.open(path).path.resolve() == runs.open_any(path).path.resolve() == checkout / "reports" / "first"


def test_what_is_there_under_the_path_as_given_is_not_passed_over(checkout):
    (checkout / "notebooks" / "first").mkdir()
    with pytest.raises(RunStoreError, match="No run in first: expected one of"):
        runs.open("first")
    make_run(checkout / "notebooks" / "reports" / "first")
    assert runs.open("reports/first").path == Path("reports/first")


def test_a_folder_of_runs_is_found_from_the_notebooks_folder(checkout):
    assert SweepView("reports").table["run"].to_list() == ["first"]
    with pytest.raises(RunStoreError, match="No sweep and no run in nowhere"):
        SweepView("nowhere")


def test_a_run_that_is_not_there_is_said_with_the_runs_that_are(checkout, monkeypatch):
    with pytest.raises(RunStoreError, match=r"No run in reports/frist: .*, did you mean first\?"):
        runs.open("reports/frist")  # from the notebooks' folder
    monkeypatch.chdir(checkout)
    for path, words in (
        ("reports/frist", "No run in reports/frist: there is no such directory, did you mean first?"),
        ("frist", "No run in reports/frist: there is no such directory, did you mean first?"),
        ("reports/other", "there is no such directory; runs beside it: first"),
        ("reports", "No run in reports itself, but below it: first; name one of them"),
        ("reports/first/steps.jsonl", "that is a file, and a run is a directory; name a run's directory"),
        ("notebooks", "expected one of status.json, events.jsonl, steps.jsonl, groups.jsonl there"),
    ):
        with pytest.raises(RunStoreError) as error:
            runs.open(path)
        assert words in str(error.value), path
