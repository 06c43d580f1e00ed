"""The layer: dispatch, grouped expert compute, combine, as the plan of one layer of one micro-batch says.

`moe_layer` is called where a dense mixture of experts would be, on global arrays under jit;
`relibra_jax.execution.replicas.fetch_replicas` at the start of the transformer layer, before attention. Plans are data:
a compiled step serves every plan of a mesh. What a plan means for rows and buffers was worked out before the step
(`relibra_jax.execution.prepared_layer`).

A plan never changes the mathematics, and nothing is dropped. What does change values is asked for beside it: that hot
ranks compute in float8 (``ExpertParallel.float8``), in passes without gradients. Sizes and plans are checked on the
host before the step (`relibra_jax.capacity`, `relibra_jax.plan_check`); a step that runs all the same with buffers too
small, under a plan that breaks a rule or is not one of its load, or with ids that are not the load's, returns NaN
rather than a result that misses tokens, and NaN gradients.

Pipeline, context and expert-tensor parallelism are not built.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Integer

from pallas_kernels import grouped_mlp, grouped_mlp_float8
from relibra_jax.execution.dispatch import combine, cross, cross_back, send_copies, send_tokens
from relibra_jax.execution.dispatch_tables import Dispatch, NodeDispatch
from relibra_jax.execution.exchange import Exchange
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, TokenTables, token_exchanges
from relibra_jax.execution.replicas import LayerExperts
from relibra_jax.segments import segment_of_row, starts
from relibra_jax.types import EMPTY, Array, Topology, check_shape


class LayerOutput(NamedTuple):
    """What a layer returns."""

    output: Float[Array, "B *tokens D"]
    """Every token's experts, weighted by their gates and summed; of the shape and dtype of ``x``."""
    slot_rows: Int[Array, "*copies N G S"]
    """Rows that each slot computed. With ``ExpertParallel.check_rows`` those that reached the slot of their expert,
    counted where they arrived; without it the kernels' group sizes, which the plan says."""


def moe_layer(
    x: Float[Array, "..."],
    expert_ids: Integer[Array, "..."],
    gates: Float[Array, "..."],
    experts: LayerExperts,
    layer: PreparedLayer,
    parallel: ExpertParallel,
) -> LayerOutput:
    """Every token's experts, wherever the plan put them, weighted by their gates and summed.

    Args:
        x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis.
        expert_ids: the logical experts of each token, ``[B, *tokens, K]``, those that ``layer`` was prepared from.
        gates: the weight of each token copy, ``[B, *tokens, K]`` float32 (`relibra_jax.execution.gating`).
        experts: what `relibra_jax.execution.replicas.fetch_replicas` returned for the same ``layer``.
        layer: what `relibra_jax.execution.prepared_layer.prepare_layer` made of the tokens' experts and the plan.
        parallel: how plans are run: mesh, topology, buffer sizes, kinds of exchange.

    Returns:
        The output, and the rows that slots computed. NaN for every token of a copy of the group whose plan breaks a
        rule or does not add up to its load, whose buffers are too small, or whose ids are not the load's; and for the
        tokens of a rank whose ids are not those that ``layer`` was prepared from.

    Raises:
        ValueError: if shapes do not belong together, with both.
    """
    tables = layer.tokens
    if tables is None:
        raise ValueError("this layer was prepared for its replicas alone: prepare_layer prepares tokens too")
    check_tokens("x", x, parallel)
    check_shape("expert_ids", expert_ids.shape, (*x.shape[:-1], expert_ids.shape[-1]))
    check_shape("gates", gates.shape, expert_ids.shape)
    flat, first = _flat(tables.dispatch), tables.dispatch.place.shape
    tokens = x.size // x.shape[-1] // parallel.num_ranks
    if (first[-2], flat.place.shape[-1]) != (tokens, gates.shape[-1]):
        raise ValueError(
            f"x and expert_ids: {tokens} tokens a rank with {gates.shape[-1]} experts each, the layer was prepared for"
            f" {first[-2]} with {flat.place.shape[-1]}"
        )
    lead, matrices = (*parallel.copies, *parallel.ranks), (3, x.shape[-1], experts.home.shape[-1])
    for name, held, slots in zip(LayerExperts._fields, experts, _slots(parallel.topology), strict=True):
        if held is not None or slots:
            found = (*lead, 0) if held is None else held.shape
            check_shape(f"experts.{name}", found, (*lead, slots, *matrices))
    weights = tuple(held for held in experts if held is not None)
    place = (0,) * len(lead)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(*(parallel.token_spec,) * 3, parallel.rank_spec, parallel.rank_spec),
        out_specs=(parallel.token_spec, parallel.rank_spec),
    )
    def on_rank(x, ids, gates, weights, tables):
        weights, tables = jax.tree.map(lambda leaf: leaf[place], (weights, tables))
        tokens, ids, scales = (each.reshape(-1, each.shape[-1]) for each in (x, ids, gates))
        out, slot_rows = _on_rank(tokens, scales, weights, tables, parallel)
        same = (ids.astype(jnp.int32) == tables.expert_ids.astype(jnp.int32)).all()
        return (out * one_or_nan(same, out)).reshape(x.shape), slot_rows.reshape(*(1,) * len(place), -1)

    return LayerOutput(*on_rank(x, expert_ids, gates, weights, tables))


def _slots(topology: Topology) -> tuple[int, int, int]:
    return topology.home_slots, topology.resident_slots, topology.replica_slots


def _flat(dispatch: Dispatch | NodeDispatch) -> Dispatch:
    """The last hop, which ends in the slots."""
    return dispatch.inside if isinstance(dispatch, NodeDispatch) else dispatch


def _on_rank(x, gates, weights, tables: TokenTables, parallel: ExpertParallel):
    """The whole layer as one rank sees it: ``x[t, D]``, ``gates[t, K]``."""
    dispatch, sound = tables.dispatch, tables.sound
    flat, exchanges = _flat(dispatch), token_exchanges(parallel, *gates.shape)[0]
    # NaN goes in wherever a gradient comes out.
    visitors, scales = x * one_or_nan(sound, x), gates * one_or_nan(sound, gates)
    with jax.named_scope("dispatch"):
        if isinstance(dispatch, NodeDispatch):
            visitors, scales = (cross(each, dispatch, exchanges[0]) for each in (visitors, scales))
        rows, scale = send_tokens(visitors, flat, exchanges[-1]), send_copies(scales, flat, exchanges[-1])
    with jax.named_scope("experts"):
        operands = rows, weights, jnp.where(sound, flat.group_sizes, 1), scale * one_or_nan(sound, scale)
        computed = _compute_experts(operands, tables.float8, parallel.implementation)
    out = combine(computed, flat, exchanges[-1])
    if isinstance(dispatch, NodeDispatch):
        out = cross_back(out, dispatch, exchanges[0])
    out, slot_rows = out * one_or_nan(sound, out), flat.group_sizes
    if tables.check is not None:
        slot_rows = _count_rows(tables, tables.check.slot_expert, exchanges)
        as_planned = (slot_rows == tables.check.quota).all().astype(jnp.int32)
        out *= one_or_nan(jax.lax.pmin(as_planned, RANKS) > 0, out)
    return out, slot_rows


def _compute_experts(operands, float8, implementation: str | None):
    """The experts of one rank: exact, or in float8 where the rank is marked."""
    exact, rounded = (
        functools.partial(call, implementation=implementation) for call in (grouped_mlp, grouped_mlp_float8)
    )
    return exact(*operands) if float8 is None else jax.lax.cond(float8, rounded, exact, *operands)


def _count_rows(tables: TokenTables, slot_expert, exchanges: tuple[Exchange, ...]):
    """Rows that reached the slot of their expert: every copy brings its expert's number, from 1, along."""
    number, flat = tables.expert_ids.astype(jnp.int32) + 1, _flat(tables.dispatch)
    if isinstance(tables.dispatch, NodeDispatch):
        number = cross(number, tables.dispatch, exchanges[0])
    number = send_copies(number, flat, exchanges[-1])
    slot, _ = segment_of_row(len(number), starts(flat.group_sizes), flat.group_sizes)
    arrived = (slot != EMPTY) & (number == slot_expert[slot] + 1)
    return jnp.zeros_like(flat.group_sizes).at[slot].add(arrived.astype(jnp.int32))
