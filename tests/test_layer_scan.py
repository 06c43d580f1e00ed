"""The scan over layers: its values and gradients are those of `jax.lax.scan`, and totals grow in place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.plans import random_planner, random_routing

from relibra_jax import Topology
from relibra_jax.execution.gating import Gating
from relibra_jax.execution.memory import HOST, MEMORY_KINDS
from relibra_jax.models import ModelConfig, make_model
from relibra_jax.models.layer_scan import scan_layers
from relibra_jax.nnx import (
    Balancer,
    ExpertParallel,
    MoELayer,
    PreparedBatch,
    accumulate_gradients,
    expert_mesh,
)
from relibra_jax.nnx.variables import WithTotal

LAYERS, WIDTH = 3, 4
ONE_NODE = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
TWO_NODES = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1, resident_slots=1)
SUM_OF_EXPERTS = re.compile(r"= f32\[[\d,]*2,3,8,8\]\S* all-reduce\(")
"""A sum over groups of the gradients of a rank's two experts."""


def layer(x, inputs):
    weights, numbers, scale = inputs
    hidden = jnp.tanh(x @ weights) + scale * numbers
    return x + hidden, (hidden.sum(-1), numbers + 1)


def inputs():
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)), jnp.float32)
    return weights, jnp.arange(LAYERS, dtype=jnp.int32), jnp.asarray(rng.normal(size=LAYERS), jnp.float32)


def loss(x, outputs):
    sums, numbers = outputs
    return (x**2).sum() + (sums * jnp.arange(1.0, 1 + LAYERS)[:, None]).sum() + numbers.sum()


def of_jax(x, weights, scale):
    return loss(*jax.lax.scan(layer, x, (weights, inputs()[1], scale)))


@pytest.mark.parametrize("memory", MEMORY_KINDS)
def test_values_and_gradients_are_those_of_jax(memory):
    def of_ours(x, weights, scale):
        return loss(*scan_layers(layer, x, (weights, inputs()[1], scale), memory=memory))

    weights, _, scale = inputs()
    arguments = jnp.ones((2, WIDTH)), weights, scale
    desired, actual = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(*arguments) for function in (of_jax, of_ours)
    )
    for value, other in zip(jax.tree.leaves(desired), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(other, value, rtol=1e-5)
    np.testing.assert_allclose(of_ours(*arguments), of_jax(*arguments), rtol=1e-6)


def test_gradients_are_added_to_totals_in_float32():
    weights, numbers, scale = inputs()
    rounded, total = weights.astype(jnp.bfloat16), 10 + weights

    def of_total(total, runs):
        trained = WithTotal(rounded, total, runs)
        return loss(
            *scan_layers(
                layer, jnp.ones((2, WIDTH), jnp.bfloat16), (trained, numbers, scale.astype(jnp.bfloat16))
            )
        )

    def of_value(weights):
        return loss(
            *scan_layers(
                layer, jnp.ones((2, WIDTH), jnp.bfloat16), (weights, numbers, scale.astype(jnp.bfloat16))
            )
        )

    new, runs = jax.jit(jax.grad(of_total, argnums=(0, 1)))(total, jnp.zeros(()))
    gradient = jax.jit(jax.grad(of_value))(rounded)
    assert (new.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(new, total + gradient.astype(jnp.float32))
    assert runs == 1
    twice = jax.grad(lambda total, runs: of_total(total, runs) + of_total(total, runs), argnums=1)
    assert twice(total, jnp.zeros(())) == 2


@functools.cache
def gradients(in_place, runs, groups=1, topology=ONE_NODE, axis="data", gather_once=False):
    """Return the gradients of a small model whose objective runs it so many times, and the compiled program.

    With residents, the model replays a routing under a random plan, and otherwise it routes live. Groups are along the
    axis data, or along fsdp, over which experts are sharded.
    """
    mesh = expert_mesh(topology, devices=jax.devices()[: topology.num_ranks * groups], **{axis: groups})
    config = ModelConfig(
        vocabulary=16,
        width=8,
        layers=3,
        heads=2,
        kv_heads=1,
        head_width=4,
        num_experts=topology.num_experts,
        gating=Gating(top_k=2, scores="softmax"),
        expert_width=8,
        dense_layers=1,
        dense_width=8,
    )
    fsdp_axis = axis if axis == "fsdp" else None
    model = make_model(config, topology, mesh=mesh, key=jax.random.key(0), fsdp_axis=fsdp_axis)
    parallel = ExpertParallel(mesh=mesh, topology=topology, gather_once=gather_once)
    balancer = Balancer(
        random_planner(),
        parallel,
        num_layers=2,
        num_micro_batches=2,
        assign=None,
        cost="balance",
        key=jax.random.key(0),
    )
    samples, rng = 4 * topology.num_ranks, np.random.default_rng(0)
    replay, ids, mask = None, None, np.ones((samples, 5), bool)
    if topology.resident_slots:
        replay = random_routing(
            rng, samples=samples, tokens=5, layers=2, experts=topology.num_experts, top_k=2
        )
        ids, mask = replay
    batch = balancer.prepare(model, None, replay, mask=None if replay else mask)
    on_ranks = batch.to_ranks((rng.integers(0, 16, mask.shape).astype(np.int32), mask, ids))

    def objective(model, on_ranks, layers):
        hidden = [model(*on_ranks, layers, parallel=batch.parallel).hidden for _ in range(runs)]
        return sum((each**3 * on_ranks[1][..., None]).sum() for each in hidden), None

    graph, state = nnx.split(model)

    @jax.jit
    def run(state, batch, on_ranks):
        return accumulate_gradients(nnx.merge(graph, state), objective, batch, on_ranks, in_place=in_place)[0]

    compiled = run.lower(state, batch, on_ranks).compile()
    return compiled(state, batch, on_ranks), compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "topology"),
    [
        pytest.param(1, ONE_NODE, marks=pytest.mark.long),
        pytest.param(2, ONE_NODE, marks=pytest.mark.long),
        (2, TWO_NODES),
    ],
    ids=["one group", "two groups", "two groups with residents"],
)
def test_gradients_in_place_are_those_beside_totals(groups, topology):
    (desired, _), (actual, _) = (gradients(in_place, 1, groups, topology) for in_place in (False, True))
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    assert_equal(actual, desired)


@pytest.mark.slow
@pytest.mark.parametrize("gather_once", [pytest.param(False, marks=pytest.mark.long), True])
def test_gradients_of_experts_sharded_over_groups_are_those_of_groups_with_whole_ones(gather_once):
    desired, _ = gradients(True, 1, 2, TWO_NODES)
    actual, program = gradients(True, 1, 2, TWO_NODES, "fsdp", gather_once)
    assert_equal(actual, desired)
    experts = [leaf for leaf in jax.tree.leaves(actual) if leaf.shape[-4:] == (2, 3, 8, 8)]
    assert [leaf.addressable_shards[0].data.shape[-2] for leaf in experts] == [4]
    weights_and_residents = re.findall(r"= f32\[[\d,]*,3,8,8\]\S* all-gather\(.*", program)
    assert weights_and_residents
    assert any("/while/" in line for line in weights_and_residents) != gather_once


def gradients_of_layer(*, fsdp_axis="fsdp", in_place=False, **dtypes):
    """Return the gradients of a layer that routes live in two groups along fsdp, with experts gathered once."""
    mesh = expert_mesh(ONE_NODE, devices=jax.devices()[:4], fsdp=2)
    parallel = ExpertParallel(mesh=mesh, topology=ONE_NODE, gather_once=True)
    gating = Gating(top_k=2, scores="softmax")
    moe = MoELayer(ONE_NODE, 8, 8, gating, mesh=mesh, fsdp_axis=fsdp_axis, rngs=nnx.Rngs(0), **dtypes)

    @nnx.jit
    def run(moe, x):
        def objective(moe, x, _):
            return moe(x, parallel=parallel).output.sum(), None

        batch = PreparedBatch(None, parallel)
        return accumulate_gradients(moe, objective, batch, x, in_place=in_place)[0]

    return run(moe, jnp.ones((2, 4, 8), jnp.float32))


def test_gradients_of_experts_that_are_gathered_once_are_as_wide_as_their_parameters():
    with jax.enable_x64(True):
        experts = gradients_of_layer(param_dtype=jnp.float64, dtype=jnp.float32)["experts"][...]
    assert experts.dtype == jnp.float64
    assert np.any(experts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fsdp_axis": None},
            "gather_once=True, but no experts are sharded over an FSDP axis: pass fsdp_axis",
        ),
        ({"in_place": True}, "in_place=True needs a model that adds gradients where it computes them"),
    ],
)
def test_what_a_model_cannot_do_with_its_gradients_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gradients_of_layer(**options)


def assert_equal(actual, desired):
    for (path, value), other in zip(jax.tree.leaves_with_path(desired), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(
            other, value, rtol=1e-6, atol=1e-6 * np.abs(value).max(), err_msg=jax.tree_util.keystr(path)
        )
        assert np.any(value) or "head" in jax.tree_util.keystr(path)


@pytest.mark.long
def test_gradients_in_place_of_a_model_that_runs_twice_are_nan():
    assert np.isnan(gradients(True, 2)[0]["embedding"][...]).all()
    assert np.isfinite(gradients(False, 2)[0]["embedding"][...]).all()


@pytest.mark.slow
def test_gradients_of_experts_are_summed_over_groups_after_the_micro_batches():
    sums = {
        in_place: [line for line in gradients(in_place, 1, 2)[1].splitlines() if SUM_OF_EXPERTS.search(line)]
        for in_place in (False, True)
    }
    assert sums[False]
    assert all("/while/" in line for line in sums[False])
    assert len(sums[True]) == 1
    assert "/while/" not in sums[True][0]


def test_inputs_of_layers_wait_on_the_host():
    weights, numbers, scale = inputs()

    def gradient(weights):
        return jax.grad(
            lambda weights: loss(
                *scan_layers(layer, jnp.ones((2, WIDTH)), (weights, numbers, scale), memory=HOST)
            )
        )(weights)

    kept = f"float32<host>[{LAYERS},2,{WIDTH}]"
    assert kept in str(jax.make_jaxpr(gradient)(weights)).replace("f32", "float32")
