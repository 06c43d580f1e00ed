"""The mixture-of-experts layer without Flax: dispatch, grouped expert compute and combine under a plan.

Call `relibra_jax.execution.replicas.fetch_replicas` at the start of the transformer layer, before attention, and
`moe_layer` in the place of a dense mixture of experts. Both work on global arrays under jit. Plans are data, so one
compiled step serves every plan of a mesh. `relibra_jax.execution.prepared_layer` computes the index tables before the
step.

A plan never changes the mathematics, and the layer drops no token. The host checks sizes and plans before the step
(`relibra_jax.routing.sizes`, `relibra_jax.contract.check`). If a step still runs with too small buffers, with an
invalid plan, with a plan for another load, or with different expert ids, its output and gradients are NaN.

Pipeline, context and expert-tensor parallelism are not implemented.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Integer

from pallas_kernels import grouped_mlp
from relibra_jax.contract.types import EMPTY, Array, Topology, check_shape
from relibra_jax.execution.dispatch import Tables, Travelling, group_sizes, send_tokens
from relibra_jax.execution.exchange import Exchange
from relibra_jax.execution.late_replicas import compute_homes_first
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.pipeline import run_pieces
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, TokenTables
from relibra_jax.execution.replicas import LayerExperts
from relibra_jax.execution.token_pieces import join_tokens, split_tokens
from relibra_jax.routing.segments import segment_of_row, starts
from relibra_jax.support.argument_types import checks_arguments


@runtime_checkable
class ExpertMlp(Protocol):
    """A function that computes the rows of one rank, for the arguments of `pallas_kernels.grouped_mlp`.

    It runs inside `jax.shard_map`, so that it may compare ranks along the mesh axes ``node`` and ``local``. The
    backward pass calls it again for its gradients, so what it keeps for them is computed there. It may not close over
    arrays that have gradients. Rows after the last group, their scales and the gradients of their outputs have no
    meaning and may be NaN, which must not get into other rows or into gradients of weights. A layer with late replicas
    calls it twice, each time with some of the groups.
    """

    def __call__(
        self,
        rows: jax.Array,
        weights: Sequence[jax.Array],
        group_sizes: jax.Array,
        row_scale: jax.Array,
        *,
        implementation: str | None,
    ) -> jax.Array:
        """Return the outputs of the rows, with the arguments and results of `pallas_kernels.grouped_mlp`."""
        ...


class LayerOutput(NamedTuple):
    """The output of `moe_layer`."""

    output: Float[Array, "B *tokens D"]
    """The sum of each token's expert outputs, weighted by the gates, in the shape and dtype of ``x``."""
    slot_rows: Int[Array, "*data N G S"]
    """The number of rows that each slot computed. With ``ExpertParallel.check_rows`` the receiving rank counts the rows
    that reached the slot of their expert. Otherwise these are the kernels' group sizes, which come from the plan."""


@checks_arguments
def moe_layer(
    x: Float[Array, "..."],
    expert_ids: Integer[Array, "..."],
    gates: Float[Array, "..."],
    experts: LayerExperts,
    layer: PreparedLayer,
    parallel: ExpertParallel,
    *,
    expert_mlp: ExpertMlp | None = None,
) -> LayerOutput:
    """Compute the experts of every token where the plan puts them, and sum their outputs weighted by the gates.

    Args:
        x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis.
        expert_ids: the logical experts of each token, ``[B, *tokens, K]``, from which ``layer`` was prepared.
        gates: the weight of each token copy, ``[B, *tokens, K]`` float32 (`relibra_jax.execution.gating`).
        experts: the experts that `relibra_jax.execution.replicas.fetch_replicas` returned for the same ``layer``.
        layer: the prepared layer, from `relibra_jax.execution.prepared_layer.prepare_layer`.
        parallel: the mesh, topology, buffer sizes and exchanges with which the layer executes the plan.
        expert_mlp: the function with which every rank computes its rows. None takes `pallas_kernels.grouped_mlp`.

    Returns:
        The output, and the number of rows that each slot computed. All tokens of a group are NaN if its
        plan is invalid or does not add up to its load, its buffers are too small, or its ids do not have the load of
        the plan. All tokens of a rank are NaN if ``layer`` was prepared from different ids. All tokens are NaN if
        ``experts`` has other experts in its slots than ``layer``.

    Raises:
        ValueError: if the shapes do not fit each other, or ``layer`` was prepared without tokens.
    """
    tables = layer.token_tables
    if tables is None:
        raise ValueError("layer was prepared only for the replica fetch: prepare it with prepare_layer")
    check_tokens("x", x, parallel)
    check_shape("expert_ids", expert_ids.shape, (*x.shape[:-1], expert_ids.shape[-1]))
    check_shape("gates", gates.shape, expert_ids.shape)
    tokens, top_k = tables.expert_ids.shape[-2:]
    own = x.size // x.shape[-1] // parallel.num_ranks
    if (tokens, top_k) != (own, gates.shape[-1]):
        raise ValueError(
            f"x and expert_ids: a rank has {own} tokens with {gates.shape[-1]} experts each, but the layer was"
            f" prepared for {tokens} tokens with {top_k} experts"
        )
    lead, matrices = (*parallel.data_shape, *parallel.ranks), (3, x.shape[-1], experts.home.shape[-1])
    kinds = zip(LayerExperts._fields, experts.weights, _slots(parallel.topology), strict=False)
    late = parallel.late
    for name, buffer, slots in kinds:
        if buffer is not None or slots:
            shape = (*lead, 0) if buffer is None else buffer.shape
            expected: tuple[int, ...] = (slots, *matrices)
            if late is not None and name == "replicas":
                expected = late.pieces(matrices)
            check_shape(f"experts.{name}", shape, (*lead, *expected))
    check_shape("experts.slot_expert", experts.slot_expert.shape, layer.slot_expert.shape)
    weights = tuple(buffer for buffer in experts.weights if buffer is not None)
    place = (0,) * len(lead)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(*(parallel.token_spec,) * 3, parallel.rank_spec, parallel.rank_spec),
        out_specs=(parallel.token_spec, parallel.rank_spec),
    )
    def on_rank(x, ids, gates, weights, tables):
        weights, tables = jax.tree.map(lambda leaf: leaf[place], (weights, tables))
        tokens, scales = (array.reshape(len(array), -1, array.shape[-1]) for array in (x, gates))
        out, slot_rows = _on_rank(tokens, scales, weights, tables, parallel, expert_mlp or grouped_mlp)
        ids = ids.reshape(tables.expert_ids.shape).astype(jnp.int32)
        same_ids = (ids == tables.expert_ids.astype(jnp.int32)).all()
        return (out * one_or_nan(same_ids, out)).reshape(x.shape), slot_rows.reshape(*(1,) * len(place), -1)

    as_planned = (jnp.asarray(experts.slot_expert) == jnp.asarray(layer.slot_expert)).all()
    tables = tables._replace(valid=tables.valid & as_planned)
    return LayerOutput(*on_rank(x, expert_ids, gates, weights, tables))


def _slots(topology: Topology) -> tuple[int, int, int]:
    return topology.home_slots, topology.resident_slots, topology.replica_slots


def _on_rank(x, gates, weights, tables: TokenTables, parallel: ExpertParallel, expert_mlp: ExpertMlp):
    """Run the whole layer on one rank, on ``x[b, T, D]`` and ``gates[b, T, K]``; return ``[b * T, D]``."""
    valid, (sequences, positions, _) = tables.valid, gates.shape
    # Every input that has a gradient is multiplied by NaN if the layer is invalid, so that its gradient is NaN too.
    tokens, scales = x * one_or_nan(valid, x), gates * one_or_nan(valid, gates)
    with jax.named_scope("dispatch"):
        parts, scales = split_tokens(tokens, parallel), split_tokens(scales, parallel)
        values = tuple(map(Travelling, parts, scales))
    exchanges = parallel.token_exchanges(*scales[0].shape)[0]
    compute = functools.partial(_compute, expert_mlp, parallel.implementation)
    if parallel.late is not None:
        compute = functools.partial(compute_homes_first, compute, parallel.late)
    results = run_pieces(compute, exchanges, values, weights, tables.dispatch, valid)
    with jax.named_scope("combine"):
        out = join_tokens(results, parallel, sequences, positions)
    out = out * one_or_nan(valid, out)
    slot_rows = sum(map(group_sizes, tables.dispatch))
    if tables.check is not None:
        own_ids = tables.expert_ids.astype(jnp.int32).reshape(gates.shape)
        pieces = zip(split_tokens(own_ids, parallel, padding=EMPTY), tables.dispatch, strict=True)
        slot_rows = sum(_count_rows(*piece, tables.check.slot_expert, exchanges) for piece in pieces)
        as_planned = (slot_rows == tables.check.quota).all().astype(jnp.int32)
        out *= one_or_nan(jax.lax.pmin(as_planned, RANKS) > 0, out)
    return out, slot_rows


def _compute(expert_mlp: ExpertMlp, implementation: str | None, rows, weights, group_sizes, row_scale):
    return expert_mlp(rows, weights, group_sizes, row_scale, implementation=implementation)


def _count_rows(ids, dispatch: Tables, slot_expert, exchanges: tuple[Exchange, ...]):
    """Count the rows that reached the slot of their expert. Every copy carries its expert's number plus 1."""
    number = send_tokens(Travelling(None, ids + 1), dispatch, exchanges).copy
    assert number is not None, "values of copies travel"
    sizes = group_sizes(dispatch)
    slot, _ = segment_of_row(len(number), starts(sizes), sizes)
    arrived = (slot != EMPTY) & (number == slot_expert[slot] + 1)
    return jnp.zeros_like(sizes).at[slot].add(arrived.astype(jnp.int32))
