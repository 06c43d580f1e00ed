"""The replicas of one layer in one micro-batch, fetched from the ranks with their experts beside attention.

At the start of the layer each rank *packs* its exports, its experts that other ranks need, and *pushes* them while
attention computes. The push does not depend on attention. A barrier makes it depend on the layer's input, so that the
push of at most one layer runs ahead. A rank moves and stores its R slots, not all experts of its node. The transpose
returns the gradients of the replicas to the ranks of their experts, and adds them there to the experts' gradients, in a
fixed order and without a second buffer of that size. For this reason the experts themselves are inputs and outputs of
the fetch.

There are three kinds of fetch:

- ``padded``: every exported expert leaves its rank once, in pieces (`relibra_jax.execution.expert_pieces`). A rank
  sends about its exports plus R experts, however hot one of them is.
- ``ragged``, and ``emulated`` for tests: an exchange of packed exports (`relibra_jax.execution.exchange`).
- ``remote``: a kernel reads the R experts from the exports in the memory of the other ranks on the node
  (`pallas_kernels.pull_rows`). The gradients return in pieces, as for ``padded``. It is unproven: it compiles
  for H100, but its results on hardware have not been checked. Tests cover its tables through ``remote_emulated``, which
  gathers all exports on every rank. See docs/guides/gpu-fetch.md.

Some or all of the weights may come from the host's memory instead (`relibra_jax.execution.host_replicas`).

With `jax.checkpoint` the backward pass fetches the replicas again instead of keeping them in memory.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from pallas_kernels.pull_rows import pull_rows
from relibra_jax.contract.types import EMPTY, Array, Topology, check_shape
from relibra_jax.execution.exchange import Exchange, send
from relibra_jax.execution.expert_pieces import assemble, scatter_pieces
from relibra_jax.execution.fetch_tables import FetchTables, HostTables
from relibra_jax.execution.gather import gather_rows
from relibra_jax.execution.memory import to_device
from relibra_jax.execution.mesh import LOCAL, RANKS, vary_over, varying_axes
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.execution.residents import Residents
from relibra_jax.support.argument_types import checks_arguments

IMPLEMENTATIONS: Final = {"remote": "mosaic", "remote_emulated": "xla"}
"""The implementation of `pallas_kernels.pull_rows` for each kind of fetch that pulls."""

type ExpertBuffers = tuple[jax.Array, ...]
"""The experts that a rank holds for the whole batch: its home experts, then its residents if there are any."""


class LayerExperts(NamedTuple):
    """The experts that ranks hold while a layer runs, as `fetch_replicas` returns them; all weights in one dtype."""

    home: Float[Array, "*ranks H three D F"]
    """Home experts ``[*data, N, G, H, 3, D, F]``: gate, up and down transposed."""
    residents: Float[Array, "*ranks B three D F"] | None
    """Residents ``[*data, N, G, B, 3, D, F]``; None if there are no resident slots."""
    replicas: Float[Array, "..."] | None
    """Replicas ``[*data, N, G, R, 3, D, F]``, zeros in empty slots; None if there are no replica slots. With
    ``ExpertParallel.late_replicas`` the pieces that each rank sends on, which `moe_layer` assembles."""
    slot_expert: Int[Array, "*ranks S"]
    """Which expert the weights in each slot are, ``[*data, N, G, S]``; EMPTY for none."""

    @property
    def weights(self) -> tuple[Array | None, Array | None, Array | None]:
        """The weights of the home experts, the residents and the replicas."""
        return self.home, self.residents, self.replicas


@checks_arguments
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
            that of the computation, of the transfer of replicas, and of the replicas' gradients. With an entry for each
            data-parallel group, ``[*data, N, G, H, 3, D, F]``, their gradients are not summed over the groups.
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
    groups = experts.shape[:-6]
    home_slots = (*parallel.ranks, topology.home_slots)
    check_shape("experts", experts.shape, (*groups, *home_slots, 3, *experts.shape[-2:]))
    if groups:
        _check_groups("experts", groups, parallel)
    check_tokens("x", x, parallel)
    residents = _check_layer_residents(layer.residents, experts, parallel)
    host_tables, kept = layer.host_tables, _check_on_host(layer, experts, parallel)
    slot_expert = _held_experts(layer, topology)
    rank, lead = parallel.rank_spec, (1,) * (len(parallel.data_axes) + 2)
    place = (0,) * len(lead)
    has_replicas = topology.replica_slots > 0
    out = (rank, None if residents is None else rank, rank if has_replicas else None)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(
            _group_spec(groups, parallel),
            None if residents is None else _group_spec(residents.shape[:-6], parallel),
            rank if has_replicas else None,
            None if host_tables is None else rank,
            None if kept is None else _group_spec(kept.shape[:-6], parallel),
            parallel.token_spec,
        ),
        out_specs=(out, parallel.token_spec),
    )
    def on_rank(experts, residents, tables, host_tables, kept, x):
        # Marked as different in every group, so that JAX sums the gradients of what groups share.
        own = experts.reshape(experts.shape[-4:])
        rank_experts = [own] if residents is None else [own, residents[place]]
        buffers = tuple(vary_over(buffer, parallel.data_axes) for buffer in rank_experts)
        replicas = None
        if has_replicas:
            tables = jax.tree.map(lambda leaf: leaf[place], tables)
            exchange, _ = parallel.replica_exchange()
            fits = tables.fits
            if host_tables is None:
                buffers, replicas, x = fetch(buffers, tables, x, exchange, late=parallel.late_replicas)
            else:
                host_tables = jax.tree.map(lambda leaf: leaf[place], host_tables)
                links = None
                if host_tables.links is not None:
                    links, _ = parallel.for_links(host_tables.sizes).replica_exchange()
                buffers, replicas, x = fetch_both_ways(buffers, x, kept, tables, host_tables, exchange, links)
                fits = fits if host_tables.links is None else fits & host_tables.links.fits
            x = x * one_or_nan(fits, x)
        buffers = tuple(buffer.reshape(*lead, *buffer.shape) for buffer in buffers)
        if replicas is not None:
            replicas = replicas.reshape(*lead, *replicas.shape)
        return (buffers[0], buffers[1] if len(buffers) > 1 else None, replicas), x

    (home, resident, replica), ready = on_rank(experts, residents, layer.fetch_tables, host_tables, kept, x)
    return LayerExperts(home, resident, replica, slot_expert), ready


def _check_on_host(layer: PreparedLayer, experts: Array, parallel: ExpertParallel) -> Array | None:
    """Return the weights that ranks keep in host memory, after checking them; None if no replica comes from there."""
    if layer.host_tables is None:
        if layer.on_host is not None:
            raise ValueError("layer.on_host is given without host_tables: compute them with prepare_host")
        return None
    if layer.on_host is None:
        raise ValueError("layer.host_tables are given without on_host: keep the experts with keep_on_host")
    if parallel.late_replicas:
        raise ValueError("late_replicas=True: replicas from the host's memory arrive before experts run")
    weights = layer.on_host.weights
    groups = weights.shape[: len(parallel.data_axes)]
    slots = (*parallel.ranks, layer.on_host.experts.shape[-1])
    _check_groups("on_host", groups, parallel)
    check_shape("on_host", weights.shape, (*groups, *slots, *np.shape(experts)[-3:]))
    if weights.dtype != experts.dtype:
        raise ValueError(
            f"on_host: dtype {weights.dtype} must be that of the experts, {experts.dtype}: keep_on_host(dtype=)"
        )
    return weights


def _held_experts(layer: PreparedLayer, topology: Topology) -> Int[Array, "*ranks S"]:
    """Return the experts in a layer's slots: residents that were pushed, replicas that are kept, others of the plan."""
    if layer.residents is None and layer.host_tables is None:
        return layer.slot_expert
    planned = jnp.asarray(layer.slot_expert)
    homes, resident, replicas = jnp.split(planned, [topology.home_slots, topology.held_slots], axis=-1)
    if layer.residents is not None:
        resident = jnp.broadcast_to(layer.residents.experts, resident.shape)
    if layer.host_tables is not None and layer.on_host is not None:
        slot = layer.host_tables.slot
        place, sent = jnp.split(layer.host_tables.place, [slot.shape[-1]], axis=-1)
        kept = jnp.broadcast_to(layer.on_host.experts, (*slot.shape[:-1], layer.on_host.experts.shape[-1]))
        expert = jnp.where(slot == EMPTY, EMPTY, jnp.take_along_axis(kept, jnp.maximum(slot, 0), -1))
        number = jax.lax.broadcasted_iota(place.dtype, (*replicas.shape, 1), replicas.ndim - 1)
        fills = place[..., None, :] == number
        copied = jnp.where(fills, expert[..., None, :], EMPTY).max(-1)
        is_sent = (sent[..., None, :] == number).any(-1)
        replicas = jnp.where(fills.any(-1), copied, jnp.where(is_sent, replicas, EMPTY))
    return jnp.concatenate([homes, resident, replicas], axis=-1)


def _group_spec(groups: tuple[int, ...], parallel: ExpertParallel) -> PartitionSpec:
    """Return the sharding spec of one layer's weights ``[*data, N, G, ...]``, or ``[N, G, ...]`` if groups share them.

    They are sharded over the ranks, and over the data axes whose groups have weights of their own.
    """
    names = (
        axis if size == parallel.mesh.shape[axis] else None
        for axis, size in zip(parallel.data_axes, groups, strict=False)
    )
    return PartitionSpec(*names, *RANKS)


def _check_groups(name: str, groups: tuple[int, ...], parallel: ExpertParallel) -> None:
    """Raise unless weights have one group along each data axis, or all."""
    check_shape(f"{name}, the axes of groups", (len(groups),), (len(parallel.data_axes),))
    for axis, size in zip(parallel.data_axes, groups, strict=True):
        if size not in (1, parallel.mesh.shape[axis]):
            raise ValueError(
                f"{name} have {size} groups along {axis!r}, but the mesh has {parallel.mesh.shape[axis]}"
            )


def _check_layer_residents(residents: Residents | None, experts: Any, parallel: ExpertParallel) -> Any:
    """Check the residents of one layer against the topology, and return their weights.

    Raises:
        ValueError: if residents are missing, the topology has no resident slots for them, or their shape is wrong.
    """
    topology: Topology = parallel.topology
    if residents is None:
        if topology.resident_slots:
            raise ValueError(
                f"resident_slots={topology.resident_slots}, but the layer has no weights of residents: set"
                " PreparedLayer.residents to the residents of push_residents, or for live routing pass balancer.live,"
                " whose topology has no such slots"
            )
        return None
    weights = residents.weights
    if not topology.resident_slots:
        raise ValueError(
            f"the layer has residents of shape {tuple(weights.shape)}, but the topology has resident_slots=0: use the"
            " topology for which they were pushed"
        )
    groups = weights.shape[: len(parallel.data_axes)]
    _check_groups("residents", groups, parallel)
    slots = (*parallel.ranks, topology.resident_slots)
    check_shape("residents", weights.shape, (*groups, *slots, *np.shape(experts)[-3:]))
    check_shape("residents.experts", residents.experts.shape, slots)
    return weights


def fetch(
    buffers: ExpertBuffers, tables: FetchTables, x: jax.Array, exchange: Exchange, *, late: bool = False
) -> tuple[ExpertBuffers, Float[jax.Array, "R ..."], jax.Array]:
    """Fetch the replicas of this rank.

    Args:
        buffers: the buffers of this rank's experts: ``[H, ...]`` home experts, and optionally ``[B, ...]`` residents.
        tables: the tables of the fetch.
        x: the layer's input.
        exchange: the exchange of exported experts between the ranks of the domain.
        late: whether to stop before the second exchange of a padded fetch (`relibra_jax.execution.late_replicas`).

    Returns:
        ``(buffers, replicas, x)``: the experts' buffers and the layer's input, which the caller must use from here on,
        and the replicas with zeros in empty slots, or the pieces that this rank sends on.
    """
    with jax.named_scope("replica_fetch"):
        buffers, exports, x = _pack(buffers, tables.exports, x)
        if tables.remote is not None:
            return buffers, _pull(exports, tables, exchange), x
        if tables.updates is not None:
            return buffers, _send_whole(exports, tables, exchange), x
        return buffers, _send_pieces(exports, tables, exchange, late=late), x


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def fetch_both_ways(
    buffers: ExpertBuffers,
    x: jax.Array,
    kept: Float[jax.Array, "..."],
    tables: FetchTables,
    host_tables: HostTables,
    exchange: Exchange,
    links: Exchange | None,
) -> tuple[ExpertBuffers, Float[jax.Array, "R ..."], jax.Array]:
    """Fetch the replicas of this rank from its host memory and from other ranks, at the same time.

    Gradients of all replicas return to the ranks of their experts.

    Args:
        buffers: the buffers of this rank's experts, as for `fetch`.
        x: the layer's input.
        kept: the experts of the layer in this rank's host memory, ``[..., K, 3, D, F]``.
        tables: the tables of a fetch of all replicas, by which gradients return.
        host_tables: the tables of the copies, and of the replicas that other ranks send.
        exchange: the exchange of exported experts between the ranks of the domain, for gradients.
        links: that for the replicas that other ranks send; None if all come from the host.

    Returns:
        As `fetch`.
    """
    slots = exchange.sizes.receive
    with jax.named_scope("host_fetch"):
        # The barrier makes the copies wait for the layer's input, so that those of one layer at most run ahead.
        slot, x = jax.lax.optimization_barrier((host_tables.slot, x))
        arriving = [_copy_from_host(kept, index) for index in slot]
    if links is not None and host_tables.links is not None:
        buffers, sent, x = fetch(buffers, host_tables.links, x, links)
        arriving += list(sent)
    with jax.named_scope("host_fetch"):
        replicas = jnp.zeros((slots, *arriving[0].shape), arriving[0].dtype)
        replicas = vary_over(replicas, varying_axes(arriving[0]))
        for expert, place in zip(arriving, host_tables.place, strict=True):
            at = jnp.maximum(place, 0)
            filled = jnp.where(place == EMPTY, replicas[at], expert)
            replicas = jax.lax.dynamic_update_index_in_dim(replicas, filled, at, 0)
    return buffers, replicas, x


def _copy_from_host(kept, slot):
    """Copy one kept expert to the device. XLA copies on a stream of its own only what one dynamic slice cuts out."""
    start = (*(0,) * (kept.ndim - 4), jnp.maximum(slot, 0), 0, 0, 0)
    copied = jax.lax.dynamic_slice(kept, start, (*(1,) * (kept.ndim - 3), *kept.shape[-3:]))
    return to_device(copied).reshape(kept.shape[-3:])


def _return_all(exchange, links, tables, cotangents):
    """Return the gradients of replicas over the links, whatever way their weights came."""
    d_buffers, d_replicas, d_x = cotangents
    send_exports = _send_pieces if tables.updates is None else _send_whole
    with jax.named_scope("replica_fetch"):
        d_exports = _return_to_exports(send_exports, d_replicas, tables, exchange)
        d_buffers, _, d_x = _unpack(tables.exports, (d_buffers, d_exports, d_x))
    return d_buffers, d_x, None, None, None


fetch_both_ways.defvjp(
    lambda buffers, x, kept, tables, host_tables, exchange, links: (
        fetch_both_ways(buffers, x, kept, tables, host_tables, exchange, links),
        tables,
    ),
    _return_all,
)


def _return_to_exports(send_exports, d_replicas, tables, exchange):
    """Return the gradients of replicas to the exports: the transpose of ``send_exports``, a fetch over the links."""
    exports = jnp.zeros((len(tables.exports), *d_replicas.shape[1:]), d_replicas.dtype)
    exports = vary_over(exports, varying_axes(d_replicas))
    _, send_back = jax.vjp(lambda exports: send_exports(exports, tables, exchange), exports)
    (d_exports,) = send_back(d_replicas)
    return d_exports


def _send_whole(exports, tables, exchange):
    """Fetch the replicas of this rank from the ranks that export them, each expert as rows of F numbers.

    XLA's kernel shares rows among its thread blocks only if there are many of them.
    """
    number = exports.shape[1] * exports.shape[2]
    rows = exports.reshape(-1, exports.shape[3])
    in_rows = jax.tree.map(lambda leaf: leaf * number, tables.updates)
    received = send(rows, in_rows, exchange.in_rows(number))
    return gather_rows(received.reshape(-1, *exports.shape[1:]), tables.source, tables.places)


def _send_pieces(exports, tables, exchange, *, late=False):
    """Fetch the replicas of this rank from the exports of all ranks, in pieces; if late, leave these unassembled."""
    pieces = scatter_pieces(exports, exchange.axes, exchange.ranks)
    pieces = gather_rows(pieces, tables.source, tables.places)
    return pieces if late else assemble(pieces, exchange.axes, exchange.ranks, exports.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pull(exports, tables, exchange):
    """Pull the replicas of this rank from the exports of all ranks.

    The kernel reads packed exports and not the experts themselves. In a scanned stack the experts are a slice of
    stacked parameters, and XLA would fuse slice and kernel. A kernel inside such a fusion may get the addresses of
    buffers other than its own (docs/guides/gpu-fetch.md).
    """
    rank, row = tables.remote
    return pull_rows(rank, row, exports, LOCAL, implementation=IMPLEMENTATIONS[exchange.kind])


def _return_pulled(exchange, tables, d_replicas):
    """Return the gradients of pulled replicas to the exports, in pieces: the transpose of the padded fetch."""
    return _return_to_exports(_send_pieces, d_replicas, tables, exchange), None


_pull.defvjp(lambda exports, tables, exchange: (_pull(exports, tables, exchange), tables), _return_pulled)


@jax.custom_vjp
def _pack(buffers, slot, x):
    """Pack the experts in the slots ``slot`` (zeros for EMPTY) as exports, and return ``(buffers, exports, x)``.

    Barriers make the exports wait for ``x``, and the returned ``x`` wait for the exports. The experts themselves pass
    no barrier, so that kernels read them directly from the parameters.
    """
    slot, x = jax.lax.optimization_barrier((slot, x))
    exports = sum(
        experts.at[jnp.where(in_buffer, index, len(experts))].get(mode="fill", fill_value=0)
        for experts, index, in_buffer in _in_buffers(buffers, slot)
    )
    exports, x = jax.lax.optimization_barrier((exports, x))
    return buffers, exports, x


def _unpack(slot, cotangents):
    """Add the gradients of the exports to those of the experts, one by one and in place.

    A barrier makes the backward pass of the layer below wait for this.
    """
    d_buffers, d_exports, d_x = cotangents
    d_exports, d_x = jax.lax.optimization_barrier((d_exports, d_x))

    def add_to(d_experts, index, in_buffer):
        def add(export, d_experts):
            place = jnp.where(in_buffer[export], index[export], 0)
            d_export = jnp.where(in_buffer[export], d_exports[export], 0)
            return jax.lax.dynamic_update_index_in_dim(d_experts, d_experts[place] + d_export, place, 0)

        return jax.lax.fori_loop(0, len(slot), add, d_experts)

    d_buffers = tuple(add_to(*buffer) for buffer in _in_buffers(d_buffers, slot))
    d_buffers, d_x = jax.lax.optimization_barrier((d_buffers, d_x))
    return d_buffers, None, d_x


def _in_buffers(buffers, slot):
    """Iterate over the buffers: each with the index of every slot in it, and whether the slot is in this buffer."""
    first = 0
    for experts in buffers:
        index = slot - first
        yield experts, index, (slot != EMPTY) & (index >= 0) & (index < len(experts))
        first += len(experts)


_pack.defvjp(lambda buffers, slot, x: (_pack(buffers, slot, x), slot), _unpack)
