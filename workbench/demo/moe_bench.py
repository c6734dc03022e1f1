"""Moe bench: a small mixture of experts that samples with routers a little off; trainers with and without its routes.

    MoeBench(noise) ─ samples, captures ─▶ staged calls with routes ─ step(replay) ─▶ a run: rows, one optimiser step
What a bfloat16 engine and a float32 trainer do to each other in a campaign, in seconds and without an engine: the same
token goes to other experts. Capture core, assembly, replay and records are the product's own; made up are the sampler
(the trainer's model with perturbed routers, in transformers) and what it is asked (one group of two-turn rollouts).
Invariant: every arm trains the same staged calls with the same weights, so that only the routes differ.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from workbench import runs
from workbench.capture.core import CaptureCore
from workbench.capture.routes import align_routes
from workbench.capture.staged_row import unpack
from workbench.capture.staging import MemorySink
from workbench.demo.bench import TOKENIZER
from workbench.finalizer.group import assemble
from workbench.finalizer.messages import FinalizationRequest, FinalizedGroup, RolloutOutcome
from workbench.finalizer.parts import write_group
from workbench.finalizer.routes import RouteSettings
from workbench.finalizer.rows import pack_row
from workbench.runs.vocabulary import load_vocabulary
from workbench.runs.writer import RunWriter, write_part
from workbench.train.rows import unpack_row
from workbench.train.trainer import Trainer
from workbench.wire import CallRecord, CaptureAdmission, RolloutReceipt, encode_routes
from workbench.wire.extras import FINISH_REASON, ROUTED_EXPERTS

LAYERS, EXPERTS, TOPK = 3, 16, 4
ROLLOUTS, SAMPLED = 4, 20
ASKED = ("Say a word about the sea.", "Say another word.")


class MoeBench:
    """One policy twice. `noise` is the standard deviation of what the sampler's routers are off; their own is 0.1."""

    def __init__(self, noise: float = 0.005, seed: int = 0) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        # Until the process ends, because runs read their files when they are looked at.
        self._home = Path(tempfile.mkdtemp(prefix="workbench-moe-"))
        atexit.register(shutil.rmtree, self._home, ignore_errors=True)
        self._model = self._home / "model"
        self._tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        sampler = _build(self._model, len(self._tokenizer), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in sampler.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    weight.add_(noise * torch.randn(weight.shape, generator=generator))
        self._turns: list[_Turn] = []
        for asked in ASKED:
            before = self._turns[-1].ids if self._turns else [[]] * ROLLOUTS
            self._turns.append(_say(sampler, before, self._rendered(asked, first=not self._turns), generator))

    def step(self, *, replay: bool, beside: int = 0) -> runs.Run:
        """The run of one optimiser step on the group, its routes replayed or not.

        `beside` shifts every route by so many tokens, as careless slicing would.
        """
        path = self._home / f"{'replay' if replay else 'own'}{beside}"
        writer = RunWriter(path)
        (path / "vocabulary.json").write_bytes(load_vocabulary(TOKENIZER / "tokenizer.json").dump())
        sink = MemorySink()
        outcomes = self._play(sink, beside)
        request = FinalizationRequest(group_id="moe.0", weight_version=0, rollouts=outcomes)
        staged = {key: unpack(key, sink.rows[key]) for key in request.staging_keys()}
        assembly = assemble(request, staged, self._tokenizer.bos_token_id, RouteSettings("direct") if replay else None)
        write_group(path, request, staged, assembly)
        group = FinalizedGroup(
            group_id="moe.0",
            weight_version=0,
            train_keys=[row.rollout_id for row in assembly.rows],
            rows=assembly.summaries,
            metrics=assembly.metrics,
        )
        writer.group({"step": 1, **group.store_record()})
        mode = "direct" if replay else "none"
        # One thread: of a model this small, two would mostly wait for each other.
        settings = {"model_path": str(self._model), "run_dir": str(path), "router_replay": mode, "threads": 1}
        trainer = Trainer(settings)
        metrics, part = trainer.step_on(1, [unpack_row(pack_row(row)) for row in assembly.rows])
        write_part(path / "train" / "step-1.parquet", "train", part)
        writer.step({"step": 1, "weight_version": 1, **metrics})
        writer.status(run=path.name, status="done")
        writer.close()
        return runs.open(path)

    def _play(self, sink: MemorySink, beside: int) -> list[RolloutOutcome]:
        """Capture every rollout of the group, a call a turn."""
        core = CaptureCore(sink, lambda: 0, sink_timeout_s=None)
        outcomes = []
        for index in range(ROLLOUTS):
            rollout_id, reward = f"moe.0.{index}.0", float(index % 2)
            records: list[CallRecord] = []
            for turn, said in enumerate(self._turns):
                ids, prev_len = said.ids[index], records[-1].cum_len if records else 0
                admission = CaptureAdmission(
                    rollout_id=rollout_id,
                    model_call_id=f"{index}-{turn}",
                    mode="token_in" if turn else "text",
                    parent_call_id=records[-1].model_call_id if turn else None,
                    prev_len=prev_len,
                    parent_chain_hash=records[-1].chain_hash if turn else None,
                    required_prefix_token_ids=ids[:prev_len],
                )
                routes = align_routes(np.roll(said.routes[index], beside, axis=0), prev_len, len(ids))
                coords = core.complete(
                    core.begin(admission),
                    prompt_token_ids=ids[:-SAMPLED],
                    generated_token_ids=ids[-SAMPLED:],
                    logprobs=said.logprobs[index],
                    extras={FINISH_REASON: "length", ROUTED_EXPERTS: encode_routes(routes)},
                )
                held = {name: getattr(coords, name) for name in CallRecord.model_fields if hasattr(coords, name)}
                records.append(CallRecord(**held, mode=admission.mode, response_id=f"r{turn}", admitted_at=float(turn)))
            receipt = RolloutReceipt(
                rollout_id=rollout_id,
                reward=reward,
                terminal_model_call_id=records[-1].model_call_id,
                terminal_selection="declared",
                manifest=records,
            )
            outcomes.append(RolloutOutcome(rollout_id=rollout_id, index=index, receipt=receipt, reward=reward))
        return outcomes

    def _rendered(self, asked: str, *, first: bool) -> list[int]:
        text = ("" if first else "<|im_end|>\n") + f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def delta_by_agreement(own: runs.Run, replayed: runs.Run) -> pl.DataFrame:
    """Mean |trainer − sampler| (nat) of the sampled tokens, by how many layers of the token before sent it where the
    trainer's own routers would have: of the arm without replay and of the one with, on the same tokens."""
    frames = []
    for rollout_id in replayed.rollouts["rollout_id"]:
        forced, free = (run.tokens(rollout_id).filter("sampled") for run in (replayed, own))
        # A token's log-prob comes out where the token before it went in.
        before = replayed.tokens(rollout_id).select(pl.col("position") + 1, agreement="route_agreement")
        frames.append(
            forced.select("position", replay=pl.col("delta").abs())
            .join(free.select("position", own=pl.col("delta").abs()), on="position")
            .join(before, on="position")
        )
    layers = (pl.col("agreement") * LAYERS).round().cast(pl.Int64).alias("layers that agree")
    grouped = pl.concat(frames).group_by(layers).agg(pl.len().alias("tokens"), pl.col("own", "replay").mean())
    return grouped.sort("layers that agree", descending=True)


@dataclass(frozen=True)
class _Turn:
    """One call of every rollout: ids so far, log-probs of the sampled ones, routes of all inputs [B, T - 1, L, K]."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    routes: np.ndarray


@torch.no_grad()
def _say(sampler: Any, before: list[list[int]], asked: list[int], generator: torch.Generator) -> _Turn:
    """`SAMPLED` tokens of each rollout, after its ids so far and what it is asked."""
    ids = torch.tensor([[*earlier, *asked] for earlier in before])  # (B, T)
    logprobs = []
    for _ in range(SAMPLED):
        output = sampler(input_ids=ids, output_router_logits=True, use_cache=False)
        each = output.logits[:, -1].log_softmax(-1)
        token = torch.multinomial(each.exp(), 1, generator=generator)
        logprobs.append(each.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    chosen = torch.stack([logits.topk(TOPK).indices for logits in output.router_logits], dim=1)
    routes = chosen.reshape(len(before), -1, LAYERS, TOPK).numpy().astype(np.uint8)
    return _Turn(ids.tolist(), torch.cat(logprobs, dim=1).tolist(), routes)


def _build(folder: Path, vocabulary: int, seed: int) -> Any:
    """A random Qwen3-MoE with the demo's vocabulary, saved for the trainer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(  # type: ignore[call-arg] # head_dim is the model's, and taken all the same
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model
