"""`python -m workbench`: the command line, as `workbench`."""

from workbench.campaign.cli import main

main(prog_name="workbench")
