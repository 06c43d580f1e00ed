"""Decoding steps with attention and experts on disjoint devices, against the same steps on one mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.runs import SMALLEST

from experiments.deploy.decode_step import SplitModel, ticks
from experiments.deploy.ping_pong import simulate_ping_pong
from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import make_model
from relibra_jax.nnx import ExpertParallel, reorder_experts

SEQUENCES, STEPS = 12, 3


@pytest.fixture(scope="module")
def monolithic():
    """A model on two ranks, some tokens, and the logits of the model token by token. Its experts then move."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=SMALLEST.num_experts, replica_slots=0)
    parallel = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:2]), topology=topology)
    model = make_model(SMALLEST, topology, mesh=parallel.mesh, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SMALLEST.vocabulary, (STEPS, SEQUENCES)).astype(np.int32)

    @nnx.jit
    def extend(model, tokens, cache):
        output, cache = model.extend(
            tokens[:, None], jnp.ones((SEQUENCES, 1), bool), cache, parallel=parallel
        )
        return model.logits(output.hidden[:, 0]), cache

    cache, logits = model.empty_cache(SEQUENCES, STEPS, parallel), []
    for column in tokens:
        of_column, cache = extend(model, column, cache)
        logits.append(np.asarray(of_column))
    home = np.stack([rng.permutation(SMALLEST.num_experts) for _ in range(SMALLEST.layers)]).astype(np.int32)
    reorder_experts(model, None, home, mesh=parallel.mesh, topology=topology)
    return model, tokens, logits


@pytest.mark.parametrize(("attention_ranks", "expert_ranks"), [(2, 4), (3, 2)])
def test_split_model_computes_the_logits_of_the_model(attention_ranks, expert_ranks, monolithic):
    model, tokens, expected = monolithic
    devices = jax.devices()[: attention_ranks + expert_ranks]
    split = SplitModel(model, devices, attention_ranks=attention_ranks)
    caches = split.empty_cache(SEQUENCES, STEPS)
    for column, logits in zip(tokens, expected, strict=True):
        found, caches = split.step(column, caches)
        np.testing.assert_allclose(found, logits, atol=2e-6)
    sides = [
        {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}
        for tree in (split.state, caches)
    ]
    assert sides == [set(devices[:attention_ranks])] * 2
    assert split.weights.devices() == set(devices[attention_ranks:])


def test_ticks_are_the_ping_pong_schedule_of_equal_times():
    layers, times = 3, np.ones((3, 2), np.float32)
    schedule = simulate_ping_pong(times, times, 0 * times)
    for name, start in (("attention", schedule.attention_start), ("experts", schedule.expert_start)):
        at = {getattr(tick, name): number for number, tick in enumerate(ticks(layers))}
        assert [[at[layer, half] for half in range(2)] for layer in range(layers)] == start.tolist()


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({}, (0, 4), "attention_ranks=0 must be an integer of at least 1 and at most 3"),
        ({}, (2, 3), "num_experts=16 must divide evenly over 3 expert ranks"),
        ({"windows": (4, 0)}, (2, 4), r"windows=\(4, 0\)"),
    ],
)
def test_split_model_rejects_what_it_cannot_run(changes, ranks, says, monolithic):
    model = nnx.clone(monolithic[0])
    model.config = dataclasses.replace(SMALLEST, **changes)
    with pytest.raises(ValueError, match=says):
        SplitModel(model, jax.devices()[: sum(ranks)], attention_ranks=ranks[0])


def test_empty_cache_rejects_sequences_that_do_not_divide(monolithic):
    split = SplitModel(monolithic[0], jax.devices()[:4], attention_ranks=2)
    with pytest.raises(ValueError, match="sequences=6 must divide evenly over 4"):
        split.empty_cache(6, 3)
    with pytest.raises(ValueError, match="tokens"):
        split.step(np.zeros(4, np.int32), split.empty_cache(8, 3))
