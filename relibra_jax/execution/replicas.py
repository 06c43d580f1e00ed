"""Replicas of one layer in one micro-batch: fetched before attention, gone when the layer is done.

The exchange itself, and why it is tied to the layer's input, is in `relibra_jax.execution.replica_exchange`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float

from relibra_jax.capacity import ExchangeSizes, export_count
from relibra_jax.execution.mesh import NODE, RANKS
from relibra_jax.execution.parallel import ExpertParallel, check_layer_plan, check_tokens
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.replica_exchange import fetch
from relibra_jax.types import EMPTY, Array, LayerPlan, check_shape


class LayerExperts(NamedTuple):
    """The experts that the ranks hold while a layer runs, of one dtype: made by `fetch_replicas`."""

    home: Float[Array, "*ranks H three D F"]
    """``[*copies, N, G, H, 3, D, F]``: gate, up and down transposed."""
    replicas: Float[Array, "*ranks R three D F"] | None
    """``[*copies, N, G, R, 3, D, F]``, zeros in empty slots; None if there are no replica slots."""


def fetch_replicas(
    experts: Float[Array, "..."],
    plan: LayerPlan,
    x: Float[Array, "..."],
    parallel: ExpertParallel,
) -> tuple[LayerExperts, jax.Array]:
    """The layer's experts: those at home, and the replicas, packed now and pushed beside what follows.

    Under `jax.checkpoint` with ``nothing_saveable`` or ``save_only_these_names`` around the transformer layer, replicas
    are fetched again in the backward pass; without it, every layer's are kept for it.

    Args:
        experts: the home experts of the layer, ``[N, G, H, 3, D, F]``: gate, up and down transposed, in the dtype of
            the computation, in which replicas travel and their gradients return.
        plan: the plan of this layer and micro-batch, ``[*copies, ...]``.
        x: the transformer layer's input, ``[B, ...]``, sharded over the ranks along its first axis.
        parallel: how plans are run: mesh, topology, buffer sizes, kinds of exchange.

    Returns:
        The experts, for `relibra_jax.execution.moe.moe_layer`; and ``x``, which stands for the input from here on: the
        push starts no earlier than ``x`` is there. NaN if the exports do not fit.

    Raises:
        ValueError: if plan or weights are of another topology, or ``x`` does not divide over the ranks.
    """
    topology = parallel.topology
    check_layer_plan(plan, parallel)
    check_shape("experts", experts.shape, (*parallel.ranks, topology.home_slots, 3, *experts.shape[-2:]))
    check_tokens("x", x, parallel)
    replica_slots, rank = topology.replica_slots, parallel.rank_spec
    copy = (0,) * len(parallel.copies_over)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(PartitionSpec(*RANKS), parallel.plan_spec, parallel.token_spec),
        out_specs=(LayerExperts(rank, rank if replica_slots else None), parallel.token_spec),  # type: ignore[arg-type]
    )
    def on_rank(experts, plan, x):
        lead = (1,) * (len(copy) + 2)
        # Copies of the group share the homes, so their gradients are summed over the copies.
        home = jax.lax.pcast(experts[0, 0], parallel.copies_over, to="varying") if copy else experts[0, 0]
        if not replica_slots:
            return LayerExperts(home.reshape(*lead, *home.shape), None), x
        plan = jax.tree.map(lambda leaf: leaf[copy], plan)
        replica = plan.slot_expert[..., topology.held_slots :]
        wanted = jnp.where(replica == EMPTY, EMPTY, plan.home[replica])
        worst = topology.num_ranks * replica_slots
        exports = worst if parallel.capacities is None else parallel.capacities.exports
        # A replica that is lost anywhere is missed by tokens from everywhere.
        fits = (export_count(plan, topology).max() <= exports) | (parallel.fetch == "reduce_scatter")
        if not parallel.across_nodes:
            node = jax.lax.axis_index(NODE)
            homes = topology.ranks_per_node * topology.home_slots
            wanted = jnp.where(wanted[node] == EMPTY, EMPTY, wanted[node] - node * homes)
        sizes = ExchangeSizes(pair=replica_slots, send=max(exports, 1), receive=replica_slots)
        kind = "padded" if parallel.fetch == "reduce_scatter" else parallel.fetch
        exchange = parallel.over(parallel.domain, sizes, kind)
        home, replicas, tied = fetch(home, wanted.reshape(-1, replica_slots), x, parallel.fetch, exchange)
        held = LayerExperts(home.reshape(*lead, *home.shape), replicas.reshape(*lead, *replicas.shape))
        return held, tied * one_or_nan(fits, tied)

    return on_rank(experts, plan, x)
