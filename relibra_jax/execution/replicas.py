"""The replicas of one layer in one micro-batch, which exist from before attention to the end of the layer.

`relibra_jax.execution.replica_exchange` has the exchange, and explains why it depends on the layer's input.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float

from relibra_jax.contract.types import Array, Topology, check_shape
from relibra_jax.execution.mesh import RANKS, vary_over
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, replica_exchange
from relibra_jax.execution.replica_exchange import fetch


class LayerExperts(NamedTuple):
    """The experts that the ranks hold while a layer runs, all in one dtype, as `fetch_replicas` returns them."""

    home: Float[Array, "*ranks H three D F"]
    """Home experts ``[*copies, N, G, H, 3, D, F]``: gate, up and down transposed."""
    residents: Float[Array, "*ranks B three D F"] | None
    """Residents ``[*copies, N, G, B, 3, D, F]``; None if there are no resident slots."""
    replicas: Float[Array, "*ranks R three D F"] | None
    """Replicas ``[*copies, N, G, R, 3, D, F]``, zeros in empty slots; None if there are no replica slots."""


def fetch_replicas(
    experts: Float[Array, "..."],
    layer: PreparedLayer,
    x: Float[Array, "..."],
    parallel: ExpertParallel,
) -> tuple[LayerExperts, jax.Array]:
    """Start the fetch of a layer's replicas, and return all experts of the layer: homes, residents and replicas.

    The ranks pack the exported experts now and send them while the following computation runs. Use `jax.checkpoint`
    with ``nothing_saveable`` or ``save_only_these_names`` for the transformer layer: the backward pass then fetches
    the replicas again, instead of keeping those of every layer in memory.

    Args:
        experts: the home experts of the layer, ``[N, G, H, 3, D, F]``: gate, up and down transposed. Their dtype is
            that of the computation, of the transfer of replicas, and of the replicas' gradients.
        layer: the prepared layer (`relibra_jax.execution.prepared_layer.prepare_layer`), with the weights of the
            residents if the topology has resident slots.
        x: the transformer layer's input, ``[B, ...]``, sharded over the ranks along its first axis.
        parallel: the mesh, topology, buffer sizes and exchanges with which the layer executes the plan.

    Returns:
        ``(experts, x)``: the experts for `relibra_jax.execution.moe.moe_layer`, and the input. Use this ``x`` from here
        on, because it makes the fetch wait for the layer's input. It is NaN if the exports do not fit the buffers.

    Raises:
        ValueError: if weights belong to a different topology, residents are missing, or ``x`` does not divide evenly
            over the ranks.
    """
    topology = parallel.topology
    check_shape("experts", experts.shape, (*parallel.ranks, topology.home_slots, 3, *experts.shape[-2:]))
    check_tokens("x", x, parallel)
    residents = _check_layer_residents(layer.residents, experts, parallel)
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
        # The copies of the group share homes and residents, so JAX must sum their gradients over the copies.
        rank_experts = [experts[0, 0]] if residents is None else [experts[0, 0], residents[place]]
        buffers = tuple(vary_over(buffer, parallel.copies_over) for buffer in rank_experts)
        replicas = None
        if has_replicas:
            tables = jax.tree.map(lambda leaf: leaf[place], tables)
            exchange, _ = replica_exchange(parallel)
            buffers, replicas, x = fetch(buffers, tables, x, exchange)
            x = x * one_or_nan(tables.fits, x)
        buffers = tuple(buffer.reshape(*lead, *buffer.shape) for buffer in buffers)
        if replicas is not None:
            replicas = replicas.reshape(*lead, *replicas.shape)
        return LayerExperts(buffers[0], buffers[1] if len(buffers) > 1 else None, replicas), x

    return on_rank(experts, residents, layer.fetch, x)


def _resident_spec(shape: tuple[int, ...], parallel: ExpertParallel) -> PartitionSpec:
    """Return the sharding spec of one layer's residents ``[*copies, N, G, B, ...]``.

    They are sharded over the ranks, and over the axes of copies that have separate residents.
    """
    names = (
        axis if size == parallel.mesh.shape[axis] else None
        for axis, size in zip(parallel.copies_over, shape, strict=False)
    )
    return PartitionSpec(*names, *RANKS)


def _check_layer_residents(residents: Any, experts: Any, parallel: ExpertParallel) -> Any:
    """Check the residents of one layer against the topology, and return them.

    Raises:
        ValueError: if residents are missing, the topology has no resident slots for them, or their shape is wrong.
    """
    topology: Topology = parallel.topology
    if residents is None:
        if topology.resident_slots:
            raise ValueError(
                f"resident_slots={topology.resident_slots}, but the layer has no weights of residents: set"
                " PreparedLayer.residents to the result of push_residents"
            )
        return None
    if not topology.resident_slots:
        raise ValueError(
            f"the layer has residents of shape {tuple(residents.shape)}, but the topology has resident_slots=0: use the"
            " topology for which they were pushed"
        )
    copies = residents.shape[: len(parallel.copies_over)]
    for axis, size in zip(parallel.copies_over, copies, strict=True):
        if size not in (1, parallel.mesh.shape[axis]):
            raise ValueError(
                f"residents have {size} copies along {axis!r}, but the mesh has {parallel.mesh.shape[axis]}"
            )
    slots = (*parallel.ranks, topology.resident_slots)
    check_shape("residents", residents.shape, (*copies, *slots, *np.shape(experts)[-3:]))
    return residents
