"""Demo: a small recorded run that comes with the package, for the notebooks and the first five minutes.

It was cut out of a real campaign with `python -m workbench.campaign.record_demo RUN` and is an ordinary run directory.
"""

from __future__ import annotations

from pathlib import Path

from workbench.errors import RunStoreError

_RUN = Path(__file__).resolve().parent / "run"


def recorded_run() -> Path:
    """The directory of the recorded run. Raises RunStoreError where the installation lacks it."""
    if not (_RUN / "status.json").is_file():
        raise RunStoreError(
            f"No recorded run in {_RUN}; record one: python -m workbench.campaign.record_demo reports/RUN"
        )
    return _RUN
