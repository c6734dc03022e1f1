"""Inspect: look at a run, a rollout or a foreign ledger in a notebook, with a kernel or without.

Inspectors take a run (or its frames) and give objects that show themselves as a picture and a text without script:
`PrefixChain`, `TokenStrip`, `PoisonTable`, `LogprobDelta`, `CaptureRate`, `RewardCurve`. `snapshot()` is that form.
"""

from workbench.inspect.choose import telling_rollout
from workbench.inspect.figures import CaptureRate, RewardCurve
from workbench.inspect.logprobs import LogprobDelta
from workbench.inspect.prefix_chain import PrefixChain
from workbench.inspect.snapshot import Snapshot
from workbench.inspect.tables import PoisonTable
from workbench.inspect.token_strip import TokenStrip

__all__ = [
    "CaptureRate",
    "LogprobDelta",
    "PoisonTable",
    "PrefixChain",
    "RewardCurve",
    "Snapshot",
    "TokenStrip",
    "telling_rollout",
]
