"""Demo: small recordings that come with the package, for the notebooks and the first five minutes.

`run/` was cut out of a real campaign with `python -m workbench.campaign.record_demo RUN` and is an ordinary run
directory. `ledger/` holds seven rollouts' ledgers written by NeMo Gym 0.7's own implementation: a rewritten history, a
sub-agent, a compaction, retries in the middle and at the end, an overflow, a failed staging.
"""

from __future__ import annotations

from pathlib import Path

from workbench.errors import RunStoreError

_HERE = Path(__file__).resolve().parent
_RUN, _LEDGER = _HERE / "run", _HERE / "ledger"


def recorded_run() -> Path:
    """The directory of the recorded run. Raises RunStoreError where the installation lacks it."""
    if not (_RUN / "status.json").is_file():
        raise RunStoreError(
            f"No recorded run in {_RUN}; record one: python -m workbench.campaign.record_demo reports/RUN"
        )
    return _RUN


def recorded_ledger() -> Path:
    """The directory of the foreign ledgers. Raises RunStoreError where the installation lacks it."""
    if not any(_LEDGER.glob("*.lineage.jsonl")):
        raise RunStoreError(f"No recorded ledger in {_LEDGER}; install the package again")
    return _LEDGER
