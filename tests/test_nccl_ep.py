"""Tests of ``exchange="nccl_ep"``: a stand-in for TransformerEngine's operations gathers all tokens on every rank."""

import functools
import importlib.util
import sys
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense import assert_close
from support.layer import run_layer
from test_moe import EXPERTS, TOKENS, TOLERANCE, TOP_K, WIDTH, gates_of, plans, routings, topology_of, weights

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY
from relibra_jax.execution import ExpertParallel, expert_mesh, nccl_ep, parallel, start_nccl_ep
from relibra_jax.execution.mesh import RANKS, why_not_nccl_ep
from relibra_jax.execution.nccl_ep import (
    BOOTSTRAP,
    OPERATIONS,
    SlotDispatch,
    make_slot_dispatch,
    with_routing,
)
from relibra_jax.routing.sizes import count_capacities

SPARE = 2
"""The slots of a rank for which NCCL EP was started, but which layers do not have."""


class StandIn(types.SimpleNamespace):
    """TransformerEngine's operations with the recorded signatures. Its routing is the slot number of every copy."""

    config = None

    def _on_collective_stream(self, func):
        return func

    def get_ep_config(self):
        if self.config is None:
            raise RuntimeError("EpConfig has not been set")
        return self.config


def in_order(routing, slots):
    """Return the copies of all ranks in the order of slots and senders, and the place of each rank's first one."""
    number = jnp.where(routing == EMPTY, jnp.iinfo(routing.dtype).max, routing)
    order = jnp.argsort(number, stable=True)
    return order, jnp.searchsorted(number[order], jnp.arange(jax.lax.axis_size(RANKS) + 1) * slots)


def stand_in(slots):
    """Return the operations for a number of slots of a rank."""

    def prepare(topk_idx, top_k, dispatch_output_per_expert_alignment, is_outer):
        assert (topk_idx.shape[-1], dispatch_output_per_expert_alignment, is_outer) == (top_k, 0, False)
        routing = jax.lax.all_gather(topk_idx, RANKS, tiled=True).ravel()
        received = (
            jnp.zeros(slots, jnp.int32).at[routing % slots].add(routing // slots == jax.lax.axis_index(RANKS))
        )
        return received[None], received.sum()[None, None], routing[None]

    def rows_of(values, routing, rows):
        order, start = in_order(routing[0], slots)
        rank = jax.lax.axis_index(RANKS)
        place = start[rank] + jnp.arange(rows)
        copies = jax.lax.all_gather(values, RANKS, tiled=True)[order.at[place].get(mode="clip")]
        real = (place < start[rank + 1]).reshape(-1, *[1] * (values.ndim - 1))
        # What follows the last row is uninitialised.
        return jnp.where(real, copies, jnp.nan)[None]

    def dispatch(
        handle_mem,
        topk_idx,
        tokens,
        topk_weights,
        top_k,
        dispatch_output_per_expert_alignment,
        recv_capacity_per_rank,
        is_outer,
    ):
        assert (topk_weights.dtype, is_outer) == (jnp.float32, False)
        copies = jnp.repeat(tokens, top_k, 0)
        return tuple(
            rows_of(each, handle_mem, recv_capacity_per_rank) for each in (copies, topk_weights.ravel())
        )

    def combine_backward(
        handle_mem, grad, top_k, dispatch_output_per_expert_alignment, recv_capacity_per_rank, is_outer
    ):
        return rows_of(jnp.repeat(grad, top_k, 0), handle_mem, recv_capacity_per_rank)

    def copies_back(rows, routing):
        """Return the row of every copy of this rank, ``[t * K, ...]``; zero for no copy."""
        order, start = in_order(routing[0], slots)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(len(start) - 1, -1)
        number = routing[0].reshape(place.shape)
        place, number = place[jax.lax.axis_index(RANKS)], number[jax.lax.axis_index(RANKS)]
        holder = number // slots
        received = jax.lax.all_gather(rows[0], RANKS)[holder, place - start[holder]]
        return jnp.where((number != EMPTY).reshape(-1, *[1] * (rows.ndim - 2)), received, 0)

    def combine(
        handle_mem,
        expert_out,
        top_k,
        dispatch_output_per_expert_alignment,
        out_leading_shape,
        out_partition_spec,
    ):
        assert out_partition_spec is None
        copies = copies_back(expert_out, handle_mem).reshape(*out_leading_shape, top_k, -1)
        return copies.astype(jnp.float32).sum(1).astype(expert_out.dtype)

    def dispatch_backward(
        handle_mem,
        grad,
        g_recv_topk_weights,
        top_k,
        dispatch_output_per_expert_alignment,
        out_leading_shape,
        out_partition_spec,
    ):
        sums = combine(handle_mem, grad, top_k, 0, out_leading_shape, out_partition_spec)
        return sums, copies_back(g_recv_topk_weights, handle_mem).reshape(*out_leading_shape, top_k)

    operations = {
        "Prepare": prepare,
        "Dispatch": dispatch,
        "Combine": combine,
        "DispatchBwd": dispatch_backward,
        "CombineBwd": combine_backward,
    }
    classes = {f"Ep{name}Primitive": types.SimpleNamespace(impl=impl) for name, impl in operations.items()}
    return StandIn(**classes)


def config(slots, tokens=TOKENS, rows=2**20, width=WIDTH):
    return types.SimpleNamespace(
        num_local_experts=slots, max_tokens_per_rank=tokens, recv_capacity_per_rank=rows, hidden_dim=width
    )


@pytest.fixture
def installed(monkeypatch):
    """Install the stand-in for layers with four slots on 2x4, and let CPUs pass for GPUs."""
    operations = stand_in(topology_of("2x4", 1, 1).slots + SPARE)
    monkeypatch.setitem(sys.modules, OPERATIONS, operations)
    monkeypatch.setattr(parallel, "why_not_nccl_ep", lambda devices: None)
    return operations


def step_of(exchange):
    """Return the compiled layer on 2x4, with replicas and residents. With NCCL EP, gradients compute it again."""
    topology = topology_of("2x4", 1, 1)
    options = {"exchange": exchange, "across_nodes": True}
    execution = ExpertParallel(mesh=expert_mesh(topology), topology=topology, **options)

    def layer(values, ids, plan):
        experts = values["experts"][home_layout(plan.home, topology)]
        gates = gates_of(values, ids).astype(jnp.float32)
        return run_layer(values["x"], ids, gates, experts, plan, execution)

    def step(values, ids, plan):
        again = jax.checkpoint(layer) if exchange == "nccl_ep" else layer
        out, pull = jax.vjp(lambda values: again(values, ids, plan), values)
        return {"output": out} | pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))[0]

    return jax.jit(step)


@pytest.mark.slow
def test_layer_equals_that_of_the_emulated_exchange(installed):
    """Outputs and gradients, for replicas on any node and residents, and for a batch of padding."""
    installed.config = config(topology_of("2x4", 1, 1).slots + SPARE)
    values = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), weights())
    step, emulated = step_of("nccl_ep"), step_of("emulated")
    for name in ("random, across nodes", "random"):
        for micro_batch, ids in enumerate(routings()):
            arguments = values, ids, plans("2x4", 1, name, 1).layer(micro_batch).layer(0)
            assert_close(step(*arguments), emulated(*arguments), TOLERANCE["bfloat16"])


def test_no_row_moves_if_a_buffer_is_too_small():
    """NCCL EP would end the process."""
    received, slot = jnp.array([[3, 0], [2, 4]]), jnp.array([[0, 3], [2, -1]])

    @functools.partial(jax.vmap, axis_name="node")
    @functools.partial(jax.vmap, axis_name="local")
    def tables(slot):
        return [make_slot_dispatch(slot[None], received, rows=rows) for rows in (6, 5)]

    (enough, fits), (small, small_fits) = tables(slot[None])
    assert (fits & ~small_fits).all()
    np.testing.assert_array_equal(enough.slot[0, :, 0], slot)
    np.testing.assert_array_equal(enough.group_sizes[0], received)
    assert (small.slot == EMPTY).all()


@pytest.fixture
def bootstrap(installed, monkeypatch):
    """Install a stand-in for the functions that start and end NCCL EP, and return their calls."""
    calls = []

    def ep_bootstrap(
        world_size,
        rank,
        num_experts,
        max_tokens_per_rank,
        recv_capacity_per_rank,
        hidden_dim,
        max_token_dtype=jnp.bfloat16,
        max_num_sms=0,
        drop_on_overflow=False,
    ):
        calls.append((world_size, rank, num_experts, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim))
        installed.config = config(num_experts // 8, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim)

    def ep_finalize():
        calls.append("finalize")

    sharding = types.SimpleNamespace(global_shard_guard=nullcontext, MeshResource=dict)
    modules = types.SimpleNamespace(ep_bootstrap=ep_bootstrap, ep_finalize=ep_finalize)
    monkeypatch.setitem(sys.modules, BOOTSTRAP, modules)
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.sharding", sharding)
    return calls


def settings(**options):
    topology = options.pop("topology", topology_of("2x4", 1, 1))
    return ExpertParallel(mesh=expert_mesh(topology), topology=topology, exchange="nccl_ep", **options)


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_start_sizes_buffers_and_starts_again_only_for_larger_layers(bootstrap):
    plan = plans("2x4", 1, "random", 1)
    counted = count_capacities(plan, topology_of("2x4", 1, 1))
    rows = 8 * TOKENS * TOP_K
    for layer, tokens, width in (
        (settings(), TOKENS, 64),
        (settings(capacities=counted), TOKENS, 64),
        (settings(capacities=counted), 2 * TOKENS, 32),
    ):
        start_nccl_ep(layer, tokens=tokens, top_k=TOP_K, width=width)
    slots = EXPERTS // 8 + 2
    assert bootstrap == [
        (8, 0, 8 * slots, TOKENS, rows, 64),
        "finalize",
        (8, 0, 8 * slots, 2 * TOKENS, rows, 64),
    ]


def test_start_rejects_what_the_kernels_cannot_copy(bootstrap):
    with pytest.raises(ValueError, match="needs a width that is a multiple of 8, found 12"):
        start_nccl_ep(settings(), tokens=TOKENS, top_k=TOP_K, width=12)
    odd = settings(topology=topology_of("8x1", 1))
    with pytest.raises(ValueError, match="a multiple of 4 slots in a node, found 1 ranks with 3 slots each"):
        start_nccl_ep(odd, tokens=TOKENS, top_k=TOP_K, width=64)
    assert not bootstrap


def test_layer_rejects_other_dtypes_and_what_was_not_started(installed):
    tables = SlotDispatch(jnp.zeros((TOKENS, TOP_K), jnp.int32), jnp.zeros(4, jnp.int32))
    tokens = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16)
    with pytest.raises(ValueError, match="sends bfloat16, but the tokens are float32"):
        with_routing(tables, tokens.astype(jnp.float32), 8)
    with pytest.raises(ValueError, match="is not started: call start_nccl_ep in every process"):
        with_routing(tables, tokens, 8)
    installed.config = config(slots=4, rows=7)
    message = "for 4 slots, 12 tokens and 7 rows a rank, and width 6, but a layer needs 4 slots, 12 tokens and 8 rows"
    with pytest.raises(ValueError, match=message):
        with_routing(tables, tokens, 8)


def test_another_signature_of_the_package_is_an_error(installed):
    installed.EpCombinePrimitive = types.SimpleNamespace(impl=lambda handle_mem, expert_out: None)
    with pytest.raises(
        ValueError, match=r"ep.EpCombinePrimitive.impl has the parameters \(handle_mem expert_out\), but"
    ):
        nccl_ep.load(OPERATIONS)
    del installed.EpCombinePrimitive
    with pytest.raises(ValueError, match=r"EpCombinePrimitive.impl has the parameters \(nothing\)"):
        nccl_ep.load(OPERATIONS)


@pytest.mark.parametrize(
    ("kind", "processes", "package", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", (0, 1), False, "TransformerEngine is not installed: see the extra nccl-ep"),
        ("NVIDIA H100 80GB HBM3", (0, 1), True, None),
        (
            "NVIDIA H100 80GB HBM3",
            (0, 0),
            True,
            "1 processes have 2 GPUs, but NCCL EP needs a process for each",
        ),
        (
            "NVIDIA H100 80GB HBM3",
            (1, 0),
            True,
            "the ranks of the mesh are processes [1, 0], but NCCL EP needs 0 to",
        ),
        ("NVIDIA A100-SXM4-80GB", (0, 1), True, "NVIDIA A100-SXM4-80GB is not a Hopper GPU"),
    ],
)
def test_why_not_names_what_is_missing(monkeypatch, kind, processes, package, reason):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: types.SimpleNamespace() if package else None
    )
    devices = [
        types.SimpleNamespace(platform="gpu", device_kind=kind, process_index=process)
        for process in processes
    ]
    answer = why_not_nccl_ep(devices)
    assert answer is None if reason is None else answer.startswith(reason)


def test_settings_say_why_it_cannot_run(monkeypatch):
    message = "exchange='nccl_ep' cannot run: the devices of the mesh are of platform 'cpu', but NCCL EP is for GPUs"
    with pytest.raises(ValueError, match=message):
        settings()
    monkeypatch.setattr(parallel, "why_not_nccl_ep", lambda devices: None)
    for name, only, value in (("path", "auto", "flat"), ("pieces", 1, 2), ("check_rows", False, True)):
        with pytest.raises(ValueError, match=f"exchange='nccl_ep' needs {name}={only!r}, found {value!r}"):
            settings(**{name: value})
