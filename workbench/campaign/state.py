"""State: what the pumps of one campaign share. One event loop reads and writes it; nothing here waits or decides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from workbench import dataplane
from workbench.campaign.fleet import Fleet
from workbench.campaign.supply import Supply
from workbench.campaign.sync import Weights
from workbench.campaign.watch import Watch
from workbench.config import Recipe
from workbench.finalizer.metrics import GroupMetrics
from workbench.finalizer.sweeper import Sweeper
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
    sweeper: Sweeper
    replaced: int = 0
    """Groups that left by their typed exit and were sampled afresh."""
    dropped_in_a_row: int = 0
    """How many of them since the last one that became rows."""
    evicted: int = 0
    """Groups that were given up as too stale; others were sampled in their place."""
    rejections: Counter[str] = field(default_factory=Counter)
    """Cause -> rollouts that became placeholders."""
    reasons: Counter[str] = field(default_factory=Counter)
    """What was found, in a sentence -> how many of them since this process began; for who looks on meanwhile."""
    counts: GroupMetrics = field(default_factory=GroupMetrics)
    """Of all finished groups, trained or not yet: what the run's token_in rates are of."""

    @classmethod
    def begin(cls, recipe: Recipe, fleet: Fleet, writer: RunWriter) -> CampaignState:
        """The state of a campaign that has sampled and trained nothing yet."""
        watch = Watch(recipe.rollouts.stall_timeout_s)
        supply = Supply(ReplayBuffer.of(recipe.train))
        plane = recipe.data_plane
        clear_s = plane.send_recv_timeout_s * plane.max_attempts  # how long TransferQueue itself tries
        sweeper = Sweeper(
            {dataplane.STAGING: supply.staging, dataplane.TRAIN: supply.training},
            deadline_s=clear_s,
            every_s=plane.sweep_every_s,
            grace_s=clear_s,
        )
        return cls(recipe, fleet, writer, watch, Weights(recipe, fleet, writer, watch), supply, sweeper)
