"""State: what the pumps of one campaign share. One event loop reads and writes it; nothing here waits or decides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from workbench.campaign.fleet import Fleet
from workbench.campaign.supply import Supply
from workbench.campaign.sync import Weights
from workbench.campaign.watch import Watch
from workbench.config import Recipe
from workbench.runs.writer import RunWriter
from workbench.train.buffer import ReplayBuffer


@dataclass
class CampaignState:
    """One campaign between its start and its end."""

    recipe: Recipe
    fleet: Fleet
    writer: RunWriter
    watch: Watch
    weights: Weights
    supply: Supply
    replaced: int = 0
    """Groups that left by their typed exit and were sampled afresh."""
    evicted: int = 0
    """Groups that were given up as too stale; others were sampled in their place."""
    rejections: Counter[str] = field(default_factory=Counter)
    """Cause -> rollouts that became placeholders."""

    @classmethod
    def begin(cls, recipe: Recipe, fleet: Fleet, writer: RunWriter) -> CampaignState:
        """The state of a campaign that has sampled and trained nothing yet."""
        watch = Watch(recipe.rollouts.stall_timeout_s)
        supply = Supply(ReplayBuffer.of(recipe.train))
        return cls(recipe, fleet, writer, watch, Weights(recipe, fleet, writer, watch), supply)
