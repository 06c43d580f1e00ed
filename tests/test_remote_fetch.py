"""Tests of replicas pulled from the memory of other ranks: their tables, gradients, errors, and the kernel's copies.

No GPU and no interpreter runs the whole kernel here: `pallas_kernels.pull_rows` says which parts are not run.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_moe import plans, topology_of

from pallas_kernels.pull_rows import STAGES, chunk_shape, pull_chunks, pull_rows
from relibra_jax.contract.types import EMPTY
from relibra_jax.execution import ExpertParallel, expert_mesh, fetch_replicas
from relibra_jax.execution.mesh import why_not_remote
from relibra_jax.execution.prepared_layer import prepare_fetch
from relibra_jax.execution.residents import Residents
from relibra_jax.routing.sizes import worst_case_capacities

RESIDENTS, REPLICAS = 1, 2


def layer_plan(mesh, micro_batch):
    return plans(mesh, REPLICAS, "random", RESIDENTS).layer(micro_batch).layer(0)


@pytest.mark.parametrize("mesh", ["2x4", "1x8"])
def test_fetch_tables_pull_from_the_ranks_with_the_experts(mesh):
    topology, pulled = topology_of(mesh, REPLICAS, RESIDENTS), 0
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, fetch="remote_emulated")
    prepare = jax.jit(lambda plan: prepare_fetch(plan, parallel).fetch_tables)
    for micro_batch in range(4):
        plan = layer_plan(mesh, micro_batch)
        tables = jax.tree.map(np.asarray, prepare(plan))
        held_experts, replicas = np.split(plan.slot_expert, [topology.held_slots], -1)
        for part in tables.remote:
            np.testing.assert_array_equal(part == EMPTY, replicas == EMPTY)
        for place in map(tuple, np.argwhere(replicas != EMPTY)):
            owner = place[0], tables.remote.rank[place]
            slot = tables.exports[owner][tables.remote.row[place]]
            assert slot != EMPTY
            assert held_experts[owner][slot] == replicas[place]
            pulled += 1
    assert pulled > 8


def test_remote_rows_are_empty_for_exports_that_do_not_fit():
    """If the exports do not fit, the layer is NaN; a kernel that waited for a copy that no rank starts would hang."""
    topology = topology_of("1x8", REPLICAS, RESIDENTS)
    sizes = dataclasses.replace(worst_case_capacities(1, 1, topology), exports=1)
    mesh = expert_mesh(topology)
    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=sizes, fetch="remote_emulated")
    tables = jax.jit(lambda plan: prepare_fetch(plan, parallel).fetch_tables)(layer_plan("1x8", 0))
    assert not np.asarray(tables.fits).any()
    rank, row = map(np.asarray, tables.remote)
    assert ((rank >= EMPTY) & (rank < 8) & (row >= EMPTY) & (row < 1)).all()
    assert ((rank == EMPTY) == (row == EMPTY)).all()


@functools.cache
def fetched(mesh, kind):
    """Return the replicas, and the gradients of everything that a fetch reads, compiled once."""
    topology = topology_of(mesh, REPLICAS, RESIDENTS)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, fetch=kind)

    def loss(buffers, x, layer, cotangent):
        experts = layer.slot_expert[..., topology.home_slots : topology.held_slots]
        layer = layer._replace(residents=Residents(buffers["residents"], experts))
        out, x = fetch_replicas(buffers["home"], layer, x, parallel)
        total = sum((leaf * weight).sum() for leaf, weight in zip((*out.weights, x), cotangent, strict=True))
        return total, out.replicas

    def step(buffers, x, plan, cotangent):
        layer = prepare_fetch(plan, parallel)
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(buffers, x, layer, cotangent)

    return jax.jit(step)


@pytest.mark.parametrize("mesh", ["2x4", pytest.param("1x8", marks=pytest.mark.long)])
def test_remote_fetch_equals_the_padded_fetch_bit_for_bit(mesh):
    topology, rng = topology_of(mesh, REPLICAS, RESIDENTS), np.random.default_rng(0)

    def weights(slots):
        shape = (topology.num_nodes, topology.ranks_per_node, slots, 3, 6, 5)
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    buffers = {"home": weights(topology.home_slots), "residents": weights(RESIDENTS)}
    x = jnp.asarray(rng.normal(size=(8, 4, 6)), jnp.float32)
    cotangent = (*(weights(slots) for slots in (topology.home_slots, RESIDENTS, REPLICAS)), x + 1)
    for micro_batch in (0, 2):
        plan = layer_plan(mesh, micro_batch)
        of_kinds = [
            fetched(mesh, kind)(buffers, x, plan, cotangent) for kind in ("remote_emulated", "padded")
        ]
        assert np.asarray(of_kinds[0][1]).any()
        for actual, desired in zip(*map(jax.tree.leaves, of_kinds), strict=True):
            np.testing.assert_array_equal(actual, desired)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas_only", "exchanges"), [(True, 0), (False, 2)])
def test_remote_fetch_program_has_one_kernel(monkeypatch, replicas_only, exchanges):
    """Lowered for CUDA without a GPU, the fetch is the kernel with its references to peers, without a collective."""
    monkeypatch.setattr("relibra_jax.execution.parallel.why_not_remote", lambda devices: None)
    topology = topology_of("1x8", REPLICAS)
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, fetch="remote")
    layer = prepare_fetch(plans("1x8", REPLICAS, "random").layer(0).layer(0), parallel)

    def replicas(experts, x, layer):
        return fetch_replicas(experts, layer, x, parallel)[0].replicas

    def gradient(experts, x, layer):
        return jax.grad(lambda experts: replicas(experts, x, layer).sum())(experts)

    experts = jax.ShapeDtypeStruct((1, 8, topology.home_slots, 3, 64, 32), jnp.bfloat16)
    program = jax.jit(replicas if replicas_only else gradient).trace(experts, jnp.zeros((8, 4, 64)), layer)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == replicas_only
    assert ("uses_xla_collective_metadata = true" in text) == replicas_only
    assert text.count("all_to_all") == exchanges
    assert not any(name in text for name in ("all_gather", "reduce_scatter", "ragged", "collective_permute"))


def test_pull_rows_copies_rows_and_leaves_zeros():
    """The kernel's copies in the interpreter, which has no peers or semaphores: all buffers are in one array."""
    ranks, blocks, row_shape = 3, 2, (5, 32, 64)
    rank, row = np.array([2, 0, EMPTY, 1], np.int32), np.array([1, 1, EMPTY, 0], np.int32)
    rows = np.random.default_rng(0).normal(size=(ranks, 2, *row_shape)).astype(np.float32)
    chunks = chunk_shape(int(np.prod(row_shape)), 4)
    assert chunks == (5, 32, 64)

    def body(*refs):
        pull_chunks(*refs, ranks=ranks, blocks=blocks, peer=lambda rows, of: rows.at[of])

    ring = plgpu.SMEM((STAGES, *chunks[1:]), jnp.float32)
    with gpu_interpreter("mosaic"):
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((len(row), *chunks), jnp.float32),
            grid=(blocks,),
            grid_names=("block",),
            scratch_types=[ring, plgpu.Barrier(num_barriers=STAGES)],
        )
        out = kernel(rank, row, rows.reshape(ranks, -1, *chunks))
    desired = rows[rank, row] * (row != EMPTY)[:, None, None, None]
    np.testing.assert_array_equal(np.asarray(out).reshape(desired.shape), desired)


def test_pull_rows_rejects_rows_that_it_cannot_cut():
    with pytest.raises(ValueError, match="a row of 90 elements is not a whole number of lines of 128"):
        chunk_shape(90, 2)
    with pytest.raises(ValueError, match="implementation='nccl' is not one of mosaic, xla"):
        pull_rows(*jnp.zeros((2, 1), int), jnp.zeros((1, 128)), "local", implementation="nccl")


def test_expert_parallel_rejects_remote_fetch_where_it_cannot_run():
    topology = topology_of("1x8", REPLICAS)
    ways = {"mesh": expert_mesh(topology), "topology": topology}
    with pytest.raises(ValueError, match=r"fetch='remote' cannot run: .* are of platform 'cpu'"):
        ExpertParallel(**ways, fetch="remote")
    with pytest.raises(ValueError, match="fetch='remote' works only inside a node: use another fetch"):
        ExpertParallel(**ways, fetch="remote", across_nodes=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"device_kind": "NVIDIA A100-SXM4-80GB"}, "NVIDIA A100-SXM4-80GB is not a Hopper GPU"),
        ({"process_index": 1}, "the devices of the mesh belong to 2 processes"),
        ({"id": 5}, r"have the ids \[0, 5\], but the kernel needs 0 to 1 in order"),
    ],
)
def test_why_not_remote_names_the_reason(changes, reason):
    one = {"platform": "cuda", "device_kind": "NVIDIA H100 80GB HBM3", "process_index": 0}
    first = one | {key: value for key, value in changes.items() if key == "device_kind"}
    devices = [SimpleNamespace(**first, id=0), SimpleNamespace(**(one | {"id": 1} | changes))]
    message = why_not_remote(devices)
    if reason is None:
        assert message is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(message)
