"""The command line as a person meets it: fast help, one line an error, exit codes, nothing listed that isn't there.

Long because every command is tried right and wrong, most in a few lines.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from stored_run import StoredRun, make_run

from workbench import runs
from workbench.campaign.cli import main
from workbench.campaign.machines import doctor, installed, machine
from workbench.campaign.machines.doctor import logical_cpus, model, port, temporary_directory
from workbench.campaign.machines.installed import browser, torch_companions
from workbench.campaign.run_place import new_run_dir
from workbench.config import load_recipe, shipped_recipes
from workbench.demo import recorded_run
from workbench.errors import RunStoreError

HEAVY = ("torch", "ray", "vllm", "plotly", "pandas", "polars", "omegaconf", "openai", "transfer_queue")


def workbench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench.campaign.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def ended(*arguments: str) -> int:
    """The exit code of a command, run in this process."""
    try:
        main(list(arguments))
    except SystemExit as code:
        return int(code.code or 0)
    return 0


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of a command that ends well, run in this process."""
    assert ended(*arguments) == 0
    return capsys.readouterr().out


ASKED = functools.cache(installed.ask_python)


@pytest.fixture
def packages_asked_once(monkeypatch):
    """What the installed packages say of themselves takes seconds and is the same for all tests that ask."""
    monkeypatch.setattr(installed, "ask_python", ASKED)


def test_help_imports_nothing_heavy_and_answers_at_once():
    code = (
        "import sys; from workbench.campaign.cli import main\n"
        "try: main(['--help'], prog_name='workbench')\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    # Processor time, which others on the machine hardly change: 0.1 s; the bound leaves room for a slow machine.
    assert min(seconds) < 1.0


def test_a_reader_who_has_seen_enough_sees_no_traceback():
    """`workbench recipe list | head -1`"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "workbench.campaign.cli", "recipe", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert done.stderr == ""


def test_a_fault_of_ours_is_shown_whole_and_an_interrupt_is_a_line(monkeypatch, tmp_path, capsys):
    for error, code in ((OSError(errno.ENOENT, "gone"), None), (KeyboardInterrupt(), 130)):

        def raises(folder, error=error):
            raise error

        monkeypatch.setattr("workbench.campaign.report.listing.listing", raises)
        with pytest.raises(SystemExit if code else OSError) as ended:
            main(["ls", str(tmp_path)])
        assert code is None or ended.value.code == code
    assert capsys.readouterr().err.strip() == "workbench: interrupted"


def test_debugging_shows_the_traceback_of_a_deliberate_error(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_DEBUG", "1")
    with pytest.raises(RunStoreError, match="No runs in"):
        main(["ls", str(tmp_path)])


def test_every_command_has_help_and_a_sentence():
    listed = workbench("--help").stdout
    assert "..." not in listed.partition("Commands:")[2], "a first sentence is too long to be shown whole"
    for name, command in main.commands.items():
        assert name in listed
        assert command.help and command.help.strip()
        assert CliRunner().invoke(main, [name, "--help"], standalone_mode=False).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "cpu_smoke", "train.stps=3"), "unknown key train.stps, did you mean train.steps?"),
        (("run", "cpu_smoke", "train.steps=x"), "train.steps: expected a whole number ≥ 1, got 'x'"),
        (("run", "cpu_smoke", "environment.options.trns=3"), "environment.options.trns"),
        (("run", "cpu_smoke", "ray.num_cpus=2"), "at least 3 logical CPUs"),
        (("run", "cpu_smoke", "ray.num_cpus=4"), "ray.num_cpus 4, 6 actors; set ray.num_cpus=6"),
        (("run", "cpu_smoke", "model.path=no_such_model"), "model.path: no model at 'no_such_model'; expected a"),
        (
            ("run", "cpu_smoke", "model.max_model_len=10000"),
            "model.max_model_len: 10,000, and the model was made for 8,192 positions; set it to 8192 or less",
        ),
        (("run", "CPU_SMOKE"), "No recipe file 'CPU_SMOKE', did you mean cpu_smoke?"),
        (("run", "cpu_smoke", "environment.name=gues"), "no environment 'gues', did you mean guess_number?"),
        (("run", "cpu_smoke", "environment.name=mine.py"), "expected mine.py:Class"),
        (("run", "cpu_smoke", "model.tool_call_parser=hermess"), "no 'hermess'; did you mean hermes? the engine has"),
        (("run", "cpu_smoke", "model.reasoning_parser=qwen33"), "no 'qwen33'; did you mean qwen3? the engine has"),
        (("run", "cpu_smoke", "train.advantage.name=grp"), "No advantage estimator 'grp', did you mean grpo?"),
        (("recipe", "check", "cpu_smoke", "train.advantage.options.baseline=x"), "train.advantage: grpo: baseline is"),
        (("run", "cpu_smoke", "train.buffer_groups=1"), "train.buffer_groups: expected at least 2"),
        (("run", "cpu_smoke", "--run", "../elsewhere"), "--run ../elsewhere: expected a name"),
        (("run", "no_such_recipe"), "No recipe file 'no_such_recipe'. Shipped"),
        (("recipe", "check", "nope.yaml"), f"No recipe file 'nope.yaml' in {Path.cwd()}"),
        (("serve", "cpu_smoke", "token_capture.enabled=false"), "nothing to serve it for then; set it to true"),
        (("serve", "cpu_smoke", "ray.num_cpus=4", "finalizer.actors=2"), "ray.num_cpus 4, 6 actors"),
        (("recipe", "check", "cpu_smoke", "environment.name=x"), "no environment 'x'"),
        (
            ("recipe", "check", "cpu_smoke", "environment.name=x.py:"),
            "workbench: command line: environment.name: expected a text, got {'x.py': None}: a name and the class "
            "behind its colon, without a space (environment.name=file.py:Class)",
        ),
        (
            ("recipe", "check", "cpu_smoke", "model.path=my: model"),
            "workbench: command line: model.path: expected a text, got {'my': 'model'}: YAML makes a mapping",
        ),
        (
            ("recipe", "check", "cpu_smoke", "environment.name='x.py:'"),
            "environment.name: 'x.py:' names a file and no class in it; expected x.py:Class",
        ),
        (("recipe", "check", "cpu_smoke", "engine.port=4711", "gateway.port=4711"), "expected another port than"),
        (("recipe", "check", "cpu_smoke", "environment.name='a.py:B:C'"), "'a.py:B:C' has more than one colon"),
        (("recipe", "check", "cpu_smoke", "environment.name=':B'"), "':B' has nothing before its colon"),
        (
            ("recipe", "check", "cpu_smoke", "train.advantage={name: gdpo, options: {weights: {from: 1.0}}}"),
            "train.advantage.options.weights.from: the rewards of guess_number have no such component, did you mean",
        ),
        (
            ("recipe", "check", "cpu_smollm2", "train.advantage={name: gdpo, options: {weights: [1.0, 2.0]}}"),
            "train.advantage.options.weights: expected 3, for form, hints, near of guess_number; got 2",
        ),
        (
            ("recipe", "check", "cpu_smoke", "model.tool_call_parser=hermess"),
            "model.tool_call_parser: no 'hermess'; did you mean hermes?",
        ),
        (
            ("recipe", "check", "cpu_smoke", "model.reasoning_parser=Qwen3"),
            "model.reasoning_parser: no 'Qwen3'; did you mean qwen3?",
        ),
        (
            ("recipe", "check", "cpu_smoke", "model.max_model_len=1000000"),
            "was made for 8,192 positions; set it to 8192",
        ),
        (("recipe", "show", "cpu_smoke", "x"), "expected key=value"),
    ],
)
def test_a_wrong_recipe_is_one_line_on_stderr_and_exit_2(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments), prog_name="workbench")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert expected in said.err
    assert said.err.startswith("workbench: ")
    assert said.err.count("\n") == 1


def test_a_value_given_as_an_option_is_told_how_values_are_given(capsys):
    assert ended("run", "cpu_smoke", "--steps", "2") == 2
    assert capsys.readouterr().err.endswith("A recipe's values are given without dashes, as in train.steps=2.\n")
    assert ended("ls", "--steps") == 2
    assert "recipe" not in capsys.readouterr().err


def test_a_mistake_is_the_same_line_in_a_process_of_its_own():
    done = workbench("run", "cpu_smoke", "train.stps=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("workbench: ") and "did you mean train.steps?" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_package_itself_is_the_command_line():
    command = [sys.executable, "-m", "workbench", "recipe", "check", "cpu_smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu_smollm2: good\n"


def test_debug_shows_the_traceback():
    done = workbench("recipe", "check", "cpu_smoke", "x", WORKBENCH_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "RecipeError" in done.stderr


def test_recipe_show_gives_yaml_that_is_a_recipe_again(tmp_path, capsys):
    shown = printed(capsys, "recipe", "show", "cpu_misbehave", "train.steps=3")
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert load_recipe(again) == load_recipe("cpu_misbehave", ["train.steps=3"])
    (places,) = [line for line in shown.splitlines() if line.strip().startswith("buffer_groups:")]
    assert "# schema default; derived: 12 (" in places
    assert "# control token: derived: $WORKBENCH_CONTROL_TOKEN (" in shown


def test_recipe_check_passes_every_shipped_recipe(capsys):
    for name in ("cpu_smollm2", "cpu_misbehave", "serve_smollm2"):
        assert printed(capsys, "recipe", "check", name) == f"{name}: good\n"


def test_recipe_check_says_that_capture_is_off_and_that_a_model_is_not_here(tmp_path, capsys):
    recipe = tmp_path / "minimal.yaml"
    recipe.write_text("name: minimal\nmodel: {path: /nope}\nenvironment: {name: guess_number}\n")
    assert ended("recipe", "check", str(recipe)) == 0
    good, capture, model = capsys.readouterr().out.splitlines()
    assert good == "minimal: nothing is wrong in it, but its model is not on this machine"
    assert capture == "token capture is off (token_capture.enabled: false): this run samples by the echo arm"
    assert model.startswith("model.path: no model at '/nope' on this machine; expected a folder with a config.json")
    assert ended("recipe", "check", str(recipe), "token_capture.enabled=true", "model.path=tiny") == 0
    assert capsys.readouterr().out == "minimal: good\n"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("smollm2", "built into .*, did you mean smollm2-135m?"),
        (
            "HuggingFaceTB/SmolLM2-135M",
            "Nothing is downloaded for a run. Next: huggingface-cli download HuggingFaceTB/SmolLM2-135M "
            "--local-dir FOLDER, and model.path=FOLDER",
        ),
        ("nowhere", "expected a folder with a config.json, or one of the names smollm2-135m, tiny, tiny-moe"),
    ],
)
def test_a_recipe_whose_model_is_on_no_machine_is_refused_with_how_to_get_one(path, says, capsys):
    assert ended("recipe", "check", "cpu_smoke", f"model.path={path}") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"workbench: model.path: no model at '{path}'; ") and err.count("\n") == 1
    assert all(part in err for part in says.split(".*"))


def test_a_dry_run_that_finds_something_lacking_is_not_good(capsys):
    assert ended("run", "cpu_smoke", "--dry-run", "model.path=/nope") == 2
    said = capsys.readouterr()
    assert "lacking    model.path: no model at '/nope'; expected a folder" in said.out
    assert said.err == "workbench: cpu_smoke cannot run here: 1 lacking, see the end of the plan\n"
    assert ended("run", "cpu_smoke", "--dry-run") == 0


@pytest.mark.usefixtures("packages_asked_once")
def test_routes_of_a_model_without_experts_are_refused_before_anything_starts(tmp_path, capsys, tiny_model):
    wanted = ("cpu_smoke", f"model.path={tiny_model}", "token_capture.routes=true", f"reports.dir={tmp_path}")
    for command in (("recipe", "check"), ("run", "--dry-run"), ("doctor", "--quick"), ("run",), ("serve",)):
        assert ended(*command, *wanted) == 2
        said = capsys.readouterr()
        assert "the model has no experts" in said.out + said.err
    assert not list(tmp_path.iterdir())
    assert ended("recipe", "check", "cpu_smoke", "token_capture.routes=true", "model.path=/nope") == 0


def test_doctor_names_a_port_in_use_with_its_key():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        finding = port("gateway.port", "127.0.0.1", number)
    assert not finding.good
    assert str(number) in finding.found and "gateway.port=0" in finding.cure
    assert port("gateway.port", "127.0.0.1", 0).good
    for nobody in ("192.0.2.1", "a" * 70):
        finding = port("gateway.port", nobody, 0)
        assert not finding.good and nobody in finding.found and "gateway.host" in finding.cure


def test_run_refuses_a_port_in_use_before_anything_starts(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ended("run", "cpu_smoke", f"gateway.port={port}", f"reports.dir={tmp_path}") == 2
    said = capsys.readouterr().err
    assert "in use" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_doctor_counts_the_logical_cpus_of_the_recipe():
    assert logical_cpus(load_recipe("cpu_smoke")).good
    short = logical_cpus(load_recipe("cpu_smoke", ["ray.num_cpus=4"]))
    assert "ray.num_cpus=6" in short.cure
    assert logical_cpus(load_recipe("cpu_smoke", ["ray.num_cpus=4", "ray.address=auto"])).good


def test_doctor_says_how_a_missing_model_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    missing = model(load_recipe("cpu_smoke"))
    assert not missing.good
    assert "build" in missing.cure


def test_doctor_finds_a_companion_of_torch_that_does_not_import(tmp_path, monkeypatch):
    (tmp_path / "torchcodec.py").write_text("raise RuntimeError('built for another torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = {finding.what: finding for finding in torch_companions()}["torchcodec"]
    assert "pip uninstall -y torchcodec" in broken.cure


def test_doctor_refuses_a_temporary_directory_too_long_for_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 80)
    assert "TMPDIR=/tmp" in temporary_directory().cure
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert temporary_directory().good


def test_packages_in_a_path_with_a_space_are_refused_because_torch_cannot_link_there():
    assert machine.place("/opt/venv").good
    assert "move the checkout" in machine.place("/home/a person/.venv").cure


@pytest.mark.usefixtures("packages_asked_once")
def test_doctor_looks_at_everything_that_a_campaign_and_its_tests_need(capsys):
    ended("doctor", "cpu_smoke", "--quick")
    told = capsys.readouterr()
    looked = [line[4:].split("  ")[0].strip() for line in told.out.splitlines()]
    for what in (
        "python",
        "memory",
        "free memory",
        "disk",
        "compiler",
        "packages",
        "torch",
        "vllm",
        "fonts",
        "browser",
    ):
        assert what in looked, told


def test_free_memory_is_what_can_still_be_had(monkeypatch):
    assert 0 < machine.free_memory_gib() <= machine.memory_gib()
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 1.5)
    assert "stop what holds it" in machine.free_memory().cure


def test_what_only_tests_need_is_no_reason_to_refuse(monkeypatch):
    monkeypatch.setenv("WORKBENCH_CHROMIUM", "/nowhere")
    lacking = browser()
    assert not lacking.good and lacking.optional and "apt-get install chromium" in lacking.cure
    monkeypatch.setattr(installed, "IMPORT_TIMEOUT_S", 0.001)
    late = browser()
    assert not late.good and late.optional and "no answer within" in late.found


def test_a_missing_compiler_or_header_names_the_debian_package(monkeypatch):
    assert machine.compiler().good
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    assert "-dev" in machine.compiler().cure
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt-get install g++ python3" in machine.compiler().cure


def test_too_little_memory_and_disk_are_said_with_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "memory_gib", lambda: 5.9)
    assert "needs 8 GB" in machine.memory().cure
    monkeypatch.setattr(machine, "memory_gib", lambda: 7.6)
    assert machine.memory(machine.SMALL_PEAK_GIB).good
    assert "needs 1000000000 GiB" in machine.disk(tmp_path, 1e9).cure
    assert machine.disk(tmp_path, 0.0).good


@pytest.mark.parametrize(
    ("total_gib", "swap_gib", "takes_gib", "mark"),
    [
        (7.6, 0.0, None, "--"),
        (7.6, 0.0, machine.PEAK_GIB, "BAD"),
        (7.6, 4.0, machine.PEAK_GIB, "--"),
        (9.6, 0.0, machine.PEAK_GIB, "--"),
        (11.5, 0.0, machine.PEAK_GIB, "ok"),
        (11.5, 0.0, None, "ok"),
    ],
)
def test_memory_that_the_default_campaign_would_outgrow_is_said_with_the_smaller_recipe(
    monkeypatch, total_gib, swap_gib, takes_gib, mark
):
    monkeypatch.setattr(machine, "memory_gib", lambda: total_gib)
    monkeypatch.setattr(machine, "_swap_gib", lambda field: swap_gib)
    found = machine.memory(takes_gib)
    assert mark == ("ok" if found.good else "--" if found.optional else "BAD")
    assert found.good or ("takes 9.4 GiB at its peak" in found.cure and "cpu_smoke" in found.cure)


def test_a_campaign_is_measured_by_the_model_that_it_trains_here(monkeypatch):
    assert doctor.memory_taken_gib(load_recipe("cpu_smoke")) == machine.SMALL_PEAK_GIB
    assert doctor.memory_taken_gib(load_recipe("cpu_smollm2")) == machine.PEAK_GIB
    assert doctor.memory_taken_gib(load_recipe("cpu_smollm2", ["ray.device=gpu"])) is None
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 6.0)
    monkeypatch.setattr(machine, "_swap_gib", lambda field: 0.0)
    assert machine.free_memory(machine.SMALL_PEAK_GIB).good and not machine.free_memory(machine.PEAK_GIB).good


def test_a_run_is_told_of_too_little_memory_and_starts(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(doctor, "refuse_unable", lambda recipe: None)
    monkeypatch.setattr("workbench.campaign.report.runner.run_recipe", lambda *given: started.append(given) or 0)
    monkeypatch.setattr("workbench.campaign.report.sweep.run_sweep", lambda *given: started.append(given) or 0)
    monkeypatch.setattr(machine, "memory_gib", lambda: 3.5)
    assert ended("run", "cpu_smoke") == 0 and len(started) == 1
    assert capsys.readouterr().err.startswith("workbench: memory: 3.5 GiB")
    assert ended("sweep", "cpu_smoke", "train.steps=1,2") == 0 and len(started) == 2
    assert capsys.readouterr().err.count("workbench: memory: 3.5 GiB") == 1
    monkeypatch.setattr(machine, "memory_gib", lambda: 64.0)
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 1.5)
    monkeypatch.setattr(machine, "_swap_gib", lambda field: 0.0)
    assert "a small campaign takes 4 GiB" in doctor.memory_remark(load_recipe("cpu_smoke"))
    # What a campaign takes of GPUs, or of other machines, was not measured.
    assert doctor.memory_remark(load_recipe("cpu_smollm2", ["ray.device=gpu"])) == ""


def test_a_setting_without_effect_is_said_by_show_check_and_run(monkeypatch, capsys):
    given = ("cpu_smoke", "train.loss.constant_tokens=9")
    why = "no effect: train.loss.reduction is token"
    shown = printed(capsys, "recipe", "show", *given)
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("constant_tokens:")]
    assert line.endswith(f"# command line; {why}")
    assert f"train.loss.constant_tokens: {why}" in printed(capsys, "recipe", "check", *given).splitlines()
    monkeypatch.setattr(doctor, "refuse_unable", lambda recipe: None)
    monkeypatch.setattr("workbench.campaign.report.runner.run_recipe", lambda *_: 0)
    assert ended("run", *given) == 0
    assert f"workbench: train.loss.constant_tokens: {why}\n" in capsys.readouterr().err


def test_the_shipped_recipes_are_listed_with_a_whole_sentence_in_80_columns(capsys):
    lines = printed(capsys, "recipe", "list").splitlines()
    assert max(map(len, lines)) <= 80
    for name, purpose in shipped_recipes().items():
        assert any(line.startswith(f"{name} ") for line in lines), name
        assert purpose[-1] in ".?", purpose


def test_every_subcommand_has_a_first_sentence_that_is_shown_whole(capsys):
    for group in ("recipe", "models"):
        assert "..." not in printed(capsys, group, "--help").partition("Commands:")[2]


def test_a_folder_is_no_recipe_and_the_line_says_so(tmp_path, capsys):
    assert ended("run", str(tmp_path)) == 2
    assert f"No recipe file '{tmp_path}' (that is a folder)" in capsys.readouterr().err


def test_on_a_terminal_lines_break_between_words_and_hang(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["run", "cpu_smoke", "--dry-run"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith(" " * 13)], "continued lines hang below their text"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_no_fault(tmp_path, closed):
    shutil.copytree(recorded_run(), tmp_path / "run")
    command = f"{sys.executable} -m workbench ls {tmp_path} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "make room (df -h), then give the same command again."),
        (errno.EACCES, "another place, or the right to read and write this one."),
        (errno.ENOTDIR, "another place, or the right to read and write this one."),
        (errno.EISDIR, "put the file back that belongs there, or name another place."),
        (errno.ENAMETOOLONG, "a shorter name."),
    ],
)
def test_what_the_machine_says_of_a_file_is_one_line_with_the_next_step(monkeypatch, capsys, tmp_path, number, cure):
    def full(folder):
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr("workbench.campaign.report.listing.listing", full)
    with pytest.raises(SystemExit) as ended:
        main(["ls", str(tmp_path)])
    said = f"workbench: {tmp_path}: {os.strerror(number)}. Next: {cure}\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, said)


def test_a_sweep_where_nothing_can_be_written_is_refused_at_once(tmp_path, capsys):
    (tmp_path / "reports").touch()
    assert ended("sweep", "cpu_smoke", f"reports.dir={tmp_path / 'reports'}", "seed=1,2") == 2
    assert "reports cannot be written: Not a directory; set reports.dir" in capsys.readouterr().err


def test_asking_for_a_free_name_in_a_file_ends(tmp_path):
    (tmp_path / "reports").touch()
    with pytest.raises(FileExistsError):
        new_run_dir(tmp_path / "reports", "try", claim=True)


@pytest.mark.parametrize("user", [0, 1000])
def test_the_lab_opens_at_the_notebooks_and_for_root_in_a_container_too(monkeypatch, user):
    given: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "execv", lambda program, words: given.extend(words))
    main(["lab", "--no-browser"], standalone_mode=False)
    assert ("--allow-root" in given) == (user == 0)
    assert given[-1] == "--no-browser" and any(word.endswith("/lab/tree/notebooks") for word in given)


def test_a_run_and_a_rollout_are_described_and_the_list_is_json_for_programs(tmp_path, capsys):
    shutil.copytree(recorded_run(), tmp_path / "run")
    assert ended("inspect", str(tmp_path / "run")) == 0
    said = capsys.readouterr().out
    assert said.startswith("Run ") and "rollouts valid" in said
    recorded = runs.open(tmp_path / "run").rollouts
    rollout, rejected = recorded["rollout_id"][0], recorded.drop_nulls("cause")["rollout_id"].to_list()
    _, refused, header, *listed, following = said.splitlines()
    assert refused == "  refused requests: 4 in 4 rollouts: context_length_exceeded (4)"
    assert header.split() == ["rollout", "calls", "tokens", "reward", "state"] and len(listed) == recorded.height
    assert [line.split()[0] for line in listed[: len(rejected)]] == rejected
    assert listed[0].endswith("rejected: unresolved_parent") and "verified, trained in step 1" in listed[len(rejected)]
    assert following == f"Next: workbench inspect {tmp_path / 'run'} {rejected[0]}"
    assert ended("inspect", str(tmp_path / "run"), rollout) == 0
    assert rollout in capsys.readouterr().out
    assert ended("inspect", str(tmp_path / "run"), f"{rollout}0") == 1
    assert f"No calls of rollout '{rollout}0' here, did you mean {rollout}?" in capsys.readouterr().err
    (tmp_path / "run").rename(tmp_path / "my run")
    assert ended("inspect", str(tmp_path / "my run")) == 0
    assert capsys.readouterr().out.endswith(f"Next: workbench inspect '{tmp_path / 'my run'}' {rejected[0]}\n")
    assert ended("ls", "--json", str(tmp_path)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert orjson.loads(line)["status"] == "done" and "token_in_rate" in orjson.loads(line)


def test_of_many_rollouts_the_list_says_how_many_it_shows_and_those_without_a_receipt_come_early(tmp_path, capsys):
    stored = StoredRun(tmp_path / "long")
    stored.step(1, [["plain"] * 12, ["plain"] * 12])
    stored.play("long.9.0.0", 2, kind="plain")
    assert ended("inspect", str(stored.finish())) == 0
    _, _, first, *listed, showing, _ = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["long.9.0.0", "2"] and first.endswith("not finalised")
    assert len(listed) == 19 and showing == "Showing 20 of 25 rollouts, rejected ones first."


def test_an_unresolved_call_is_explained_in_words(tmp_path, capsys):
    run_dir = make_run(tmp_path / "stored", steps=1)
    assert ended("inspect", str(run_dir), "stored.1.1.0") == 0
    assert "history_edited" in capsys.readouterr().out


def test_corpora_models_and_a_sweep_are_run_by_their_commands(tmp_path, capsys, monkeypatch, tiny_model):
    assert ended("conformance", str(Path(__file__).parents[1] / "conformance" / "routes.jsonl")) == 0
    assert "routes" in capsys.readouterr().out
    assert ended("models", "build", "tiny") == 0
    assert capsys.readouterr().out.strip() == str(tiny_model)
    begun = []
    monkeypatch.setattr(
        "workbench.campaign.report.sweep.run_sweep", lambda planned, recipes: begun.append(recipes) or 1
    )
    assert ended("sweep", "cpu_smoke", "train.steps=2,3", f"reports.dir={tmp_path}") == 1
    assert [recipe.train.steps for recipe in begun[0]] == [2, 3]
    monkeypatch.setattr("workbench.campaign.report.sweep.write_index", lambda folder: folder / "index.ipynb")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sweep.json").write_text("{}")
    assert ended("report", str(tmp_path / "a")) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a" / "index.ipynb")


def test_a_stopped_run_is_gone_on_with_by_its_command(tmp_path, monkeypatch):
    run_dir = Path(shutil.copytree(recorded_run(), tmp_path / "run"))
    asked = []
    monkeypatch.setattr("workbench.campaign.machines.doctor.refuse_unable", lambda recipe: None)
    monkeypatch.setattr(
        "workbench.campaign.report.runner.resume_run", lambda recipe, run: asked.append((recipe, run)) or 3
    )
    assert ended("resume", str(run_dir), "train.steps=99") == 3
    assert [(recipe.train.steps, run) for recipe, run in asked] == [(99, run_dir)]


@pytest.mark.parametrize("command", [("resume",), ("resume", "train.steps=8"), ("report",)])
def test_nothing_is_written_into_a_run_that_came_with_the_package(command, capsys):
    there = sorted(recorded_run().rglob("*"))
    verb, *overrides = command
    assert ended(verb, str(recorded_run()), *overrides) == 2
    said = capsys.readouterr().err
    assert "came with the package, and nothing is written into that. Next: " in said
    assert f"workbench resume {recorded_run()}" not in said
    assert sorted(recorded_run().rglob("*")) == there


def test_a_machine_that_lacks_something_ends_doctor_with_2(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda recipe, quick: [machine.Finding("memory", "1 GiB", "buy some")])
    assert ended("doctor", "cpu_smoke") == 2
    assert capsys.readouterr().out == "BAD memory                 1 GiB; buy some\n"


def test_rollouts_in_healthy_parts_are_inspected_beside_a_damaged_one(tmp_path, capsys):
    run = make_run(tmp_path / "cut", steps=1)
    (run / "rows" / "g00000.parquet").write_bytes(b"PAR1")
    named = f"{run}/rows/g00000.parquet is not a readable part of table rows: "
    assert ended("inspect", str(run)) == 0
    sentence, told, _, *listed, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed if line.endswith("cannot be read: see above")][:1] == ["cut.0.0.0"]
    assert not any(line.endswith("not finalised") for line in listed)
    assert "rows/g00000.parquet" not in sentence  # said once
    assert told.startswith(f"  left out: {named}") and f"Next: workbench verify {run}" in told
    assert ended("inspect", str(run), "cut.1.0.0") == 0
    assert "verified, trained in step 1" in capsys.readouterr().out
    assert ended("inspect", str(run), "cut.0.0.0") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"workbench: {named}") and f"Next: workbench verify {run}" in line
    assert ended("inspect", str(run), "cut.9.0.0") == 1


def test_a_rollout_whose_step_cannot_be_read_is_not_said_to_be_untrained(tmp_path, capsys):
    run = make_run(tmp_path / "cut", steps=1)
    (run / "train" / "step-1.parquet").write_bytes(b"PAR1")
    assert ended("inspect", str(run), "cut.0.0.0") == 0
    said = capsys.readouterr().out
    assert ended("inspect", str(run)) == 0
    assert "verified, whether a step trained it is not known: see above" in capsys.readouterr().out
    assert f"verified, whether a step trained it is not known: {run}/train/step-1.parquet is not a readable" in said
    assert "on the verified chain\n" in said and "not trained" not in said


def test_a_checkout_without_runs_is_told_what_to_do_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ended("ls") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("workbench: No runs in reports. Next: workbench run ") and len(line) <= 80


def test_a_copied_run_is_listed_under_the_folder_that_commands_take(tmp_path, capsys):
    for place in ("first", "kept/second", "kept/first"):
        shutil.copytree(recorded_run(), tmp_path / place)
    assert ended("ls", str(tmp_path)) == 0
    names = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert names == {f"{tmp_path.name}/first (demo)", "second (demo)", "kept/first (demo)"}


def test_runs_are_listed_from_any_folder_of_a_checkout(tmp_path, capsys, monkeypatch):
    shutil.copytree(recorded_run(), tmp_path / "reports" / "demo")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    assert ended("ls") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("demo ")
