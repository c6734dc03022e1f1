"""Recompute: a run's advantages, losses and log-probs from its files alone, by code that shares none with Workbench.

    python tools/recompute_run.py reports/RUN [--model FOLDER]

Reads recipe.yaml, steps.jsonl and the Parquet parts of rows/ and train/. Per step: advantages from rewards (grpo, rloo,
dr_grpo); which tokens are in the loss, from masks, versions and log-probs; the clipped loss and the agreement numbers
from stored log-probs; and log-probs by a plain forward pass of transformers where the weights of the step are at hand:
the first step's are the model that the run started from (--model), others' lie in weights/ of the run while they are
kept, and count only in float32. Where the run replayed a mixture's routes, so does the forward pass, with those in
calls/. Prints the largest difference of each, or why nothing was compared, and exits 1 where one is beyond its bound.
It imports nothing of Workbench, so that the two can only agree by being right.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

BOUNDS = {
    "advantage": 1e-9,
    "loss_mask": 0.0,
    "loss": 1e-6,
    "token_mult_prob_error": 1e-5,
    "gen_kl_error": 1e-5,
    "logprob": 2e-4,
}
"""Largest |stored - recomputed|. Sums in float32 and float64 differ by the loss's; log-probs in nat."""

NOTHING = {
    "advantage": "the recipe's estimator is none of grpo, rloo and dr_grpo, or shuffled; losses use those recorded",
    "loss": "with a KL penalty it needs the log-probs of the model that the run started from",
    "logprob": "no step has its weights at hand (--model FOLDER: those of the first; weights/ keeps the last ones, and "
    "they count where model.dtype is float32)",
}
"""Why there may be nothing to compare; of all others, that no step was taken or no token sampled."""

TOKEN_ARRAYS = ("token_ids", "token_mask", "logprobs", "loss_mask", "trainer_logprobs")


@dataclass
class Comparison:
    """Largest difference of each quantity, and how many values stand behind it."""

    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    count: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0))
    beyond: dict[str, list[int]] = field(default_factory=lambda: {what: [] for what in BOUNDS})
    """Steps in which a difference is beyond its bound."""
    step: int = 0

    def see(self, what: str, stored: Any, recomputed: Any) -> None:
        difference = np.abs(np.asarray(stored, float) - np.asarray(recomputed, float))
        if not np.all(difference <= BOUNDS[what]) and self.step not in self.beyond[what]:
            self.beyond[what].append(self.step)
        # Kept where it is no number: a NaN in a record equals nothing.
        self.worst[what] = float(np.max([self.worst[what], *np.ravel(difference)]))
        self.count[what] += difference.size

    @property
    def ok(self) -> bool:
        return not any(self.beyond.values())


def read_part(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet part; ends with a sentence where it cannot be read."""
    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise SystemExit(f"{path} cannot be read: {' '.join(str(error).split())}") from None


KNOWN_ADVANTAGES = ("grpo", "rloo", "dr_grpo")


def advantages(rewards: list[float], groups: list[str], votes: list[bool], chosen: dict[str, Any]) -> list[float]:
    """By the definitions of grpo, rloo and dr_grpo; none for others, and for shuffled ones."""
    name, options = chosen["name"], chosen.get("options") or {}
    if name not in KNOWN_ADVANTAGES or chosen.get("shuffle"):
        return []
    out = []
    for reward, group, vote in zip(rewards, groups, votes, strict=True):
        mates = [r for r, g, v in zip(rewards, groups, votes, strict=True) if g == group and v]
        if not vote or len(mates) < 2 or max(mates) - min(mates) <= 1e-6 * max(1.0, max(map(abs, mates))):
            out.append(0.0)
            continue
        mean = sum(mates) / len(mates)
        leave_one_out = name == "rloo" or (name == "grpo" and options.get("baseline", "leave_one_out") != "mean")
        value = reward - ((sum(mates) - reward) / (len(mates) - 1) if leave_one_out else mean)
        if name == "grpo" and options.get("normalize_std"):
            value /= math.sqrt(sum((r - mean) ** 2 for r in mates) / (len(mates) - 1))
        out.append(value)
    return out


def loss_masks(rows: list[dict[str, Any]], step: int, train: dict[str, Any]) -> tuple[list[np.ndarray], list[bool]]:
    """Which tokens enter the loss, and which rows have a place in a baseline, by what the recipe says of old weights
    and of rows whose log-probs disagree."""
    old, limit = train.get("off_policy") or {}, (train.get("loss") or {}).get("max_mult_prob_error")
    policy, max_lag = old.get("policy", "allow"), old.get("max_lag")
    max_lag = train["max_staleness"] if max_lag is None else max_lag
    masks, voted = [], []
    for row in rows:
        sampled = np.asarray(row["token_mask"], bool) & (row["sample_mask"] == 1)
        stale = np.zeros(len(sampled), bool)
        for _, start, end, version in json.loads(row["weight_version_spans"]):
            stale[start:end] = step - 1 - version > max_lag
        rejected = policy == "reject" and bool((stale & sampled).any())
        delta = np.abs(np.subtract(row["trainer_logprobs"], row["logprobs"], dtype=float)[sampled])
        apart = limit is not None and sampled.any() and np.exp(delta).mean() > limit
        # Of rewards and their components the estimator alone knows which go together: that is taken as recorded.
        rejected = rejected or row.get("left_out") == "reward_components"
        masks.append(sampled & ~(stale & (policy != "allow")) & (not (rejected or apart)))
        voted.append(row["sample_mask"] == 1 and not rejected)
    return masks, voted


def clipped_loss(rows: list[dict[str, Any]], train: dict[str, Any], window: int) -> float:
    """The token-level clipped loss, averaged as the recipe says, a token at a time."""
    settings = train.get("loss") or {}
    reduction = settings.get("reduction", "token")
    sums: list[tuple[float, int]] = []
    for row in rows:
        total, count = 0.0, 0
        for t in np.flatnonzero(row["loss_mask"]):
            delta = row["trainer_logprobs"][t] - row["logprobs"][t]
            cap = settings.get("tis_cap")
            ratio, weight = (math.exp(delta), 1.0) if cap is None else (1.0, min(math.exp(delta), cap))
            clipped = min(max(ratio, 1 - train["clip_low"]), 1 + train["clip_high"])
            total -= weight * min(ratio * row["advantage"], clipped * row["advantage"])
            count += 1
        if count:
            sums.append((total, count))
    if not sums:
        return 0.0
    if reduction == "token":
        return sum(total for total, _ in sums) / sum(count for _, count in sums)
    divisors = [count if reduction == "sequence" else settings["constant_tokens"] or window for _, count in sums]
    return sum(total / divisor for (total, _), divisor in zip(sums, divisors, strict=True)) / len(sums)


def recorded_routes(run: Path) -> dict[tuple[str, str], np.ndarray]:
    """Routed experts (tokens, layers, topk) of every call that has some, by rollout and call id."""
    found = {}
    for path in sorted((run / "calls").glob("*.parquet")):
        for call in read_part(path):
            if call.get("routes") is not None:
                _, dtype, shape, _ = json.loads(call["extras"])["routed_experts"].split(":")
                values = np.frombuffer(call["routes"], dtype=np.dtype(dtype).newbyteorder("<"))
                found[call["rollout_id"], call["model_call_id"]] = values.reshape([int(n) for n in shape.split("x")])
    return found


def routes_of(row: dict[str, Any], recorded: dict[tuple[str, str], np.ndarray]) -> np.ndarray | None:
    """Routes (T, layers, topk) of a row, -1 where its calls recorded none that fit; None where no call did."""
    own = [(recorded.get((row["rollout_id"], call)), *rest) for call, *rest in json.loads(row["link_spans"])]
    sizes = {values.shape[1:] for values, _, _ in own if values is not None}
    if not sizes:
        return None
    parts = []
    for values, carry, generated in own:
        part = np.full((carry + generated, *next(iter(sizes))), -1, dtype=np.int64)
        # Fewer rows than tokens are those of the delta's end, and of use where they reach over all that was sampled.
        if values is not None and len(values) == len(part):
            part[:] = values
        elif values is not None and 0 < generated <= len(values):
            kept = min(len(values), len(part))
            part[-kept:] = values[-kept:]
        parts.append(part)
    return np.concatenate(parts)


def force(model: Any, routes: np.ndarray) -> list[Any]:
    """Let the routers of every layer take `routes` where they are known; how much an expert weighs stays their own
    softmax's. Returns the hooks that do it."""
    import torch

    def of_layer(wanted: torch.Tensor) -> Any:
        def take(router: Any, _: Any, output: Any) -> Any:
            logits, weights, own = output
            known = (wanted >= 0).all(-1, keepdim=True)
            chosen = torch.where(known, wanted, own)
            gates = logits.double().softmax(-1).gather(1, chosen)
            if router.norm_topk_prob:
                gates = gates / gates.sum(-1, keepdim=True)
            return logits, torch.where(known, gates.to(weights.dtype), weights), chosen

        return take

    blocks = enumerate(model.model.layers)
    routers = [(layer, block.mlp.gate) for layer, block in blocks if hasattr(block.mlp, "gate")]
    return [gate.register_forward_hook(of_layer(torch.tensor(routes[:, layer]))) for layer, gate in routers]


def forward_logprobs(
    folder: Path, token_ids: list[int], temperature: float, routes: np.ndarray | None = None
) -> np.ndarray:
    """(T,) log-prob of each token by a plain forward pass in float32; 0 for the first. `routes`: forced experts."""
    import torch

    model = _models.get(folder)
    if model is None:
        from transformers import AutoModelForCausalLM

        model = _models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hooks = [] if routes is None else force(model, routes)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0].double() / temperature
    for hook in hooks:
        hook.remove()
    picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


_models: dict[Path, Any] = {}


def recompute(run: Path, model: Path | None = None) -> Comparison:
    """Compare every step of a run. `model` is the folder that it started from; None leaves its log-probs out."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    stored: dict[str, dict[str, Any]] = {}
    for path in sorted((run / "rows").glob("*.parquet")):
        stored |= {row["rollout_id"]: row for row in read_part(path)}
    replays = (recipe["train"].get("router_replay") or {}).get("mode", "none") != "none"
    recorded = recorded_routes(run) if replays else {}
    result = Comparison()
    for line in (run / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        result.step = step["step"]
        part = read_part(run / "train" / f"step-{step['step']}.parquet")
        lost = [record["rollout_id"] for record in part if record["rollout_id"] not in stored]
        if lost:
            raise SystemExit(f"step {step['step']} trained rollout {lost[0]}, and no part of rows/ has it")
        rows = [stored[record["rollout_id"]] | record for record in part]
        for row in rows:
            sizes = {name: len(row[name] or ()) for name in TOKEN_ARRAYS}
            if len(set(sizes.values())) > 1:
                raise SystemExit(
                    f"step {step['step']}, rollout {row['rollout_id']}: arrays of different lengths, {sizes}"
                )
        votes = [row["sample_mask"] == 1 for row in rows]
        masks, voted = loss_masks(rows, step["step"], recipe["train"])
        result.see("loss_mask", np.concatenate([row["loss_mask"] for row in rows]), np.concatenate(masks))
        chosen = recipe["train"]["advantage"]
        if own := advantages([r["reward"] for r in rows], [r["group_id"] for r in rows], voted, chosen):
            result.see("advantage", [row["advantage"] for row in rows], own)
        if not (recipe["train"].get("kl") or {}).get("coefficient"):
            result.see("loss", step["loss"], clipped_loss(rows, recipe["train"], recipe["model"]["max_model_len"]))
        delta_K = np.array(
            [
                row["trainer_logprobs"][t] - row["logprobs"][t]
                for row, vote in zip(rows, votes, strict=True)
                for t in np.flatnonzero(row["token_mask"])
                if vote
            ]
        )
        if delta_K.size or step["gen_kl_error"] is not None:
            result.see("token_mult_prob_error", step["token_mult_prob_error"], np.exp(np.abs(delta_K)).mean())
            result.see("gen_kl_error", step["gen_kl_error"], (np.exp(delta_K) - 1 - delta_K).mean())
        folder = model if step["step"] == 1 else run / "weights" / f"v{step['step'] - 1}"
        if folder is None or not folder.is_dir() or (step["step"] > 1 and recipe["model"]["dtype"] != "float32"):
            continue
        for row, vote in zip(rows, votes, strict=True):
            if vote:
                at = np.flatnonzero(row["token_mask"])
                routes = routes_of(row, recorded)
                ours = forward_logprobs(folder, row["token_ids"], recipe["sampling"]["temperature"], routes)
                result.see("logprob", np.array(row["trainer_logprobs"])[at], ours[at])
    return result


def _why_nothing(what: str, last_step: int) -> str:
    return NOTHING[what] if last_step and what in NOTHING else "no step has a sampled token"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("--model", type=Path, default=None, help="folder of the model that the run started from")
    asked = parser.parse_args()
    if not (asked.run / "recipe.yaml").is_file():
        parser.error(f"no run in {asked.run}: expected a directory such as reports/first, with a recipe.yaml")
    if asked.model is not None and not (asked.model / "config.json").is_file():
        parser.error(f"no model in {asked.model}: expected the folder that the run started from, with a config.json")
    result = recompute(asked.run, asked.model)
    for what, bound in BOUNDS.items():
        if not result.count[what]:
            print(f"{what:24} not compared: {_why_nothing(what, result.step)}")
            continue
        steps = ", ".join(map(str, result.beyond[what]))
        mark = f"  BEYOND its bound in step {steps}" if steps else ""
        said = f"{result.count[what]:7} values, largest difference {result.worst[what]:.2e} (bound {bound:g}){mark}"
        print(f"{what:24} {said}")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
