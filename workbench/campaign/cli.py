"""Command line: `workbench`, where its commands are put together and every error becomes a line and an exit code.

`--help` answers in a fraction of a second because torch, Ray and plotly are imported inside the commands. Every
deliberate error of the package is one line on stderr, `workbench: …`, and its `exit_code`; WORKBENCH_DEBUG=1 shows the
traceback instead. Results go to stdout, so that they can be piped. Not here: the commands themselves (commands).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any

import click

from workbench import __version__
from workbench.campaign.commands import looking, preparing, running
from workbench.campaign.commands.given import say
from workbench.errors import WorkbenchError
from workbench.full_disk import is_full

NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
RIGHTS = "another place, or the right to read and write this one"
CURES = {
    errno.EISDIR: "put the file back that belongs there, or name another place",
    errno.ENAMETOOLONG: "a shorter name",
    errno.ELOOP: "another place, or a link that does not lead back to itself",
}
_COMMANDS = (
    running.run,
    running.serve_recipe,
    running.receipt,
    running.resume,
    running.sweep,
    looking.list_runs,
    looking.report,
    looking.inspect,
    looking.verify,
    looking.conformance,
    preparing.recipe,
    preparing.doctor,
    preparing.lab,
    preparing.models,
)


def _takes_overrides(command: click.Command) -> bool:
    return any(parameter.name == "overrides" for parameter in command.params)


class _Workbench(click.Group):
    """The command group, with the one place where errors become a line and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by whoever started it, as by `>&-`
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process lives
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except WorkbenchError as error:
            if os.environ.get("WORKBENCH_DEBUG") == "1":
                raise
            say(f"workbench: {' '.join(str(error).split())}", 2, err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            # The machine's word about a file of the user's; anything else would be a fault of ours.
            if not (is_full(error) or error.errno in NOT_OURS) or os.environ.get("WORKBENCH_DEBUG") == "1":
                raise
            full = "make room (df -h), then give the same command again"
            cure = full if is_full(error) else CURES.get(error.errno or 0, RIGHTS)
            say(f"workbench: {error.filename or 'a file'}: {error.strerror}. Next: {cure}.", 2, err=True)
            sys.exit(1)
        except click.ClickException as error:
            error.show()
            if isinstance(error, click.NoSuchOption) and error.ctx and _takes_overrides(error.ctx.command):
                click.echo("A recipe's values are given without dashes, as in train.steps=2.", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("workbench: interrupted", err=True)
            sys.exit(128 + signal.SIGINT)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a day's work, not of the alphabet


@click.group(cls=_Workbench, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="workbench")
def main() -> None:
    """Token-exact GRPO on language-model agents: run campaigns, look into them, check them."""


for _command in _COMMANDS:
    main.add_command(_command)

if __name__ == "__main__":
    main(prog_name="workbench")
