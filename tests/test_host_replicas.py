"""Tests of replicas from host memory: right for every share, against the fetch from other ranks and the dense layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import assert_close, mixture
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import Topology, layer_plans
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
    fetch_replicas,
    keep_on_host,
    moe_layer,
    prepare_host,
    prepare_layers,
)
from relibra_jax.routing.host_share import share_with_host

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)
MICRO_BATCHES, LAYERS, TOKENS, WIDTH, HIDDEN, TOP_K = 3, 2, 5, 6, 4, 2


@functools.cache
def case():
    """Return a batch of several micro-batches and layers: ids, plans, weights and tokens."""
    rng = np.random.default_rng(0)
    ids = random_ids(rng, (MICRO_BATCHES, LAYERS, TOPOLOGY.num_ranks, TOKENS), 16, TOP_K)
    load = load_of(ids, TOPOLOGY)
    plan = random_plan(rng, load, TOPOLOGY, across_nodes=True, fill=0.8)
    experts = rng.normal(size=(LAYERS, 16, 3, WIDTH, HIDDEN)).astype(np.float32)
    x = rng.normal(size=(TOPOLOGY.num_ranks, TOKENS, WIDTH)).astype(np.float32)
    return ids, load, plan, experts, x


def settings(fetch="padded"):
    return ExpertParallel(
        mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, fetch=fetch, exchange="padded", across_nodes=True
    )


def placed(experts, plan):
    return jnp.stack([experts[layer][home_layout(plan.home, TOPOLOGY)[layer]] for layer in range(LAYERS)])


@functools.cache
def run(count):
    """Return outputs and gradients of two layers of one micro-batch, with ``count`` replicas of a rank from the host."""
    _, load, plan, _, _ = case()
    parallel, plans = settings(), layer_plans(plan, load)
    share, sizes = (None, None) if count == 0 else share_with_host(plans, TOPOLOGY, count)

    @jax.jit
    def step(experts, x, ids, plans, number):
        tables = prepare_layers(jnp.moveaxis(ids, 1, -2), plans, parallel)
        layers = tables.layer(number)
        ids = ids[number]
        if share is not None:
            on_host = keep_on_host(placed(experts, plan), plan.home, share, sizes, parallel)
            host_tables = prepare_host(plans, share, sizes, parallel).layer(number)
            layers = layers._replace(on_host=on_host._replace(step=None), host_tables=host_tables)

        def loss(experts, x):
            def layer(x, inputs):
                home, prepared, ids = inputs
                held, x = fetch_replicas(home, prepared, x, parallel)
                gates = jnp.ones(ids.shape, jnp.float32)
                return x + moe_layer(x, ids, gates, held, prepared, parallel).output, None

            out, _ = jax.lax.scan(layer, x, (placed(experts, plan), layers, ids))
            return (out**2).sum(), out

        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(experts, x)
        return {"output": out, "experts": gradients[0], "x": gradients[1]}

    return lambda number: step(case()[3], case()[4], case()[0], plans, number)


@functools.cache
def dense(number):
    ids, _, _, experts, x = case()
    with jax.enable_x64(True):

        def loss(experts, x):
            for layer in range(LAYERS):
                x = x + mixture(x, ids[number, layer], jnp.ones(ids.shape[2:]), experts[layer])
            return (x**2).sum(), x

        arguments = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (experts, x))
        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments)
        return {"output": out, "experts": gradients[0], "x": gradients[1]}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_replicas_from_the_host_equal_those_from_ranks_and_the_dense_reference(count):
    """Weights are copied bit by bit, so the whole layer is the same, with some or with all replicas from the host."""
    for number in range(MICRO_BATCHES):
        result = run(count)(number)
        jax.tree.map(np.testing.assert_array_equal, result, run(0)(number))
        assert_close(result, dense(number), 2e-5)
