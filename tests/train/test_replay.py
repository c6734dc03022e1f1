"""Replay: forcing a model's own routes changes no bit; forcing the sampler's brings the trainer to the sampler."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from train.samples import MemoryRows
from train.two_ranks import RANKS, run_on_two

from workbench import models
from workbench.errors import TrainerError
from workbench.train import Trainer
from workbench.train.batch import recomputed_layers, token_logprobs
from workbench.train.replay import RouterReplay
from workbench.train.rows import TrainRow

LENGTH, LAYERS, TOPK = 24, 3, 4


@pytest.fixture(scope="module")
def moe_path(smollm2):
    return models.build("tiny-moe")


@pytest.fixture(scope="module")
def moe(moe_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(moe_path, dtype=torch.float32).eval()


def token_ids(rows=2, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(20, 49000, (rows, LENGTH)))


def observed(model, ids):
    """Logits, and the routes (B, T, L, K) that the model chose, read off its routers."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for module in model.modules()
        if type(module).__name__.endswith("Router")
    ]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(chosen, dim=1).reshape(*ids.shape, LAYERS, TOPK)


def perturbed(model, noise=0.02):
    """The model with routers as if computed elsewhere: a little off, so that some tokens go to other experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in other.modules():
            if type(module).__name__.endswith("Router"):
                module.weight.add_(noise * torch.randn(module.weight.shape, generator=generator))
    return other


def gradients(model, ids, routes, *, recompute=False):
    model = copy.deepcopy(model)
    replay = RouterReplay(model)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with replay.forced(routes), recomputed_layers(model, recompute):
        token_logprobs(model, ids, mask).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_forcing_its_own_routes_changes_no_bit(moe):
    model, ids = copy.deepcopy(moe), token_ids()
    expected, routes = observed(model, ids)
    replay = RouterReplay(model)
    # In whatever order the experts come: the engine's is its own.
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        with replay.forced(routes[..., order]):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
        assert (replay.agreement() == 1).all()
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


def test_gradients_reach_the_routers_as_in_an_unforced_pass(moe):
    ids = token_ids()
    _, routes = observed(moe, ids)
    unforced, forced = gradients(moe, ids, None), gradients(moe, ids, routes)
    routers = [name for name in unforced if name.endswith("gate.weight")]
    assert len(routers) == LAYERS and all(unforced[name].abs().max() > 0 for name in routers)
    for name in unforced:
        torch.testing.assert_close(forced[name], unforced[name], rtol=1e-5, atol=1e-7)


def test_layers_that_are_recomputed_take_the_same_routes(moe):
    ids = token_ids()
    _, routes = observed(perturbed(moe, 0.2), ids)
    kept, recomputed = gradients(moe, ids, routes), gradients(moe, ids, routes, recompute=True)
    own = gradients(moe, ids, None)
    for name in kept:
        torch.testing.assert_close(recomputed[name], kept[name], rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(own[name], kept[name], rtol=1e-2) for name in kept)


def test_at_sentinels_the_models_own_router_chooses(moe):
    model, ids = copy.deepcopy(moe), token_ids(1)
    expected, own = observed(model, ids)
    replay = RouterReplay(model)
    nothing = torch.full_like(own, -1)
    with replay.forced(nothing):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert torch.isnan(replay.agreement()).all()
    # One token in the middle forced elsewhere: what stands before it cannot notice.
    one = nothing.clone()
    one[0, 10] = (own[0, 10] + 1) % 16
    with replay.forced(one):
        changed = model(input_ids=ids, use_cache=False).logits
    # Not to the bit: an expert that gets another number of tokens multiplies them in another order.
    torch.testing.assert_close(changed[0, :10], expected[0, :10], rtol=1e-4, atol=1e-4)
    assert (changed[0, 10] - expected[0, 10]).abs().max() > 0.1
    known = ~torch.isnan(replay.agreement())
    assert known.any(dim=1).nonzero().ravel().tolist() == [10]


def test_a_pass_that_forced_nothing_has_no_agreement(moe):
    replay = RouterReplay(copy.deepcopy(moe))
    with replay.forced(None), torch.no_grad():
        replay.check("r", np.full((LENGTH, LAYERS, TOPK), -1, np.int16))
    assert replay.agreement() is None


def test_routers_of_another_formula_and_dense_models_are_refused(moe, tiny_model):
    from transformers import AutoModelForCausalLM

    class SigmoidRouter(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.top_k, self.weight = inner.top_k, inner.weight

        def forward(self, hidden):
            logits = hidden @ self.weight.t()
            gates, own = logits.sigmoid().topk(self.top_k)
            return logits, gates, own

    class LonelyRouter(SigmoidRouter):
        def forward(self, hidden):
            return super().forward(hidden)[0]

    for kind in (LonelyRouter, SigmoidRouter):
        other = copy.deepcopy(moe)
        layer = other.model.layers[1].mlp
        layer.gate = kind(layer.gate)
        with pytest.raises(TrainerError, match=rf"how {kind.__name__} \(model\.layers\.1\.mlp\.gate\) weighs"):
            RouterReplay(other)
    alone = torch.nn.Module()
    alone.config, alone.OnlyRouter = moe.config, copy.deepcopy(moe.model.layers[1].mlp.gate)
    with pytest.raises(TrainerError, match="does not know which layer the router OnlyRouter belongs to"):
        RouterReplay(alone)
    with pytest.raises(TrainerError, match=r"LlamaForCausalLM has no router that replay knows"):
        RouterReplay(AutoModelForCausalLM.from_pretrained(tiny_model))


def rows_of(sampler, count=4, known=True):
    """Rows as another engine would have sampled and routed them: ids, its log-probs, its routes."""
    ids = token_ids(count, seed=5)
    _, routes = observed(sampler, ids)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 8:] = True
    with torch.no_grad():
        logprobs = token_logprobs(sampler, ids, mask)
    taken = routes.numpy().astype(np.int8)
    taken[:, -1] = -1
    return [
        TrainRow(
            f"run.0.{b}.0", "g0", b, float(b % 2), True, ids[b].numpy(), mask[b].numpy(), logprobs[b].numpy(),
            routes=taken[b] if known else np.full_like(taken[b], -1),
        )
        for b in range(count)
    ]  # fmt: skip


def trainer(path, folder, mode="direct", **settings):
    config = {"model_path": str(path), "run_dir": str(folder), "threads": 2, "router_replay": mode}
    return Trainer(config | settings, MemoryRows([]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routes_of_a_perturbed_router_bring_the_trainer_to_the_sampler(moe, moe_path, tmp_path, dtype):
    rows = rows_of(perturbed(moe))
    replayed, part = trainer(moe_path, tmp_path, dtype=dtype, micro_batch_tokens=60).step_on(1, rows)
    alone, _ = trainer(moe_path, tmp_path, "none", dtype=dtype, micro_batch_tokens=60).step_on(1, rows)
    assert replayed["replay_coverage"] == 1.0 and "replay_coverage" not in alone
    assert 0.2 < replayed["router_agreement"] < 0.999 and len(replayed["router_agreement_by_layer"]) == LAYERS
    assert replayed["mean_abs_logprob_delta"] < 0.5 * alone["mean_abs_logprob_delta"]
    # The record says it token by token: the last one has no route, and no agreement.
    assert all(np.isnan(values[-1]) and not np.isnan(values[:-1]).any() for values in part["route_agreement"])


def test_replay_without_a_single_route_is_an_error(moe, moe_path, tmp_path):
    with pytest.raises(TrainerError, match=r"none of the 64 positions in the loss has a route"):
        trainer(moe_path, tmp_path).step_on(1, rows_of(moe, known=False))
    # A layer that was never recorded is replayed nowhere, whatever is known of the others.
    rows = rows_of(moe)
    for row in rows:
        row.routes[:, 1] = -1
    with pytest.raises(TrainerError, match="of the 64 positions in the loss has a route"):
        trainer(moe_path, tmp_path).step_on(1, rows)


def test_routes_of_another_shape_are_of_another_model(moe, moe_path, tmp_path):
    row = rows_of(moe, 1)[0]
    with pytest.raises(TrainerError, match=r"routes of 2 layers × 4 experts, the model has 3 × 4"):
        trainer(moe_path, tmp_path).step_on(1, [replace(row, routes=row.routes[:, :2])])
    beyond = row.routes.copy()
    beyond[3, 1, 0] = 64
    with pytest.raises(TrainerError, match=r"route to expert 64, a layer of the model has \d+: it was"):
        trainer(moe_path, tmp_path).step_on(1, [replace(row, routes=beyond)])


def test_published_weights_are_the_trained_ones_under_the_files_names(moe, moe_path, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    learner = trainer(moe_path, tmp_path, learning_rate=1e-2, publish_dtype="float32")
    learner.step_on(1, rows_of(perturbed(moe)))
    folder = learner.publish(1)
    assert load_file(f"{folder}/model.safetensors").keys() == load_file(moe_path / "model.safetensors").keys()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(observed(loaded, token_ids())[0], observed(learner.model, token_ids())[0])
    assert not torch.equal(observed(loaded, token_ids())[0], observed(moe, token_ids())[0])


EDGE_IDS = [0, 127, 128, 255, 256, 511, -1]


def one_rank(rank, address, folder):
    import torch.distributed as dist

    from workbench.train.route_transport import broadcast_routes

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    own = None
    if rank == 0:
        edge = np.array(EDGE_IDS, dtype=np.int16).reshape(7, 1, 1)
        own = [edge, None, np.array([[[0, 127, -1]]], dtype=np.int8), np.array([[[2**20]]], dtype=np.int32)]
    got = broadcast_routes(own)
    described = [None if row is None else (row.tolist(), row.dtype.name) for row in got]
    torch.save(described, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_every_id_and_the_sentinel_reach_the_other_rank_in_their_dtype(tmp_path):
    run_on_two(one_rank, str(tmp_path))
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first == second
    assert second[0] == ([[[value]] for value in EDGE_IDS], "int16")
    assert second[1] is None and [what[1] for what in second[2:]] == ["int8", "int32"]


TWO = {"threads": 2, "learning_rate": 1e-3, "micro_batch_tokens": 60, "publish_dtype": "float32"}


def replaying_rank(rank, address, model, folder, rows):
    from workbench.train.ranks import RankTrainer

    config = TWO | {"model_path": model, "run_dir": folder, "router_replay": "direct"}
    # What a rank other than the first reads has no routes: it gets them from there.
    own = rows if rank == 0 else [replace(row, routes=None) for row in rows]
    learner = RankTrainer(config, rank, RANKS, address, MemoryRows(own))
    metrics = learner.train_step(1, [row.rollout_id for row in rows])
    learner.publish(1)
    unknown = [replace(row, routes=None if rank else np.full_like(row.routes, -1)) for row in rows]
    flat = [replace(row, routes=None if rank else row.routes[:, :1]) for row in rows]
    refused = []
    for wrong in (unknown, flat):
        with pytest.raises(TrainerError) as caught:
            learner.step_on(2, wrong)
        refused.append(str(caught.value))
    torch.save({"metrics": metrics, "refused": refused}, f"{folder}/rank{rank}.pt")
    learner.leave()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_replay_as_one(moe, moe_path, tmp_path):
    from safetensors.torch import load_file

    rows = rows_of(perturbed(moe), count=5)
    (tmp_path / "two").mkdir()
    run_on_two(replaying_rank, str(moe_path), str(tmp_path / "two"), rows)
    answers = [torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    two = answers[0]["metrics"]
    alone = trainer(moe_path, tmp_path / "one", **TWO)
    one, _ = alone.step_on(1, rows)
    for name in ("loss", "grad_norm", "mean_abs_logprob_delta", "router_agreement", "replay_coverage"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
    assert two["router_agreement_by_layer"] == pytest.approx(one["router_agreement_by_layer"])
    assert 0.2 < one["router_agreement"] < 0.999 and one["replay_coverage"] == 1.0
    # Routers and experts among them: every weight moved as one rank moves it.
    alone.publish(1)
    ours, theirs = (load_file(tmp_path / who / "weights" / "v1" / "model.safetensors") for who in ("one", "two"))
    before = load_file(moe_path / "model.safetensors")
    moved = {name: (weight - before[name]).norm() for name, weight in ours.items()}
    assert all(moved[name] > 0 for name in moved if name.endswith("mlp.gate.weight"))
    assert all((theirs[name] - ours[name]).norm() <= 2e-2 * moved[name] for name in ours)
    # Every rank hears of a batch without a route, or with another model's, and none waits for another.
    for answer in answers:
        assert "none of the 80 positions in the loss has a route" in answer["refused"][0]
        assert f"has routes of 1 layers × {TOPK} experts, the model has" in answer["refused"][1]
