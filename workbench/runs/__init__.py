"""The run store: what a campaign leaves on disk, and how to read it.

`open(path)` gives a run as Polars frames, `open_ledger(path)` a foreign NeMo Gym ledger as the same frames, `open_any`
whichever of them a directory holds. Columns are declared in `schema`, written by `writer`, read by `reader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.runs.foreign import ForeignLedger, open_any, open_ledger
    from workbench.runs.reader import Run, open
    from workbench.runs.vocabulary import Vocabulary, load_vocabulary

__all__ = ["ForeignLedger", "Run", "Vocabulary", "load_vocabulary", "open", "open_any", "open_ledger"]

_HOMES = {
    "ForeignLedger": "foreign",
    "Run": "reader",
    "Vocabulary": "vocabulary",
    "load_vocabulary": "vocabulary",
    "open": "reader",
    "open_any": "foreign",
    "open_ledger": "foreign",
}


def __getattr__(name: str) -> Any:
    # The writer is imported on a training machine's hot path; Polars comes only with reading.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
