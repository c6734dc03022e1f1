"""Recipe, training: the sections that say how rewards become steps, and which steps are kept and proved."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.recipe_fields import Dtype, Positive, Seconds, Section

#: Keys of other trainers and why they are no choice here; each is refused with this sentence.
NOT_OFFERED = {
    "train.tensor_parallel": "the trainer is spread with FSDP2 alone, which splits every weight over all ranks",
    "train.pipeline_parallel": "the trainer is spread with FSDP2 alone, which splits every weight over all ranks",
    "train.context_parallel": "a row is never split over ranks: its log-probs are proved on the whole row",
    "train.expert_parallel": "the trainer is spread with FSDP2 alone, experts like every other weight",
    "engine.pipeline_parallel": "an engine is one node's: its weights are split within a node alone",
}
INSTEAD = {
    "train": "train.ranks (any number), train.ranks_per_node",
    "engine": "engine.tensor_parallel, engine.workers",
}


class Advantage(Section):
    name: str = "grpo"
    """Advantage estimator: grpo, rloo, dr_grpo, reinforce_plus_plus, reinforce_plus_plus-baseline or gdpo, which takes
    the environment's reward components one by one; see `workbench.train.estimators`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The estimator's own settings, such as `baseline: leave_one_out`."""
    shuffle: bool = False
    """Hand each group's advantages out to its rollouts at random: a control, whose reward must stay where it is."""


class Loss(Section):
    """The clipped policy-gradient loss; its clip range is `train.clip_low` and `train.clip_high`."""

    reduction: Literal["token", "sequence", "constant"] = "token"
    """Average over all tokens of the step; over each rollout's tokens and then over rollouts; or each rollout's sum
    divided by `constant_tokens`, then over rollouts (Dr. GRPO)."""
    constant_tokens: Positive | None = None
    """What a rollout's sum is divided by with `reduction: constant`; null takes `model.max_model_len`."""
    tis_cap: Annotated[float, Field(gt=0.0)] | None = None
    """Truncated importance sampling: weigh each token with exp(trainer − sampler log-prob), at most this, and measure
    the ratio against the trainer itself, where it is 1 and is never clipped. null measures the ratio against the
    sampler, without a weight."""
    max_mult_prob_error: Annotated[float, Field(gt=1.0)] | None = None
    """Rollouts whose mean exp(|trainer − sampler log-prob|) is above this leave the loss; their reward stays in the
    group's baseline. null keeps all."""


class Kl(Section):
    """A penalty that keeps the policy near the model it started from."""

    coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the penalty. Above 0 the trainer holds a frozen copy of the model (SmolLM2-135M: 0.54 GB in float32,
    0.27 in bfloat16) and runs it once more a step."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = −d, k2 = d²/2, k3 = exp(d) − 1 − d, where d is reference − policy log-prob of a sampled token. k1 is for
    measuring, with any coefficient above 0: as a penalty its gradient averages to nothing."""


class OffPolicy(Section):
    """What happens to tokens that were sampled from weights much older than those being trained."""

    policy: Literal["allow", "mask_old", "reject"] = "allow"
    """Train them like the others; leave them out of the loss; or take the vote from every rollout that has any."""
    max_lag: Annotated[int, Field(ge=0)] | None = None
    """Versions a token may lag before it counts as old; null takes `train.max_staleness`, more than which a token lags
    only with a sampler that lets groups lie about (`weight_fifo`)."""


class Sampler(Section):
    name: str = "in_order"
    """Which finished groups the next step takes. `in_order`: as they were started, so that a run is repeatable;
    `weight_fifo`: whatever is ready, oldest weights first; `windowed`: that, and groups that lag more than
    `train.max_staleness` versions behind are evicted and replaced; `package.module:Class`: one of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The sampler's own settings, such as `max_staleness: 0` of `windowed`."""


class RouterReplay(Section):
    """Training with the experts that sampled a token: without it the trainer's routers, whose rounding differs from the
    engine's, choose others for some tokens, and the ratio is about another network."""

    mode: Literal["none", "direct", "deferred"] = "none"
    """`direct`: routes ride in the training rows; `deferred`: rows bring a plan, and the trainer reads the routes from
    the run store when it takes the step. Both train the same. Needs `token_capture.routes`."""
    missing: Literal["sentinel", "reject"] = "sentinel"
    """What becomes of a rollout with a call whose routes are missing or do not fit: its tokens take the trainer's own
    routers there (counted in `route_coverage`), or the rollout loses its vote. A digest that does not fit always does
    that."""


class Train(Section):
    steps: Positive = 6
    """Optimiser steps; the weight version after the last one is this number."""
    groups_per_step: Positive = 4
    """Groups in one optimiser step."""
    max_empty_steps: Positive = 3
    """Steps that may follow one another without a valid row, every rollout being rejected. With as many the campaign
    ends and says what rejected most of them; what was at fault once mended, it can be resumed."""
    rollouts_per_group: Annotated[int, Field(ge=2)] = 4
    """Rollouts of one task, compared with each other. One alone has no baseline, so at least 2."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-5
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: Positive = 1024
    """Padded tokens in one forward pass; bounds the trainer's memory (SmolLM2-135M: 4.6 GB; with 2048 6.2 GB). A row
    that is longer runs alone and recomputes its layers in the backward pass instead of keeping their activations."""
    dtype: Dtype = "float32"
    """Number type of the trainer's passes; the weights that are updated are float32 either way. float32 shows the
    smaller delta to the sampler; bfloat16 needs less memory."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Torch threads of the trainer, shared by its ranks; 0 means all processors of this machine."""
    ranks: Positive = 1
    """Processes that the trainer is spread over (FSDP2), each an actor with a logical CPU of its own. Checkpoints are
    whole: a run may go on with another number of ranks."""
    ranks_per_node: Positive | None = None
    """Ranks that stand together, as many on each node that has any. null: wherever `ray.placement` puts each."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """How many versions a row may lag behind the weights it trains. 0 never overlaps rollouts and training."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is clipped below 1 − this."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """The ratio is clipped above 1 + this."""
    advantage: Advantage = Field(default_factory=Advantage)
    """How rewards become advantages."""
    loss: Loss = Field(default_factory=Loss)
    """What is averaged, corrected and left out."""
    kl: Kl = Field(default_factory=Kl)
    """Penalty for leaving the starting model."""
    off_policy: OffPolicy = Field(default_factory=OffPolicy)
    """Tokens of old weights."""
    router_replay: RouterReplay = Field(default_factory=RouterReplay)
    """Replay of a mixture of experts' routes."""
    sampler: Sampler = Field(default_factory=Sampler)
    """Which of the finished groups the next step takes."""
    buffer_groups: Positive | None = None
    """Groups that may be sampled or wait for the trainer at once; further ones wait for room. At least what the sampler
    needs to fill a step. null: room for the step being trained, the next one, and each that may run ahead."""
    timeout_s: Seconds = 600.0
    """How long one optimiser step may take."""
    sync_timeout_s: Seconds = 120.0
    """How long each part of a weight sync may take: publishing, loading, the proof; and until live calls have ended."""
    live_calls: Literal["finish", "straddle"] = "finish"
    """What a weight sync does with calls that run: wait until they finish; or pause them and let them go on with the
    new weights, where each row says which of its tokens came from which. The second never waits for a long answer; with
    `max_staleness: 0` no call runs then anyway."""


class Checkpoint(Section):
    every: Annotated[int, Field(ge=0)] = 5
    """Steps between two checkpoints in `checkpoints/` (float32 weights and optimiser state: 12 bytes a parameter); the
    last step always gets one. 0: none. A run that was stopped goes on without one, too: it takes the steps since the
    last checkpoint again from their stored rows, without sampling anything."""
    keep: Positive = 2
    """Checkpoints that stay; older ones are removed."""


class Proof(Section):
    max_mean_abs_delta: Annotated[float, Field(gt=0.0)] = 0.12
    """Largest mean |log-prob of sampler − trainer| on the fixed prompt after a weight sync. A bf16 engine against a
    float32 trainer shows about 0.05 on that prompt; one with an output head of another model 0.75."""
