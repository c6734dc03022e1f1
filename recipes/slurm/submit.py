"""Submit a campaign to Slurm: a Ray head on the job's first node, a Ray worker on each other, the campaign by the head.

    python recipes/slurm/submit.py nano_swe_6n --gpus-per-node 8 --walltime 04:00:00 --dry-run
    python recipes/slurm/submit.py ray_2node --nodes 2 --walltime 00:30:00 train.steps=4
    python recipes/slurm/submit.py nano_swe_6n --gpus-per-node 8 --resume reports/nano_swe_6n-1

Run it with the Python of the environment that every node sees. The recipe is checked here, so that a job does not wait
in a queue for a wrong key. `--dry-run` prints the command and submits nothing. Without `--qos`, `--partition` or
`--account` Slurm's own defaults hold. Two minutes before the walltime ends the campaign is told to stop; `--resume`
goes on with it.
Not here: what the job does on its nodes (`campaign.sbatch`).
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.campaign.commands.given import checked_recipe
from workbench.campaign.machines.placement import bundles
from workbench.errors import WorkbenchError

JOB = Path(__file__).resolve().with_name("campaign.sbatch")
STOP_BEFORE_S = 120


def _number(least: int) -> Callable[[str], int]:
    def number(given: str) -> int:
        if not given.isdecimal() or int(given) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number ≥ {least}, got {given!r}")
        return int(given)

    return number


def _walltime(given: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d{2}:\d{2}", given):
        raise argparse.ArgumentTypeError(f"expected HH:MM:SS or D-HH:MM:SS, got {given!r}")
    return given


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: Slurm's, or 2 for what is refused before it is asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", help="a YAML file or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--nodes", type=_number(1), help="default: as many as the recipe's GPUs fill")
    parser.add_argument("--gpus-per-node", type=_number(0), default=0, help="of the machines; 0: none are asked for")
    parser.add_argument(
        "--cpus-per-node", type=_number(1), help="processors, and Ray's logical CPUs; default: all of a node"
    )
    parser.add_argument(
        "--walltime", type=_walltime, default="01:00:00", help="HH:MM:SS or D-HH:MM:SS; default: %(default)s"
    )
    parser.add_argument("--qos", help="quality of service; default: none is named")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--port", type=int, default=6379, help="of the Ray head; default: %(default)s")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run instead of beginning one")
    parser.add_argument("--dry-run", action="store_true", help="print the command and submit nothing")
    asked = parser.parse_intermixed_args(arguments)
    try:
        recipe = checked_recipe(asked.recipe, (*asked.overrides, f"ray.address=localhost:{asked.port}"))
    except WorkbenchError as error:
        print(f"submit: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    gpus = sum(int(bundle.resources.get("GPU", 0)) for bundle in bundles(recipe))
    if gpus and not asked.gpus_per_node:
        print(
            f"submit: --gpus-per-node: {recipe.name} takes {gpus} GPUs; expected how many a node has", file=sys.stderr
        )
        return 2
    nodes = asked.nodes or (math.ceil(gpus / asked.gpus_per_node) if gpus else 1)
    if nodes * asked.gpus_per_node < gpus:
        print(f"submit: --nodes: {recipe.name} takes {gpus} GPUs; {nodes} nodes have fewer", file=sys.stderr)
        return 2
    command = sbatch(asked, recipe.name, nodes)
    print(shlex.join(command), flush=True)
    if asked.dry_run:
        return 0
    if shutil.which(command[0]) is None:
        print("submit: no sbatch on this machine; run this where Slurm is, or add --dry-run", file=sys.stderr)
        return 2
    return subprocess.run(command, check=False).returncode


def sbatch(asked: argparse.Namespace, name: str, nodes: int) -> list[str]:
    """The command that submits the job."""
    what = ["resume", asked.resume] if asked.resume else ["run", asked.recipe]
    options = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "exclusive": None if asked.cpus_per_node else "",
        "cpus-per-task": asked.cpus_per_node,
        "gpus-per-node": asked.gpus_per_node or None,
        "time": asked.walltime,
        "qos": asked.qos,
        "partition": asked.partition,
        "account": asked.account,
        # To the job's own script alone; it hands it to the campaign, which closes its records.
        "signal": f"B:TERM@{STOP_BEFORE_S}",
        "export": f"ALL,WORKBENCH_PYTHON={sys.executable},WORKBENCH_RAY_PORT={asked.port}",
    }
    given = [f"--{key}={value}" if value != "" else f"--{key}" for key, value in options.items() if value is not None]
    return ["sbatch", *given, str(JOB), *what, *asked.overrides]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
