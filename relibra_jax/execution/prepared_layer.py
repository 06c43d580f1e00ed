"""Prepared layers: index tables for dispatch, combine and replica fetch, computed before the training step.

With replay the routing is known before the step. `prepare_layer` turns the plan of one layer and micro-batch and the
experts of its tokens into tables. `prepare_layers` does so once for a batch, on the devices. The layers then only
slice, gather and send, also when `jax.checkpoint` computes them a second time. The preparation also detects invalid
plans, whose layers return NaN.

For every layer and micro-batch, the tables take 4 bytes for each row that a rank sends, receives and computes
(including the padding of lanes), and the same again for the way back. That is about 17 bytes for a token copy if
buffers are not padded. The hierarchical path needs the same again for the tokens that cross. For a large batch the
tables take gigabytes per rank (6.7 GB for 94 layers, 32 micro-batches and 131,072 copies), which
`relibra_jax.cost.memory` does not count. For such a batch, keep them in the host's memory
(``Balancer(memory_kind="pinned_host")``), or prepare each micro-batch inside the step, before its layers.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.types import EMPTY, Array, LayerPlan
from relibra_jax.execution.dispatch import Tables, make_dispatch, make_node_dispatch
from relibra_jax.execution.exchange import NCCL_EP
from relibra_jax.execution.fetch_tables import FetchTables, HostTables, make_fetch
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS, vary_over
from relibra_jax.execution.nccl_ep import make_slot_dispatch
from relibra_jax.execution.parallel import ExpertParallel, check_layer_plan, check_tokens
from relibra_jax.execution.plan_guard import is_valid
from relibra_jax.execution.residents import Residents
from relibra_jax.execution.token_pieces import split_tokens
from relibra_jax.routing.slots import copy_slots
from relibra_jax.routing.split import refit_quota, source_quota, split_quota
from relibra_jax.support.argument_types import checks_arguments

TOGETHER: Final = 4
"""The most layers whose tables are prepared at once. Preparation is bound by launches of small kernels: 0.8 to 0.9 ms a
layer on an H100, whatever the number of tokens."""


class RowCheck(NamedTuple):
    """The expected contents of a rank's slots, for layers that count arriving rows (``ExpertParallel.check_rows``)."""

    slot_expert: Int[jax.Array, "*stack S"]
    """The expert in each of this rank's slots."""
    quota: Int[jax.Array, "*stack S"]
    """The number of token copies that each slot should compute."""


class TokenTables(NamedTuple):
    """The tables that send a rank's tokens to experts and back."""

    expert_ids: Int[jax.Array, "*stack t K"]
    """The experts of this rank's tokens, in the smallest dtype that holds them and EMPTY. A layer that gets different
    ids returns NaN."""
    dispatch: tuple[Tables, ...]
    """The dispatch tables of each piece."""
    valid: Bool[jax.Array, "*stack"]
    """Whether the plan is valid, matches these tokens, and fits the buffers. Equal on all ranks of a
    group."""
    check: RowCheck | None
    """The expected rows; None without ``check_rows``."""


class PreparedLayer(NamedTuple):
    """The tables of one layer of one micro-batch, or a stack of them, for `fetch_replicas` and `moe_layer`.

    Tables are arrays over the ranks, ``[*stack, *data, N, G, ...]``: each rank holds its own part.
    """

    slot_expert: Int[Array, "*stack N G S"]
    """The expert in each slot of the plan, ``[*stack, *data, N, G, S]``. `moe_layer` compares it with the slots that
    its experts fill, so experts that were fetched or pushed for another plan give NaN."""
    fetch_tables: FetchTables | None
    """The tables of the replica fetch; None without replica slots."""
    token_tables: TokenTables | None
    """The tables for tokens; None if only replicas were prepared."""
    residents: Residents | None = None
    """The residents of the layer (`relibra_jax.execution.residents.push_residents`), without the axis of
    micro-batches and without a step number (`Residents.at`); None if there are none."""
    host_tables: HostTables | None = None
    """The tables of replicas that come from host memory (`relibra_jax.execution.host_replicas`); None if none do."""
    on_host: Residents | None = None
    """The experts that ranks keep in host memory, for ``host_tables``, likewise without the axis of micro-batches."""

    def layer(self, index: Any) -> "PreparedLayer":
        """Return element ``index`` of the first stacked axis."""
        return jax.tree.map(lambda leaf: leaf[index], self)


@checks_arguments
def prepare_layer(
    expert_ids: Integer[Array, "..."], plan: LayerPlan, parallel: ExpertParallel
) -> PreparedLayer:
    """Prepare one layer of one micro-batch. Works under jit.

    Args:
        expert_ids: the logical experts of each token, ``[B, *tokens, K]``, sharded over the ranks along the first axis;
            EMPTY on padding, which no expert computes.
        plan: the plan of this layer and micro-batch, ``[*data, ...]``. If its load is None, the function counts the
            load of the tokens (one small all-gather) and refits the quotas to it.
        parallel: the mesh, topology, buffer sizes and exchanges with which the layer executes the plan.

    Returns:
        The prepared layer, without the weights of residents.

    Raises:
        ValueError: if the shapes do not fit each other, or an id is outside ``0..E-1`` and not EMPTY. Ids that are
            traced or on other processes are not checked.
    """
    check_layer_plan(plan, parallel)
    check_tokens("expert_ids", expert_ids, parallel)
    _check_ids(expert_ids, parallel.topology.num_experts)
    parallel.print_choices(expert_ids.shape[-1])
    group = (0,) * len(parallel.data_axes)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(parallel.token_spec, parallel.plan_spec),
        out_specs=parallel.rank_spec,
    )
    def on_rank(expert_ids, plan):
        with jax.named_scope("prepare_layer"):
            plan = jax.tree.map(lambda leaf: leaf[group], plan)
            ids = expert_ids.reshape(len(expert_ids), -1, expert_ids.shape[-1]).astype(jnp.int32)
            return over_ranks(_prepare_on_rank(ids, plan, parallel), parallel)

    fetch, tokens = on_rank(expert_ids, plan)
    return PreparedLayer(jnp.asarray(plan.slot_expert), fetch, tokens)


def prepare_fetch(plan: LayerPlan, parallel: ExpertParallel) -> PreparedLayer:
    """Prepare only the replica fetch of one layer, the part of `prepare_layer` that needs no tokens."""
    check_layer_plan(plan, parallel)
    if not parallel.topology.replica_slots:
        return PreparedLayer(plan.slot_expert, None, None)
    group = (0,) * len(parallel.data_axes)

    @functools.partial(
        jax.shard_map, mesh=parallel.mesh, in_specs=parallel.plan_spec, out_specs=parallel.rank_spec
    )
    def on_rank(plan):
        plan = jax.tree.map(lambda leaf: leaf[group], plan)
        return over_ranks(_fetch_on_rank(plan, parallel), parallel)

    return PreparedLayer(plan.slot_expert, on_rank(plan), None)


@checks_arguments
@functools.partial(jax.jit, static_argnames="parallel")
def prepare_layers(
    expert_ids: Integer[Array, "M B *tokens L K"], plans: LayerPlan, parallel: ExpertParallel
) -> PreparedLayer:
    """Prepare all layers of all micro-batches of a batch, once, before its training steps.

    Args:
        expert_ids: the experts of every micro-batch's tokens, ``[M, B, *tokens, L, K]``, sharded over the ranks along
            the second axis; EMPTY on padding.
        plans: the layer plans, stacked ``[M, L, *data]``, with their load.
        parallel: the mesh, topology, buffer sizes and exchanges with which the layers execute the plans.

    Returns:
        The prepared layers, stacked ``[M, L]``.
    """

    def micro_batch(inputs):
        ids, plans = inputs
        return prepare_micro_batch(ids, plans, parallel)

    return jax.lax.map(micro_batch, (expert_ids, plans))


def prepare_micro_batch(
    expert_ids: Integer[Array, "B *tokens L K"], plans: LayerPlan, parallel: ExpertParallel
) -> PreparedLayer:
    """Prepare all layers of one micro-batch, under jit; arguments and result as in `prepare_layers`, without M."""

    def layer(inputs):
        ids, plan = inputs
        return prepare_layer(ids, plan, parallel)

    layers = expert_ids.shape[-2]
    together = next(size for size in range(TOGETHER, 0, -1) if layers % size == 0)
    return jax.lax.map(layer, (jnp.moveaxis(expert_ids, -2, 0), plans), batch_size=together)


def _prepare_on_rank(
    own_ids: jax.Array, plan: LayerPlan, parallel: ExpertParallel
) -> tuple[FetchTables | None, TokenTables]:
    """Return the tables of one rank, from ``own_ids[b, T, K]`` and the plan of its group."""
    topology = parallel.topology
    pieces = split_tokens(own_ids, parallel, padding=EMPTY)
    rank = jax.lax.axis_index(NODE), jax.lax.axis_index(LOCAL)
    loads = jnp.stack([_histogram(ids, topology.num_experts) for ids in pieces])
    if plan.load is None:
        plan = refit_quota(plan, _loads_of_ranks(loads.sum(0), parallel), topology)
    assert plan.load is not None
    plan_valid = is_valid(plan, topology, across_nodes=bool(parallel.across_nodes))
    parts: tuple[LayerPlan, ...] = (plan,)
    if parallel.pieces > 1:
        by_piece = jnp.moveaxis(_loads_of_ranks(loads, parallel), 2, 0)
        parts = split_quota(plan, by_piece, topology)
        plan_valid &= (by_piece.sum(0) == plan.load).all()
    prepared = (_dispatch_on_rank(*each, plan_valid, parallel) for each in zip(pieces, parts, strict=True))
    dispatch, fits = zip(*prepared, strict=True)
    fetch = _fetch_on_rank(plan, parallel) if topology.replica_slots else None
    valid = plan_valid & jnp.stack(fits).all() & (loads.sum(0) == plan.load[rank]).all()
    valid &= ((own_ids >= EMPTY) & (own_ids < topology.num_experts)).all()
    valid = jax.lax.pmin(valid.astype(jnp.int32), RANKS) > 0
    check = None
    if parallel.check_rows:
        slot_expert, quota = (jnp.asarray(each, jnp.int32)[rank] for each in (plan.slot_expert, plan.quota))
        check = RowCheck(slot_expert, quota)
    own_ids = own_ids.reshape(-1, own_ids.shape[-1]).astype(_signed_dtype(topology.num_experts))
    return fetch, TokenTables(own_ids, dispatch, valid, check)


def _dispatch_on_rank(
    ids: Int[jax.Array, "t K"], plan: LayerPlan, valid: Bool[jax.Array, ""], parallel: ExpertParallel
) -> tuple[Tables, Bool[jax.Array, ""]]:
    """Return the tables of one piece of a rank's tokens, and whether the buffers are large enough."""
    topology, node = parallel.topology, jax.lax.axis_index(NODE)
    slot_expert = jnp.asarray(plan.slot_expert, jnp.int32)
    # With an invalid plan no row moves.
    sent = jnp.where(valid, source_quota(plan, topology), 0)
    hops, rows = parallel.token_exchanges(*ids.shape)
    if len(hops) == 1 and hops[0].kind != NCCL_EP:
        slots = slot_expert.reshape(topology.num_ranks, -1)
        return make_dispatch(ids, slots, sent.reshape(topology.num_ranks, *slots.shape), *hops, rows=rows)
    across_nodes = bool(parallel.across_nodes) or topology.resident_slots > 0
    own = sent[jax.lax.axis_index(RANKS)]
    slot = copy_slots(ids, slot_expert, own, topology, node, across_nodes=across_nodes)
    if hops[0].kind == NCCL_EP:
        return make_slot_dispatch(
            slot, sent.sum(0, dtype=sent.dtype).reshape(topology.num_ranks, -1), rows=rows
        )
    visited = topology.visited
    grid = (visited.num_nodes, visited.ranks_per_node)
    return make_node_dispatch(slot, sent.reshape(*grid, *grid, -1), *hops, rows=rows)


def _loads_of_ranks(load: Int[jax.Array, "*rest"], parallel: ExpertParallel) -> Int[jax.Array, "N G *rest"]:
    """Return the loads of all ranks of the group."""
    return jax.lax.all_gather(load, RANKS).reshape(*parallel.ranks, *load.shape)


def _fetch_on_rank(plan: LayerPlan, parallel: ExpertParallel) -> FetchTables:
    exchange, exports = parallel.replica_exchange()
    return make_fetch(plan, exchange, exports, parallel.topology, across_nodes=bool(parallel.across_nodes))


def over_ranks(tables: Any, parallel: ExpertParallel) -> Any:
    """Reshape one rank's tables to its part ``[*data, 1, 1, ...]`` of arrays over the ranks."""
    lead = (1,) * (len(parallel.data_axes) + 2)
    axes = (*parallel.data_axes, *RANKS)
    return jax.tree.map(lambda leaf: vary_over(leaf, axes).reshape(*lead, *leaf.shape), tables)


def _check_ids(expert_ids: Array, num_experts: int) -> None:
    """Raise for the first id outside the model. Traced ids and ids on other processes are not checked."""
    if isinstance(expert_ids, jax.core.Tracer) or getattr(expert_ids, "is_fully_addressable", True) is False:
        return
    ids = np.asarray(expert_ids)
    invalid = (ids < EMPTY) | (ids >= num_experts)
    if invalid.any():
        place = tuple(int(index) for index in np.argwhere(invalid)[0])
        raise ValueError(f"expert_ids{list(place)}: {ids[place]} is outside 0..{num_experts - 1}")


def _signed_dtype(num_experts: int) -> type:
    return next(
        dtype for dtype in (jnp.int8, jnp.int16, jnp.int32) if num_experts - 1 <= jnp.iinfo(dtype).max
    )


def _histogram(ids, num_experts):
    """Return the number of token copies of each expert, ``[E]``."""
    index = jnp.where(ids < 0, num_experts, ids).ravel()
    return jnp.zeros(num_experts, jnp.int32).at[index].add(1, mode="drop")
