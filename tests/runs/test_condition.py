"""What became of a run is told in one vocabulary, whatever is asked: the run, its frame, the list, the sweep."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest
import yaml

from workbench import runs
from workbench.demo import recorded_run
from workbench.inspect import CampaignBoard
from workbench.inspect.sweep_view import SweepView
from workbench.runs.condition import broken_recipe, read_recipe
from workbench.runs.shelf import overview
from workbench.runs.writer import RunWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded_run(), tmp_path / "run"))


def say(run: Path, **fields: object) -> None:
    status = orjson.loads((run / "status.json").read_bytes())
    (run / "status.json").write_bytes(orjson.dumps({**status, **fields}))


def told(run: Path) -> set[str]:
    """The word for the run's state, everywhere that it is told."""
    opened = runs.open(run)
    return {
        opened.campaign["state"][0],
        repr(opened).split(" · ")[1],
        overview([run])["status"][0],
        SweepView(run).table["status"][0],
        CampaignBoard(opened).sentence().split(" · ")[1],
    }


@pytest.mark.parametrize(
    ("stored", "word"),
    [
        ("done", "done"),
        ("failed", "failed"),
        ("stopped", "stopped"),
        ("killed", "stopped"),  # as runs of before 0.1.0 have it
        ("running", "stopped"),  # by something that let it say nothing: nobody writes it
    ],
)
def test_a_runs_state_has_one_word_wherever_it_is_told(run, stored, word):
    say(run, status=stored)
    assert told(run) == {word}
    assert stored == "running" or runs.open(run).status["status"] == word


def test_a_run_that_is_written_is_running(run):
    with RunWriter(run) as writer:
        writer.status(status="running")
        assert told(run) == {"running"}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", None])
def test_a_status_that_cannot_be_read_has_its_word_and_breaks_no_view(run, content):
    path = run / "status.json"
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    opened = runs.open(run)
    assert (opened.campaign["state"][0], overview([run])["status"][0]) == ("unreadable", "unreadable")
    assert f"{path} is not a readable JSON object" in opened.damage
    assert "how the run ended cannot be read" in CampaignBoard(opened).html()


def test_a_date_in_a_stored_recipe_is_the_text_that_was_written(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text("name: 2026-13-45\nas_of: 2026-01-02\n")
    as_text = {"name": "2026-13-45", "as_of": "2026-01-02"}
    assert read_recipe(tmp_path) == as_text and broken_recipe(tmp_path) == []
    # As lm-format-enforcer leaves it in a process that has imported it.
    texts = yaml.SafeLoader.yaml_constructors | {"tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str}
    monkeypatch.setattr(yaml.SafeLoader, "yaml_constructors", texts)
    assert read_recipe(tmp_path) == as_text
