"""Tests of layers in chunks: they equal layers that run all tokens at once, and their buffers do not grow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.dense import assert_close

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY, LayerPlan, Topology
from relibra_jax.execution import ExpertParallel, expert_mesh
from relibra_jax.execution.gating import GATINGS
from relibra_jax.nnx import MoELayer
from relibra_jax.routing.sizes import worst_case_capacities

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
WIDTH, HIDDEN = 16, 8
GATING = dataclasses.replace(GATINGS["qwen3-moe"], top_k=2)
SEQUENCES, LENGTH = 16, 5
"""Two sequences for each of 8 ranks in two groups, so a rank has 10 tokens: chunks of 4, 4 and 2 with padding."""


def settings(topology=TOPOLOGY, **options):
    return ExpertParallel(mesh=expert_mesh(topology, data=2), topology=topology, **options)


def draw(length=LENGTH):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SEQUENCES, length, WIDTH)).astype(np.float32)
    return x, rng.random(x.shape[:2]) < 0.8


def layer_of(parallel, dtype=None):
    return MoELayer(
        parallel.topology, WIDTH, HIDDEN, GATING, dtype=dtype, mesh=parallel.mesh, rngs=nnx.Rngs(0)
    )


def step_of(parallel, plan=None, dtype=None):
    """Return a jitted function of parameters, tokens and mask: gradients and outputs; and the parameters."""
    graph, params, rest = nnx.split(layer_of(parallel, dtype), nnx.Param, ...)

    @jax.jit
    def step(params, x, mask):
        def loss(params, x):
            output = nnx.merge(graph, params, rest)(x, plan=plan, parallel=parallel, mask=mask)
            slope = jnp.cos(jnp.arange(x.size).reshape(x.shape))
            return (output.output.astype(jnp.float32) * slope).sum(), output

        gradients, output = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return gradients, output

    return step, params


def replicated():
    """Return a plan that replicates an expert of another rank on the first rank of each node, for half of its load."""
    slots = np.array(home_layout(np.arange(TOPOLOGY.num_experts), TOPOLOGY))
    replicas = np.full((*slots.shape[:2], 1), EMPTY)
    replicas[:, 0, 0] = slots[:, 1, 0]
    slots = np.concatenate([slots, replicas], -1).astype(np.int32)
    home = np.arange(TOPOLOGY.num_experts, dtype=np.int32)
    slots, home = (np.stack([each] * 2) for each in (slots, home))
    return LayerPlan(slots, home, np.where(slots == EMPTY, 0, 1).astype(np.int32), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [None, pytest.param(replicated(), marks=pytest.mark.long)], ids=["home", "replicas"]
)
def test_layers_in_chunks_equal_layers_at_once(plan):
    topology = TOPOLOGY if plan is None else dataclasses.replace(TOPOLOGY, replica_slots=1)
    at_once, params = step_of(settings(topology, check_rows=True), plan)
    in_chunks, _ = step_of(settings(topology, check_rows=True, chunk_tokens=4), plan)
    x, mask = draw()
    desired_gradients, desired = at_once(params, x, mask)
    gradients, actual = in_chunks(params, x, mask)
    np.testing.assert_array_equal(actual.expert_ids, desired.expert_ids)
    assert actual.slot_rows.sum() == 2 * mask.sum()
    if plan is None:
        np.testing.assert_array_equal(actual.slot_rows, desired.slot_rows)
    else:
        # Quotas are refitted to every chunk, so the shares of replicas are rounded more often.
        assert np.asarray(actual.slot_rows)[:, :, 0, -1].all()
    assert_close((actual.output, actual.router_logits), (desired.output, desired.router_logits), 2e-6)
    assert_close(gradients, desired_gradients, 5e-6)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(desired_gradients)) > 0


def test_gradients_of_chunks_are_summed_in_float32():
    step, params = step_of(settings(chunk_tokens=4), dtype=jnp.bfloat16)
    text = str(jax.make_jaxpr(step)(params, *draw()))
    experts = f"2,2,2,2,3,{WIDTH},{HIDDEN}"
    assert f"f32[{experts}] = add_any" in text
    assert f"bf16[{experts}] = add_any" not in text


def test_layers_that_fit_a_chunk_run_at_once():
    programs = [
        str(jax.make_jaxpr(step)(params, *draw()))
        for step, params in (step_of(settings(chunk_tokens=chunk)) for chunk in (9, 10, 1024))
    ]
    assert programs[0] != programs[1] == programs[2]


def test_layers_with_capacities_or_a_load_run_at_once():
    x, mask = draw()
    ids = np.tile(np.arange(2, dtype=np.uint8), (*x.shape[:2], 1))
    planned = replicated()._replace(load=np.ones((2, 2, 2, 8), np.int32))
    capacities = worst_case_capacities(SEQUENCES * LENGTH // 8, 2, TOPOLOGY)
    with_replicas = dataclasses.replace(TOPOLOGY, replica_slots=1)
    for topology, options, arguments in (
        (TOPOLOGY, {"capacities": capacities}, (x,)),
        (with_replicas, {}, (x, ids, planned)),
    ):
        programs = set()
        for chunk_tokens in (4, 1024):
            parallel = settings(topology, chunk_tokens=chunk_tokens, **options)
            layer = layer_of(parallel)
            run = functools.partial(layer, parallel=parallel, mask=mask)
            programs.add(str(jax.make_jaxpr(lambda *arrays, run=run: run(*arrays).output)(*arguments)))
        assert len(programs) == 1


@pytest.mark.slow
def test_buffers_do_not_grow_with_tokens():
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, chunk_tokens=64)

    def temporary_bytes(length):
        step, params = step_of(parallel)
        return step.lower(params, *draw(length)).compile().memory_analysis().temp_size_in_bytes

    # A rank has 2 sequences. Each of its tokens has 2 copies, which all 8 ranks may send to one.
    more_tokens = 2 * (256 - 64)
    buffer_bytes = more_tokens * 2 * 8 * WIDTH * 4
    assert temporary_bytes(256) - temporary_bytes(64) < buffer_bytes
