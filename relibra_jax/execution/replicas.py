"""Replicas of one layer in one micro-batch: fetched before attention, gone when the layer is done.

The exchange itself, and why it is tied to the layer's input, is in `relibra_jax.execution.replica_exchange`.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float

from relibra_jax.execution.mesh import RANKS, vary_over
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, replica_exchange
from relibra_jax.execution.replica_exchange import fetch
from relibra_jax.types import Array, Topology, check_shape


class LayerExperts(NamedTuple):
    """The experts that the ranks hold while a layer runs, of one dtype: made by `fetch_replicas`."""

    home: Float[Array, "*ranks H three D F"]
    """``[*copies, N, G, H, 3, D, F]``: gate, up and down transposed."""
    residents: Float[Array, "*ranks B three D F"] | None
    """``[*copies, N, G, B, 3, D, F]``; None if there are no resident slots."""
    replicas: Float[Array, "*ranks R three D F"] | None
    """``[*copies, N, G, R, 3, D, F]``, zeros in empty slots; None if there are no replica slots."""


def fetch_replicas(
    experts: Float[Array, "..."],
    layer: PreparedLayer,
    x: Float[Array, "..."],
    parallel: ExpertParallel,
) -> tuple[LayerExperts, jax.Array]:
    """The layer's experts: those at home, residents, and the replicas, packed now and pushed beside what follows.

    Under `jax.checkpoint` with ``nothing_saveable`` or ``save_only_these_names`` around the transformer layer, replicas
    are fetched again in the backward pass; without it, every layer's are kept for it.

    Args:
        experts: the home experts of the layer, ``[N, G, H, 3, D, F]``: gate, up and down transposed, in the dtype of
            the computation, in which replicas travel and their gradients return.
        layer: what `relibra_jax.execution.prepared_layer.prepare_layer` made of the plan of this layer and micro-batch,
            with the residents' weights if the topology has resident slots.
        x: the transformer layer's input, ``[B, ...]``, sharded over the ranks along its first axis.
        parallel: how plans are run: mesh, topology, buffer sizes, kinds of exchange.

    Returns:
        The experts, for `relibra_jax.execution.moe.moe_layer`; and ``x``, which stands for the input from here on: the
        push starts no earlier than ``x`` is there. NaN if the exports do not fit.

    Raises:
        ValueError: if weights are of another topology, residents are missing, or ``x`` does not divide over the ranks.
    """
    topology = parallel.topology
    check_shape("experts", experts.shape, (*parallel.ranks, topology.home_slots, 3, *experts.shape[-2:]))
    check_tokens("x", x, parallel)
    residents = _checked_residents(layer.residents, experts, parallel)
    rank, lead = parallel.rank_spec, (1,) * (len(parallel.copies_over) + 2)
    place = (0,) * len(lead)
    has_replicas = topology.replica_slots > 0
    out = LayerExperts(rank, None if residents is None else rank, rank if has_replicas else None)  # type: ignore[arg-type]

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(
            PartitionSpec(*RANKS),
            None if residents is None else _resident_spec(residents.shape, parallel),
            rank if has_replicas else None,
            parallel.token_spec,
        ),
        out_specs=(out, parallel.token_spec),
    )
    def on_rank(experts, residents, tables, x):
        # Copies of the group share homes and residents, so their gradients are summed over the copies.
        buffers = [experts[0, 0]] if residents is None else [experts[0, 0], residents[place]]
        held = tuple(vary_over(buffer, parallel.copies_over) for buffer in buffers)
        replicas = None
        if has_replicas:
            tables = jax.tree.map(lambda leaf: leaf[place], tables)
            exchange, _ = replica_exchange(parallel)
            held, replicas, x = fetch(held, tables, x, exchange)
            x = x * one_or_nan(tables.fits, x)
        held = tuple(each.reshape(*lead, *each.shape) for each in held)
        if replicas is not None:
            replicas = replicas.reshape(*lead, *replicas.shape)
        return LayerExperts(held[0], held[1] if len(held) > 1 else None, replicas), x

    return on_rank(experts, residents, layer.fetch, x)


def _resident_spec(shape: tuple[int, ...], parallel: ExpertParallel) -> PartitionSpec:
    """How the residents of one layer, ``[*copies, N, G, B, ...]``, are sharded: over the copies that hold their own,
    and over the ranks."""
    names = (
        axis if size == parallel.mesh.shape[axis] else None
        for axis, size in zip(parallel.copies_over, shape, strict=False)
    )
    return PartitionSpec(*names, *RANKS)


def _checked_residents(residents: Any, experts: Any, parallel: ExpertParallel) -> Any:
    """The residents of one layer, after a look at whether they are there if and only if the topology has slots for
    them.

    Raises:
        ValueError: if they are not, or of another shape.
    """
    topology: Topology = parallel.topology
    if residents is None:
        if topology.resident_slots:
            raise ValueError(
                f"resident_slots={topology.resident_slots}, but the layer has no residents' weights: give it what"
                " push_residents returned (PreparedLayer.residents)"
            )
        return None
    if not topology.resident_slots:
        raise ValueError(
            f"residents of shape {tuple(residents.shape)} for a topology with resident_slots=0: plan with the topology"
            " that they were pushed for"
        )
    found = residents.shape[: len(parallel.copies_over)]
    for axis, size in zip(parallel.copies_over, found, strict=True):
        if size not in (1, parallel.mesh.shape[axis]):
            raise ValueError(
                f"residents: {size} copies along {axis!r}, the mesh has {parallel.mesh.shape[axis]}"
            )
    slots = (*parallel.ranks, topology.resident_slots)
    check_shape("residents", residents.shape, (*found, *slots, *np.shape(experts)[-3:]))
    return residents
