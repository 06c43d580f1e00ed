"""Tests of replicas from host memory: right for every share, against the fetch from other ranks and the dense layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.costs import CLUSTER, NEEDED
from support.dense import assert_close, mixture
from support.plans import load_of, random_ids, random_plan

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY, Price, Topology, layer_plans
from relibra_jax.cost.copies import fetch_time, keep_time
from relibra_jax.execution import (
    ExpertParallel,
    PreparedLayer,
    Residents,
    expert_mesh,
    fetch_replicas,
    keep_on_host,
    moe_layer,
    prepare_host,
    prepare_layers,
)
from relibra_jax.execution.fetch_tables import HostTables
from relibra_jax.routing.host_share import HostSizes, share_with_host
from relibra_jax.routing.resident_push import PushSizes

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


def settings(fetch):
    return ExpertParallel(
        mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, fetch=fetch, exchange="padded", across_nodes=True
    )


def placed(experts, plan):
    return jnp.stack([experts[layer][home_layout(plan.home, TOPOLOGY)[layer]] for layer in range(LAYERS)])


@functools.cache
def run(count, fetch="padded"):
    """Return the outputs and gradients of two layers in a micro-batch, with ``count`` replicas of a rank from the host.

    The experts that ranks keep are said to be ``other`` ones, by their numbers.
    """
    _, load, plan, _, _ = case()
    parallel, plans = settings(fetch), layer_plans(plan, load)
    share, sizes = (None, None) if count == 0 else share_with_host(plans, TOPOLOGY, count)

    @jax.jit
    def step(experts, x, ids, plans, number, other):
        tables = prepare_layers(jnp.moveaxis(ids, 1, -2), plans, parallel)
        layers = tables.layer(number)
        ids = ids[number]
        if share is not None:
            on_host = keep_on_host(placed(experts, plan), plan.home, share, sizes, parallel)
            host_tables = prepare_host(plans, share, sizes, parallel).layer(number)
            on_host = on_host._replace(experts=on_host.experts + other)
            layers = layers._replace(on_host=on_host, host_tables=host_tables)

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

    return lambda number, other=0: step(case()[3], case()[4], case()[0], plans, number, other)


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
@pytest.mark.parametrize(
    ("count", "fetch"),
    [
        (1, "padded"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, "padded"), (1, "emulated"))),
    ],
)
def test_replicas_from_the_host_equal_those_from_ranks_and_the_dense_reference(count, fetch):
    """Weights are copied bit by bit, so the whole layer is the same, with some or with all replicas from the host."""
    for number in range(MICRO_BATCHES):
        result = run(count, fetch)(number)
        jax.tree.map(np.testing.assert_array_equal, result, run(0, fetch)(number))
        assert_close(result, dense(number), 2e-5)
    assert np.isnan(run(count, fetch)(0, other=1)["output"]).all()


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_keep_the_experts_that_their_plan_reads_and_no_others(count):
    _, load, plan, _, _ = case()
    plans = layer_plans(plan, load)
    share, sizes = share_with_host(plans, TOPOLOGY, count)
    chosen, kept = np.asarray(share.from_host), np.asarray(share.kept)
    replicas = plan.slot_expert[..., TOPOLOGY.held_slots :]
    np.testing.assert_array_equal(chosen.sum(-1), np.minimum((replicas != EMPTY).sum(-1), count))
    assert not chosen[replicas == EMPTY].any()
    for place in np.ndindex(*kept.shape[:3]):
        used = {int(e) for m in range(MICRO_BATCHES) for e in replicas[m][place][chosen[m][place]]}
        assert sorted(used) == [e for e in kept[place] if e != EMPTY]
    left = np.where(chosen, EMPTY, replicas)
    assert sizes.links == (left != EMPTY).sum(-1).max()
    assert sizes.copies == count
    exports = []
    for m, layer in np.ndindex(MICRO_BATCHES, LAYERS):
        home = plan.home[layer][left[m, layer][left[m, layer] != EMPTY]]
        exports.append(np.bincount(np.unique(home) // TOPOLOGY.home_slots, minlength=8).max())
    assert sizes.exports == max(exports)


def test_a_fetch_takes_as_long_as_the_longer_of_its_two_queues():
    """The links send the rest, and the gradients of all; every rank copies as many experts from the host."""
    _, load, plan, _, _ = case()
    price = Price(
        **dict.fromkeys(("token", "copy", "crossing", "spread", "move", "push"), 0.0),
        fetch=3.0,
        fetch_across=30.0,
        from_host=2.0,
        weights_share=2 / 3,
        keep=0.5,
        host_slots=1,
    )
    plans = jax.tree.map(np.asarray, layer_plans(plan, load))
    share, _ = share_with_host(plans, TOPOLOGY, 1)
    rest = plan.slot_expert.copy()
    rest[..., TOPOLOGY.held_slots :][np.asarray(share.from_host)] = EMPTY
    one_way = dataclasses.replace(price, host_slots=0)
    sent, every = (fetch_time(each, TOPOLOGY, one_way) for each in (plans._replace(slot_expert=rest), plans))
    expected = np.maximum(np.asarray(sent) * 2 / 3 + np.asarray(every) / 3, 2.0)
    np.testing.assert_allclose(fetch_time(plans, TOPOLOGY, price), expected, rtol=1e-6)
    kept = share.kept.shape[-1]
    np.testing.assert_allclose(keep_time(plans, TOPOLOGY, price), 0.5 * LAYERS * kept, rtol=1e-6)


def test_a_price_knows_the_way_from_the_host():
    """Of 100 bytes/s from the host half are reached; weights go forward and backward, and gradients over links."""
    cluster = dataclasses.replace(CLUSTER, host_bandwidth=100.0)
    model = dataclasses.replace(NEEDED, cluster=cluster, host_slots=3)
    topology = dataclasses.replace(TOPOLOGY, num_experts=8)
    price = model.price(topology)
    expert = 3 * 4 * 5 * 2
    assert (price.host_slots, price.weights_share) == (2, 2 / 3)
    np.testing.assert_allclose(price.from_host, 2 * expert / 50)
    np.testing.assert_allclose(price.keep, expert / 50 + expert / 500)
    assert model.price(topology, updates=0, recompute=True).weights_share == 1.0
    with pytest.raises(ValueError, match="host_slots=3 needs the cluster's host_bandwidth, which is 0"):
        dataclasses.replace(model, cluster=CLUSTER)


@pytest.mark.parametrize("count", [0, 3])
def test_a_share_that_is_impossible_is_an_error(count):
    _, load, plan, _, _ = case()
    with pytest.raises(ValueError, match=f"count={count} must be an integer of at least 1 and at most 2"):
        share_with_host(layer_plans(plan, load), TOPOLOGY, count)


def test_kept_experts_and_their_tables_come_together_and_in_the_dtype_of_the_layer():
    parallel, ranks = settings("padded"), (2, 4)
    experts = jnp.zeros((*ranks, 2, 3, WIDTH, HIDDEN))
    sizes = HostSizes(copies=1, links=0, exports=0, export_copies=0, push=PushSizes(exports=1, pair=1, own=1))
    one = jnp.zeros((*ranks, 1), jnp.int32)
    tables = HostTables(one, one, None, sizes)
    kept = Residents(jnp.zeros((*ranks, 1, 3, WIDTH, HIDDEN), jnp.bfloat16), one)
    for fields, message in (
        ({"host_tables": tables}, "without on_host: keep the experts with keep_on_host"),
        ({"on_host": kept}, "without host_tables: compute them with prepare_host"),
        ({"host_tables": tables, "on_host": kept}, "dtype bfloat16 must be that of the experts, float32"),
    ):
        layer = PreparedLayer(jnp.zeros((*ranks, TOPOLOGY.slots), jnp.int32), None, None, **fields)
        with pytest.raises(ValueError, match=message):
            fetch_replicas(experts, layer, jnp.zeros((8, WIDTH)), parallel)
