"""Tests of the parts of the Tunix integration that do not need Tunix: batch sizes, replays, layer and row layout."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.plans import random_planner

from relibra_jax import RoutingReplay, Topology
from relibra_jax.integrations.tunix.layer import BalancedMoE, CallVariable
from relibra_jax.integrations.tunix.routes import replay_of_sequences
from relibra_jax.integrations.tunix.rows import FIRST_OVER_RANKS, layer_of, ranks_first
from relibra_jax.integrations.tunix.settings import BatchSizes, batch_sizes, check_samples, check_sizes
from relibra_jax.nnx import GATINGS, Balancer, ExpertParallel, MoELayer, expert_mesh

pytestmark = pytest.mark.slow

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)


def check(sizes, **changes):
    options = {"num_generations": 8, "num_ranks": 8, "num_micro_batches": 2, "scores_policies": True}
    check_sizes(BatchSizes(*sizes), **options | changes)


def config(mini=None, train=None, rollout=None, logps=None):
    return SimpleNamespace(
        mini_batch_size=mini,
        train_micro_batch_size=train,
        rollout_micro_batch_size=rollout,
        compute_logps_micro_batch_size=logps,
    )


@pytest.mark.parametrize(
    ("sizes", "full", "expected"),
    [
        ({}, 8, (8, 8, 8, 8)),
        ({"mini": 4}, 8, (4, 4, 4, 4)),
        ({"mini": 4, "train": 2}, 8, (4, 2, 2, 2)),
        ({"mini": 4, "train": 2, "rollout": 4, "logps": 8}, 8, (4, 2, 4, 8)),
    ],
)
def test_batch_sizes_default_to_those_of_tunix(sizes, full, expected):
    assert batch_sizes(config(**sizes), full) == expected


@pytest.mark.parametrize("sizes", [(4, 2, 4, 4), (4, 2, 8, 1), (4, 2, 1, 4), (8, 4, 8, 8)])
def test_check_sizes_accepts_one_plan_an_update(sizes):
    check(sizes)


def test_check_sizes_accepts_one_micro_batch():
    check((4, 4, 1, 2), num_micro_batches=1)


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (
            (4, 2, 2, 2),
            {},
            "with rollout_micro_batch_size=2 and compute_logps_micro_batch_size=2, one update of"
            " mini_batch_size=4 prompts would need 2 plans: set both to 4",
        ),
        ((12, 2, 4, 2), {"num_micro_batches": 6}, "mini_batch_size=12 prompts would need 3 plans"),
        (
            (8, 2, 8, 8),
            {},
            "the balancer has num_micro_batches=2, but mini_batch_size=8 and train_micro_batch_size=2 give 4",
        ),
        (
            (4, 2, 4, 4),
            {"num_generations": 2},
            "train_micro_batch_size=2 of 4 samples must be a multiple of the 8 ranks",
        ),
        (
            (6, 3, 4, 6),
            {"num_generations": 8, "num_ranks": 24},
            "rollout_micro_batch_size=4 of 16 samples must be a multiple of the 24 ranks",
        ),
        (
            (4, 2, 4, 3),
            {"num_ranks": 16},
            "compute_logps_micro_batch_size=3 of 8 samples must be a multiple of the 16 ranks",
        ),
    ],
)
def test_check_sizes_rejects_several_plans_an_update(sizes, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        check(sizes, **changes)
    assert "\n" not in str(error.value)


def test_check_sizes_ignores_unused_sizes():
    check((4, 2, 4, 3), num_ranks=16, scores_policies=False)


def test_check_sizes_rejects_samples_that_do_not_divide():
    check_samples(16, 8, "a rollout of")
    with pytest.raises(ValueError, match="a rollout of 12 samples must be a multiple of the 8 ranks"):
        check_samples(12, 8, "a rollout of")


def recorded():
    """Return routes of right-aligned prompts of four tokens and completions of up to four, and their mask."""
    mask = np.array([[0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]], bool)
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(16, dtype=np.int16), (2, 8, 3, 1)), axis=-1)[
        ..., :2
    ]
    routes[0, 7] = -1  # the sampler stopped before this token
    return routes, mask


def test_replay_of_sequences_has_the_routes_of_real_tokens():
    routes, mask = recorded()
    replay = replay_of_sequences(routes, mask, num_experts=16)
    np.testing.assert_array_equal(replay.expert_ids[mask], routes[mask])
    np.testing.assert_array_equal(replay.mask, mask)


def test_replay_of_sequences_names_a_token_without_a_route():
    routes, mask = recorded()
    routes[1, 5, 2] = -1
    with pytest.raises(ValueError, match="sample 1, token 5, layer 2: no route"):
        replay_of_sequences(routes, mask, num_experts=16)


def test_replay_of_sequences_rejects_another_batch():
    routes, mask = recorded()
    with pytest.raises(ValueError, match="recorded 2 samples of 8 tokens, but the learner trains on 1 of 8"):
        replay_of_sequences(routes, mask[:1], num_experts=16)


class Layers(nnx.Module):
    """A model of three separate MoE layers."""

    def __init__(self):
        gating = dataclasses.replace(GATINGS["qwen3-moe"], top_k=2)
        mesh = expert_mesh(TOPOLOGY)
        layers = [MoELayer(TOPOLOGY, 8, 16, gating, mesh=mesh, rngs=nnx.Rngs(seed)) for seed in range(3)]
        self.layers = nnx.List(layers)


@pytest.fixture(scope="module")
def prepared():
    """Return a prepared batch of two micro-batches, its replay, the model and the balancer."""
    rng = np.random.default_rng(0)
    ids = np.argsort(-rng.normal(size=(1, 1, 3, 16)) - rng.gumbel(size=(32, 6, 3, 16)))[..., :2]
    replay = RoutingReplay(ids.astype(np.uint8), rng.random((32, 6)) < 0.9)
    model, options = Layers(), {"key": jax.random.key(0), "assign": None}
    parallel = ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY)
    balancer = Balancer(random_planner(), parallel, num_layers=3, num_micro_batches=2, **options)
    return balancer.prepare(model, None, replay), replay, model, balancer


def test_ranks_first_holds_the_prepared_layers(prepared):
    batch, *_ = prepared
    for micro_batch in range(2):
        layers = batch.micro_batch(micro_batch)
        rows = ranks_first(layers, batch.parallel.mesh)
        for leaf in jax.tree.leaves(rows):
            assert leaf.shape[:2] == (8, 3)
            assert leaf.sharding.spec == FIRST_OVER_RANKS
        for index in range(3):
            result = layer_of(rows, index, batch.parallel)
            jax.tree.map(np.testing.assert_array_equal, result, layers.layer(index))


def test_prepared_sequences_are_in_tunix_order(prepared):
    batch, *_ = prepared
    np.testing.assert_array_equal(np.asarray(batch.to_ranks(np.arange(32))).ravel(), np.arange(32))


@nnx.jit
def call(layer, x, forced=None):
    layer.forced = None if forced is None else CallVariable(forced)
    output, used = layer(x), layer.used.get_value()
    layer.forced = layer.used = None
    return output, used


@pytest.mark.long
def test_balanced_moe_uses_forced_experts(prepared):
    _, _, model, balancer = prepared
    layer = BalancedMoE(model.layers[0], balancer.live)
    x = jax.random.normal(jax.random.key(1), (16, 6, 8))
    output, used = call(layer, x)
    forced = np.array(used, np.int32)
    forced[:, 0] = (forced[:, 0] + 5) % 16
    forced[:, 4:] = -1
    result, again = call(layer, x, jnp.asarray(forced))
    np.testing.assert_array_equal(again, np.where(forced == -1, used, forced))
    np.testing.assert_allclose(result[:, 1:], output[:, 1:], atol=1e-5)
    assert np.abs(result[:, 0] - output[:, 0]).max() > 1e-2
    expected = model.layers[0](x, jnp.asarray(again, jnp.uint8), parallel=balancer.live).output
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_balanced_moe_follows_a_plan(prepared):
    batch, replay, model, balancer = prepared
    layer = BalancedMoE(model.layers[1], balancer.live)
    layer.follow(batch.micro_batch(1).layer(1), batch.parallel)
    x, mask = jax.random.normal(jax.random.key(1), (16, 6, 8)), replay.mask[16:]
    output, used = call(layer, x)
    np.testing.assert_array_equal(used[mask], replay.expert_ids[16:, :, 1][mask])
    live = BalancedMoE(model.layers[1], balancer.live)
    expected, _ = call(live, x, jnp.asarray(replay.expert_ids[16:, :, 1], jnp.int32))
    np.testing.assert_allclose(output[mask], expected[mask], atol=1e-5)
