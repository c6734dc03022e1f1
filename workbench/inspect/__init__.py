"""Inspect: look at a run, a rollout or a foreign ledger in a notebook, with a kernel or without.

Inspectors take a run (or its frames) and give objects that show themselves: `PrefixChain`, `TokenStrip`, `PoisonTable`,
`LogprobDelta`, `RowDiff`, `CampaignBoard`, `CaptureRate`, `Optimisation`, `RewardCurve`, `SweepView`. `snapshot()` is
a picture and a text without script, `live` (of the first six) a widget over the same object; `set_mode` says which a
notebook shows.
`look(PrefixChain, run, id)` gives the view, or one sentence where the run does not hold it (yet).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.inspect.mode import display_mode, set_mode

if TYPE_CHECKING:
    from workbench.inspect.board import CampaignBoard
    from workbench.inspect.choose import look, siblings, telling_rollout, trained_group, verified_rollout
    from workbench.inspect.engagement import Engagement
    from workbench.inspect.figures import CaptureRate, RewardCurve
    from workbench.inspect.logprobs import LogprobDelta
    from workbench.inspect.optimisation import Optimisation
    from workbench.inspect.prefix_chain import PrefixChain
    from workbench.inspect.row_diff import RowDiff
    from workbench.inspect.snapshot import Snapshot
    from workbench.inspect.sweep_view import SweepView
    from workbench.inspect.tables import PoisonTable
    from workbench.inspect.token_strip import TokenStrip

__all__ = [
    "CampaignBoard",
    "CaptureRate",
    "Engagement",
    "LogprobDelta",
    "Optimisation",
    "PoisonTable",
    "PrefixChain",
    "RewardCurve",
    "RouterAgreement",
    "RowDiff",
    "Snapshot",
    "SweepView",
    "TokenStrip",
    "display_mode",
    "echo_pairs",
    "look",
    "set_mode",
    "siblings",
    "steps_side_by_side",
    "telling_rollout",
    "trained_group",
    "verified_rollout",
]

_HOMES = {
    "CampaignBoard": "board",
    "CaptureRate": "figures",
    "Engagement": "engagement",
    "LogprobDelta": "logprobs",
    "Optimisation": "optimisation",
    "PoisonTable": "tables",
    "PrefixChain": "prefix_chain",
    "RewardCurve": "figures",
    "RouterAgreement": "router_agreement",
    "RowDiff": "row_diff",
    "Snapshot": "snapshot",
    "SweepView": "sweep_view",
    "TokenStrip": "token_strip",
    "echo_pairs": "echo_arms",
    "look": "choose",
    "siblings": "choose",
    "steps_side_by_side": "echo_arms",
    "telling_rollout": "choose",
    "trained_group": "choose",
    "verified_rollout": "choose",
}


def __getattr__(name: str) -> Any:
    # The display mode is asked for where nothing is drawn; matplotlib comes only with an inspector.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
