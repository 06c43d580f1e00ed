"""Tests of replicas that come late or from the host, where the expert function or the plan is not the usual one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import load_of

from relibra_jax.contract.types import LayerPlan, Topology
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
    fetch_replicas,
    keep_on_host,
    moe_layer,
    prepare_host,
    prepare_layer,
)
from relibra_jax.routing.host_share import share_with_host

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
MESH = expert_mesh(TOPOLOGY, devices=jax.devices()[:2])
PARALLEL = ExpertParallel(mesh=MESH, topology=TOPOLOGY, exchange="padded", fetch="padded")
DRAW = np.random.default_rng(0)
IDS = np.stack([DRAW.permuted(np.tile(np.arange(4), (4, 1)), axis=1)[:, :2] for _ in range(2)]).astype(
    np.int32
)
X = DRAW.normal(size=(2, 4, 2)).astype(np.float32)
EXPERTS = DRAW.normal(size=(1, 1, 2, 2, 3, 2, 2)).astype(np.float32)


def plan_of(first, second):
    """Return a plan in which ranks compute their tokens with replicas where they have them."""
    slot_expert = np.array([[[0, 1, *first], [2, 3, *second]]], np.int32)
    quota = np.zeros((1, 2, 4), np.int32)
    for rank in range(2):
        for expert in IDS[rank].ravel():
            (own,) = np.nonzero(slot_expert[0, rank] == expert)
            quota[(0, rank, own[0]) if own.size else (0, expert // 2, expert % 2)] += 1
    load = load_of(IDS[None, None], TOPOLOGY)[0, 0]
    return LayerPlan(slot_expert, np.arange(4, dtype=np.int32), quota, np.asarray(load))


def stacked(plan):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None, None], plan)


def output(plan, parallel=PARALLEL, *, shared=None, expert_mlp=None):
    """Return the output of a layer and the gradient of its tokens; ``shared`` is what `share_with_host` returned."""
    layer = prepare_layer(IDS, jax.tree.map(jnp.asarray, plan), parallel)

    @jax.jit
    def step(x):
        prepared = layer
        if shared is not None:
            on_host = keep_on_host(EXPERTS, plan.home[None], *shared, parallel).layer(0)
            tables = prepare_host(stacked(plan), *shared, parallel).layer(0).layer(0)
            prepared = layer._replace(on_host=on_host, host_tables=tables)

        def loss(x):
            held, x = fetch_replicas(EXPERTS[0], prepared, x, parallel)
            gates = jnp.ones(IDS.shape, jnp.float32)
            out = moe_layer(x, IDS, gates, held, prepared, parallel, expert_mlp=expert_mlp).output
            return (out**2).sum(), out

        gradient, out = jax.grad(loss, has_aux=True)(x)
        return out, gradient

    return jax.tree.map(np.asarray, step(X))


def scale_rows(rows, weights, group_sizes, row_scale, *, implementation):
    """An expert function that does not leave out the rows after the last group."""
    del weights, group_sizes, implementation
    return (rows.astype(jnp.float32) * row_scale[:, None]).astype(rows.dtype)


@pytest.mark.slow
def test_late_replicas_have_the_gradients_of_functions_that_compute_all_rows():
    late = dataclasses.replace(PARALLEL, late_replicas=True)
    plan = plan_of([2, 3], [0, 1])
    for given, expected in zip(
        output(plan, late, expert_mlp=scale_rows), output(plan, expert_mlp=scale_rows), strict=True
    ):
        np.testing.assert_array_equal(given, expected)


@pytest.mark.slow
def test_replicas_from_the_host_are_those_of_the_plan_of_their_share_or_nan():
    plan, other = plan_of([2, -1], [0, -1]), plan_of([2, 3], [0, 1])
    shared = share_with_host(stacked(plan), TOPOLOGY, 1)
    for given, expected in zip(output(plan, shared=shared), output(plan), strict=True):
        np.testing.assert_array_equal(given, expected)
    assert np.isnan(output(other, shared=shared)[0]).all()


@pytest.mark.long
def test_a_batch_without_replicas_has_a_share():
    plan = plan_of([-1, -1], [-1, -1])
    shared = share_with_host(stacked(plan), TOPOLOGY, 1)
    np.testing.assert_array_equal(output(plan, shared=shared)[0], output(plan)[0])
