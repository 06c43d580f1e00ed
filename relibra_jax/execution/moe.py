"""The layer: dispatch, grouped expert compute, combine, as the plan of one layer of one micro-batch says.

`moe_layer` is called where a dense mixture of experts would be, on global arrays under jit;
`relibra_jax.execution.replicas.fetch_replicas` at the start of the transformer layer, before attention. Plans are data:
a compiled step serves every plan of a mesh. What a plan means for rows and buffers was worked out before the step
(`relibra_jax.execution.prepared_layer`).

A plan never changes the mathematics, and nothing is dropped. Sizes and plans are checked on the host before the step
(`relibra_jax.capacity`, `relibra_jax.plan_check`); a step that runs all the same with buffers too small, under a plan
that breaks a rule or is not one of its load, or with ids that are not the load's, returns NaN rather than a result that
misses tokens, and NaN gradients.

Pipeline, context and expert-tensor parallelism are not built.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from pallas_kernels import grouped_mlp
from relibra_jax.execution.dispatch import combine, cross, cross_back, send_copies, send_tokens
from relibra_jax.execution.dispatch_tables import NodeDispatch
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, token_exchanges
from relibra_jax.execution.replicas import LayerExperts
from relibra_jax.segments import segment_of_row, starts
from relibra_jax.types import EMPTY, Array, check_shape


class LayerOutput(NamedTuple):
    """What a layer returns."""

    output: Float[Array, "B *tokens D"]
    """Every token's experts, weighted by their gates and summed; of the shape and dtype of ``x``."""
    slot_rows: Int[Array, "*copies N G S"]
    """Rows that each slot computed: group sizes as the kernels had them, or with ``ExpertParallel.check_rows`` the rows
    that reached the slot of their expert, counted."""


def moe_layer(
    x: Float[Array, "..."],
    gates: Float[Array, "..."],
    experts: LayerExperts,
    layer: PreparedLayer,
    parallel: ExpertParallel,
) -> LayerOutput:
    """Every token's experts, wherever the plan put them, weighted by their gates and summed.

    Args:
        x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis.
        gates: the weight of each token copy, ``[B, *tokens, K]`` float32 (`relibra_jax.execution.gating`), in the order
            of the expert ids that ``layer`` was prepared from.
        experts: what `relibra_jax.execution.replicas.fetch_replicas` returned for the same ``layer``.
        layer: what `relibra_jax.execution.prepared_layer.prepare_layer` made of the tokens' experts and the plan.
        parallel: how plans are run: mesh, topology, buffer sizes, kinds of exchange.

    Returns:
        The output, NaN for every token of a copy of the group whose plan breaks a rule or does not add up to its load,
        whose buffers are too small, or whose ids are not the load's; and the rows that slots computed.

    Raises:
        ValueError: if shapes do not belong together, with both.
    """
    topology = parallel.topology
    if layer.dispatch is None:
        raise ValueError("this layer was prepared for its replicas alone: prepare_layer prepares tokens too")
    check_tokens("x", x, parallel)
    check_shape("gates", gates.shape, (*x.shape[:-1], gates.shape[-1]))
    flat = layer.dispatch.inside if isinstance(layer.dispatch, NodeDispatch) else layer.dispatch
    place = layer.dispatch.place.shape[-2:]
    tokens = x.size // x.shape[-1] // parallel.num_ranks
    check_shape("layer.dispatch.place", (place[0], flat.place.shape[-1]), (tokens, gates.shape[-1]))
    ranks = (*parallel.copies, *parallel.ranks)
    matrices = (3, x.shape[-1], experts.home.shape[-1])
    buffers = zip(LayerExperts._fields, experts, _slots(topology), strict=True)
    for name, weights, slots in buffers:
        if weights is not None or slots:
            found = (*ranks, 0) if weights is None else weights.shape
            check_shape(f"experts.{name}", found, (*ranks, slots, *matrices))
    weights = tuple(each for each in experts if each is not None)
    token, rank = parallel.token_spec, parallel.rank_spec
    copy = (0,) * len(ranks)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(token, token, rank, rank),
        out_specs=(token, rank),
    )
    def on_rank(x, gates, weights, layer):
        weights, layer = jax.tree.map(lambda leaf: leaf[copy], (weights, layer))
        tokens, scales = (each.reshape(-1, each.shape[-1]) for each in (x, gates))
        out, slot_rows = _on_rank(tokens, scales, weights, layer, parallel)
        return out.reshape(x.shape), slot_rows.reshape(*(1,) * len(copy), -1)

    layer = layer._replace(home=None, fetch=None, residents=None)  # type: ignore[arg-type]
    return LayerOutput(*on_rank(x, gates, weights, layer))


def _slots(topology) -> tuple[int, int, int]:
    return topology.home_slots, topology.resident_slots, topology.replica_slots


def _on_rank(x, gates, weights, layer: PreparedLayer, parallel: ExpertParallel):
    """The whole layer as one rank sees it: ``x[t, D]``, ``gates[t, K]``."""
    tables, sound = layer.dispatch, layer.sound
    assert tables is not None
    assert sound is not None
    exchanges, _ = token_exchanges(parallel, *gates.shape)
    # NaN goes in wherever a gradient comes out.
    x, gates = x * one_or_nan(sound, x), gates * one_or_nan(sound, gates)
    with jax.named_scope("dispatch"):
        if isinstance(tables, NodeDispatch):
            visitors, weights_here = cross(x, tables, exchanges[0]), cross(gates, tables, exchanges[0])
            flat = tables.inside
        else:
            visitors, weights_here, flat = x, gates, tables
        rows = send_tokens(visitors, flat, exchanges[-1])
        scale = send_copies(weights_here, flat, exchanges[-1])
    rest = weights[1:]
    empty = x.ravel()[:0].reshape(0, *weights[0].shape[1:])
    weights = weights[0], jnp.concatenate(rest) if rest else empty
    with jax.named_scope("experts"):
        computed = grouped_mlp(
            *(rows, *weights, jnp.where(sound, flat.group_sizes, 1), scale * one_or_nan(sound, scale)),
            implementation=parallel.implementation,
        )
    out = combine(computed, flat, exchanges[-1])
    if isinstance(tables, NodeDispatch):
        out = cross_back(out, tables, exchanges[0])
    slot_rows = flat.group_sizes
    if parallel.check_rows:
        slot_rows = _count_rows(layer, exchanges)
        as_planned = jax.lax.pmin((slot_rows == layer.quota).all().astype(jnp.int32), RANKS)
        out = out * one_or_nan(as_planned > 0, out)
    return out * one_or_nan(sound, out), slot_rows


def _count_rows(layer: PreparedLayer, exchanges):
    """Rows that reached the slot of their expert: every copy brings its expert's number, from 1, along."""
    number = layer.expert_ids + 1
    flat = layer.dispatch
    if isinstance(flat, NodeDispatch):
        number, flat = cross(number, flat, exchanges[0]), flat.inside
    number = send_copies(number, flat, exchanges[-1])
    slot, _ = segment_of_row(len(number), starts(flat.group_sizes), flat.group_sizes)
    arrived = (number > 0) & (number == layer.slot_expert[slot] + 1) & (slot != EMPTY)
    return jnp.zeros_like(flat.group_sizes).at[slot].add(arrived.astype(jnp.int32))
