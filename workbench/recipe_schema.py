"""Recipe schema: every setting of a campaign, typed, bounded and documented under its field.

One class a section; `Recipe` is the whole tree. A recipe file names only what differs from the defaults here;
`workbench.config.load_recipe` reads, merges and validates it. Types are strict: a quoted number is not a number.
`???` marks what a recipe must fill. Units stand in the names (`_s`, `_gib`, `_bytes`, `_tokens`).

The training half is `workbench.recipe_training`; what a value left open becomes is `campaign.machines.derived`.
Not here: inheritance and error texts (`workbench.config`), secrets (they come from the environment, and no field can
hold one), what a task's own options mean (the environment checks `environment.options` itself).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from workbench.recipe_fields import MISSING, RAY_ADDRESS, RUN_NAME, Dtype, Fraction, Port, Positive, Seconds, Section
from workbench.recipe_training import Checkpoint, Proof, Train

__all__ = ["MISSING", "RUN_NAME", "Recipe", "Section"]


class Model(Section):
    path: str = MISSING
    """A name that `workbench models build` knows (`smollm2-135m`, `tiny`, `tiny-moe`) or a Hugging Face directory."""
    dtype: Dtype = "bfloat16"
    """Number type of the engine's weights. float32 is for exactness tests: a third slower at best."""
    max_model_len: Annotated[int, Field(ge=64)] = 1024
    """Context window in tokens, prompt and answer together."""
    tool_call_parser: str | None = None
    """vLLM's parser that reads tool calls out of this model's text (`hermes`, `qwen3_xml`, …). null serves what the
    model says as text, unless an agent asks for `tool_choice="required"` or for one tool."""
    reasoning_parser: str | None = None
    """vLLM's parser that takes reasoning out of this model's text (`qwen3`, `deepseek_r1`, …). null leaves it in."""


class TokenCapture(Section):
    enabled: bool = False
    """Stage every call's exact tokens. Off is the token-echo arm, the baseline of every comparison."""
    sink_timeout_s: Seconds = 10.0
    """How long a staged write may take. Longer is a capture failure of that call; its answer is served all the same."""
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Memory for recent calls' token ids in the worker. 0 reads every parent back from TransferQueue."""
    routes: bool = False
    """Also stage which experts each token went to, of a mixture of experts. Refused for a model without any."""


class Sampling(Section):
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """What the policy samples with; the trainer divides logits by the same number."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1.0 is off, and all that is taken, by `workbench serve` too: a trainer scores all tokens, not
    the truncated set that was sampled from."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0 is off, and all that is taken, for the same reason."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Drop tokens less likely than this share of the most likely one; 0.0 is off, and all that is taken, for the same
    reason."""
    max_tokens: Positive = 64
    """The most tokens that one call may sample."""
    seed_each_call: bool = False
    """Sample every call with a seed of its own, made of `seed`, the rollout's place and the conversation so far. It is
    the same whatever else runs, and in both arms. A request that is sent again samples the same again."""


class Engine(Section):
    kind: Literal["vllm", "scripted"] = "vllm"
    """`scripted` replays given ids and log-probs through the same capture; for tests."""
    max_num_seqs: Positive = 32
    """Calls that the engine runs at once."""
    kv_cache_gib: Annotated[float, Field(gt=0.0)] = 1.0
    """Memory for the KV cache. On a CPU vLLM takes whole gibibytes: it is rounded up."""
    threads: Annotated[int, Field(ge=0)] = 0
    """OpenMP threads of the engine; 0 means all processors of this machine."""
    start_timeout_s: Seconds = 240.0
    """How long until the engine must answer its health route, and as long until the trainer has loaded its model and
    every finalizer is up: they start at the same time."""
    workers: Positive = 1
    """Policy workers: engines with the same weights, each an actor of its own. All calls of a rollout go to one of
    them, which has its token ids in memory. The threads and the KV cache of this section are each one's."""
    tensor_parallel: Positive = 1
    """Processes that one engine's weights are split over, on GPUs one GPU each. Must divide the model's heads."""
    enforce_eager: bool = True
    """Run the model uncompiled. On a CPU compiling costs minutes and gains little; on GPUs false is faster."""
    port: Port = 0
    """Port of the worker's HTTP server; 0 lets the system choose, and is the only choice with several workers."""
    script_path: str | None = None
    """JSONL script of the scripted engine; null for a real one."""


class Gateway(Section):
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback opens the policy to the network."""
    port: Port = 0
    """Port to listen on; 0 lets the system choose."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the port and the ledger. More than one where hundreds of agents call at once."""
    control_open: bool = False
    """Whether the control plane (freeze, manifests, receipts) answers other machines too, not only its own."""
    request_timeout_s: Seconds = 120.0
    """How long one agent request may take, the engine's work included."""
    max_body_bytes: Positive = 16 * 2**20
    """Largest request body."""
    client_timeout_s: Seconds = 30.0
    """How long a client may take to send a request, and how long it may leave an answer unread."""


class DataPlane(Section):
    storage_units: Positive = 2
    """TransferQueue storage actors. Each needs one logical CPU of Ray, and the controller one more."""
    storage_units_per_node: Positive | None = None
    """As many storage actors on every node of the Ray cluster, in place of `storage_units`. null: `storage_units` in
    all, dealt out to the nodes in turn."""
    send_recv_timeout_s: Seconds = 20.0
    """One attempt against a storage unit. TransferQueue's default, 200 s, hides a dead one for ten minutes."""
    max_attempts: Positive = 2
    """Attempts before a storage unit counts as lost."""
    sweep_every_s: Seconds = 10.0
    """How often rows are looked for that nobody will fetch any more. They are cleared once they have lain about for
    `send_recv_timeout_s` × `max_attempts`, so that no clear of theirs can still be at work."""


class RayCluster(Section):
    """Where the actors run; `docs/cluster.md` says what a cluster must offer."""

    address: Annotated[str, Field(pattern=RAY_ADDRESS)] = "local"
    """`local` starts a Ray of its own; `auto` or host:port joins a running cluster, one of whose nodes this machine
    must be."""
    num_cpus: Positive = 8
    """Logical CPUs of a local Ray: slots for actors, not processors. Ignored when joining a cluster."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What engines and trainer compute on. `gpu`: every process of an engine and every trainer rank takes one GPU."""
    placement: Literal["pack", "spread"] = "pack"
    """All actors on as few nodes as hold them; or of each kind (workers, trainer ranks, finalizers) one a node as far
    as there are nodes."""
    placement_timeout_s: Seconds = 60.0
    """How long the cluster may take to make room for all of them, nodes that come late included."""


class Misbehave(Section):
    """Shares of rollouts whose agent does, on purpose and once, what agents out there do. They add up to at most 1."""

    retry: Fraction = 0.0
    """Sends one request twice with the same body and goes on with the second answer: a dead sibling in the chain."""
    branch: Fraction = 0.0
    """Asks a side question off the main line and drops the answer: a side branch."""
    overflow: Fraction = 0.0
    """Ends on a request that is longer than the window; the chain before it still trains."""
    edit: Fraction = 0.0
    """Rewrites an earlier answer of the model in its history: the next call has no parent, the rollout is masked."""
    stream: Fraction = 0.0
    """Share of calls, of any rollout, that are asked for as a stream of events."""

    @model_validator(mode="after")
    def _at_most_one_each(self) -> Misbehave:
        total = self.retry + self.branch + self.overflow + self.edit
        if total > 1.0 + 1e-9:
            raise ValueError(f"expected retry + branch + overflow + edit to be at most 1, got {total:g}")
        return self


class Environment(Section):
    name: str = MISSING
    """Which task: see `workbench.campaign.environments`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings; the environment refuses those it does not know."""
    misbehave: Misbehave = Field(default_factory=Misbehave)
    """Faults that the agents commit on purpose."""


class Rollouts(Section):
    max_inflight_groups: Positive = 4
    """Groups whose agents run at once."""
    max_inflight_rollouts: Positive | None = None
    """Rollouts whose agents run at once, in the order of their places; 1 makes a run repeatable on one machine,
    with `sampling.seed_each_call` and `train.max_staleness: 0`. null: all rollouts of the groups that run."""
    timeout_s: Seconds = 180.0
    """How long one rollout's agent may take, and then its reward. Longer makes it a placeholder."""
    require_terminal_witness: bool = False
    """Whether a rollout has a vote only where something names its last call: the response that the agent left, or
    `workbench receipt --terminal`. Any other is `missing_terminal`. false lets the parent links guess that call."""
    max_dropped_in_a_row: Positive = 8
    """Groups that may leave one after the other without becoming rows, each replaced by a fresh one. One more ends the
    campaign with their cause: what makes every group leave will not be cured by sampling another one."""
    stall_timeout_s: Seconds = 300.0
    """The campaign ends when nothing at all has moved for this long: no rollout, group or step came to its end. At
    least `timeout_s`; a step, a weight sync and a checkpoint are not counted, they have deadlines of their own."""


class Finalizer(Section):
    actors: Positive = 1
    """Finalizer actors; each takes one logical CPU."""
    timeout_s: Seconds = 60.0
    """How long one group may take to be verified, published and stored."""


class Deadlines(Section):
    """How soon a part that died or hangs is found out. What one task may take stands with the task (`timeout_s`)."""

    start_s: Seconds = 180.0
    """How long each of Ray, TransferQueue, the gateway, the start-up probe and the look at a cluster's nodes may take
    at the start. Engine, trainer and finalizers have `engine.start_timeout_s`."""
    heartbeat_s: Seconds = 1.0
    """How often every part is asked whether it is alive."""
    replace_s: Seconds = 60.0
    """How long until a lost finalizer has been replaced. Longer ends the campaign where it was the last one."""
    control_s: Seconds = 30.0
    """How long the gateway may take to answer the campaign itself: to close a rollout."""
    stop_s: Seconds = 20.0
    """How long each part may take to stop at the end, before it is killed."""


class Reports(Section):
    dir: str = "reports"
    """Where runs are stored, one directory each. Relative to where the command runs."""


class Recipe(Section):
    """One campaign, whole."""

    name: Annotated[str, Field(pattern=RUN_NAME)] = MISSING
    """Name of the campaign; runs are called after it. Up to 80 letters, digits, dots, dashes and underscores."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seeds tasks, agents and the engine. Runs still differ by the order in which calls are batched."""
    model: Model = Field(default_factory=Model)
    token_capture: TokenCapture = Field(default_factory=TokenCapture)
    sampling: Sampling = Field(default_factory=Sampling)
    engine: Engine = Field(default_factory=Engine)
    gateway: Gateway = Field(default_factory=Gateway)
    data_plane: DataPlane = Field(default_factory=DataPlane)
    ray: RayCluster = Field(default_factory=RayCluster)
    environment: Environment = Field(default_factory=Environment)
    rollouts: Rollouts = Field(default_factory=Rollouts)
    finalizer: Finalizer = Field(default_factory=Finalizer)
    train: Train = Field(default_factory=Train)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    proof: Proof = Field(default_factory=Proof)
    deadlines: Deadlines = Field(default_factory=Deadlines)
    reports: Reports = Field(default_factory=Reports)

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        # Each of these would otherwise show minutes later, as a wait without end or as rows nobody can train on.
        units = self.data_plane.storage_units_per_node or self.data_plane.storage_units
        needed = units + 1
        if self.ray.address == "local" and self.ray.num_cpus < needed:
            raise ValueError(
                f"ray.num_cpus: expected at least {needed} logical CPUs, because TransferQueue takes one for its "
                f"controller and one for each of {units} storage units; got {self.ray.num_cpus}"
            )
        if self.engine.port and self.engine.port == self.gateway.port and self.ray.address == "local":
            raise ValueError(
                f"engine.port: expected another port than gateway.port ({self.gateway.port}), because both listen on "
                "this machine; got the same"
            )
        if self.engine.port and self.engine.workers > 1:
            raise ValueError(
                f"engine.port: expected 0, because {self.engine.workers} workers cannot share one port; got "
                f"{self.engine.port}"
            )
        per_node = self.train.ranks_per_node
        if per_node and self.train.ranks % per_node:
            raise ValueError(
                f"train.ranks_per_node: expected a divisor of train.ranks ({self.train.ranks}), so that every node of "
                f"the trainer is full; got {per_node}"
            )
        if self.engine.kind == "scripted" and self.engine.tensor_parallel > 1:
            raise ValueError(
                f"engine.tensor_parallel: expected 1, because engine.kind is 'scripted' and has no weights to split; "
                f"got {self.engine.tensor_parallel}"
            )
        if self.token_capture.routes and not self.token_capture.enabled:
            raise ValueError(
                "token_capture.routes: expected false, because routes are staged with captured calls and "
                "token_capture.enabled is false; got true"
            )
        if self.train.router_replay.mode != "none" and not self.token_capture.routes:
            raise ValueError(
                f"train.router_replay.mode: expected none, because token_capture.routes is false and there is nothing "
                f"to replay; got {self.train.router_replay.mode}"
            )
        if self.train.live_calls == "straddle" and not self.token_capture.enabled:
            raise ValueError(
                "train.live_calls: expected 'finish', because without token capture nobody knows which token came from "
                "which weights; got 'straddle'"
            )
        for key, longest_s in (("rollouts", self.rollouts.timeout_s), ("finalizer", self.finalizer.timeout_s)):
            if self.rollouts.stall_timeout_s < longest_s:
                raise ValueError(
                    f"rollouts.stall_timeout_s: expected at least {key}.timeout_s ({longest_s:g}), so that what is "
                    f"slow is not taken for a stall; got {self.rollouts.stall_timeout_s:g}"
                )
        for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self.sampling, key) != neutral:
                raise ValueError(
                    f"sampling.{key}: expected {neutral:g}, because a trainer, this one or another that a served run's "
                    f"rows are for, scores all tokens, not the sampler's truncated set, so that every ratio would be "
                    f"off; got {getattr(self.sampling, key):g}"
                )
        if self.sampling.max_tokens >= self.model.max_model_len:
            raise ValueError(
                f"sampling.max_tokens: expected less than model.max_model_len ({self.model.max_model_len}), "
                f"so that a prompt fits too; got {self.sampling.max_tokens}"
            )
        if self.engine.kind == "scripted" and self.engine.script_path is None:
            raise ValueError("engine.script_path: expected a JSONL file, because engine.kind is 'scripted'; got null")
        return self
