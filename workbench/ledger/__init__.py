"""Ledger: the token-free custody record of rollouts, and the trajectory that it proves.

`LedgerStore` keeps the rows; `attribute_terminal` and `select_terminal` find the call that ends a trajectory;
`assemble_receipt` turns a closed rollout into what the verifier takes; `diagnose_drift` says why a request continued
nothing. Needs `workbench.wire` alone.
"""

from workbench.ledger.attribution import Attribution, attribute_terminal
from workbench.ledger.drift import Drift, diagnose_drift
from workbench.ledger.heuristic import Selection, select_terminal
from workbench.ledger.items import CallItems
from workbench.ledger.receipts import Terminal, assemble_receipt, choose_terminal
from workbench.ledger.resolve import Resolution
from workbench.ledger.store import Admitted, LedgerStore

__all__ = [
    "Admitted",
    "Attribution",
    "CallItems",
    "Drift",
    "LedgerStore",
    "Resolution",
    "Selection",
    "Terminal",
    "assemble_receipt",
    "attribute_terminal",
    "choose_terminal",
    "diagnose_drift",
    "select_terminal",
]
