"""Runs one small notebook through the runner in a process of its own, as the command line would.

python runner_case.py RUN_DIR NOTEBOOK [GRACE_S]
"""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.campaign.report import execution, runner

if __name__ == "__main__":
    run_dir, notebook = Path(sys.argv[1]), Path(sys.argv[2])
    if len(sys.argv) > 3:
        execution.STOP_GRACE_S = float(sys.argv[3])
    result = runner._execute_live(run_dir, {"run_dir": str(run_dir)}, notebook)
    sys.exit(result.exit_code)
