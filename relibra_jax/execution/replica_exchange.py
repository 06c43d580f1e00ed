"""The exchange that fetches one layer's replicas from the ranks with their experts, on one rank inside shard_map.

At the start of the layer each rank *packs* its exports, copies of its experts that other ranks need, and *pushes* them
while attention computes. The push does not depend on attention. A barrier makes it depend on the layer's input, so that
the push of at most one layer runs ahead. A rank moves and stores its R slots, not all experts of its node. The
transpose returns the gradients of the replicas to the ranks of their experts, and adds them there to the experts'
gradients, in a fixed order and without a second buffer of that size. For this reason the experts themselves are inputs
and outputs of the fetch.

There are three kinds of fetch:

- ``padded``: every exported expert leaves its rank once, in pieces (`relibra_jax.execution.expert_pieces`). A rank
  sends about its exports plus R experts, however hot one of them is.
- ``ragged``, and ``emulated`` for tests: an exchange of packed exports (`relibra_jax.execution.exchange`).
- ``remote``: a kernel reads the R experts from the exports in the memory of the other ranks on the node
  (`pallas_kernels.hopper.pull_kernel`). The gradients return in pieces, as for ``padded``. It is unproven: it compiles
  for H100, but its results on hardware have not been checked. Tests cover its tables through ``remote_emulated``, which
  gathers all exports on every rank. See docs/guides/gpu-fetch.md.

With `jax.checkpoint` the backward pass fetches the replicas again instead of keeping them in memory.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.pull_rows import pull_rows
from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.exchange import Exchange, send
from relibra_jax.execution.expert_pieces import assemble, scatter_pieces
from relibra_jax.execution.fetch_tables import FetchTables
from relibra_jax.execution.gather import gather_rows
from relibra_jax.execution.mesh import LOCAL, vary_over, varying_axes

type ExpertBuffers = tuple[jax.Array, ...]
"""The experts that a rank holds for the whole batch: its home experts, then its residents if there are any."""

IMPLEMENTATIONS: Final = {"remote": "mosaic", "remote_emulated": "xla"}
"""The implementation of `pallas_kernels.pull_rows` for each kind of fetch that pulls."""


def fetch(
    buffers: ExpertBuffers, tables: FetchTables, x: jax.Array, exchange: Exchange
) -> tuple[ExpertBuffers, Float[jax.Array, "R ..."], jax.Array]:
    """Fetch the replicas of this rank.

    Args:
        buffers: the buffers of this rank's experts: ``[H, ...]`` home experts, and optionally ``[B, ...]`` residents.
        tables: the tables of the fetch.
        x: the layer's input.
        exchange: the exchange of exported experts between the ranks of the domain.

    Returns:
        ``(buffers, replicas, x)``: the experts' buffers and the layer's input, which the caller must use from here on,
        and the replicas with zeros in empty slots.
    """
    with jax.named_scope("replica_fetch"):
        buffers, exports, x = _pack(buffers, tables.exports, x)
        if tables.remote is not None:
            return buffers, _pull(exports, tables, exchange), x
        if tables.lanes is not None:
            return (
                buffers,
                gather_rows(send(exports, tables.lanes, exchange), tables.source, tables.places),
                x,
            )
        return buffers, _send_pieces(exports, tables, exchange), x


def _send_pieces(exports, tables, exchange):
    """Fetch the replicas of this rank from the exports of all ranks, in pieces."""
    pieces = scatter_pieces(exports, exchange.axes, exchange.ranks)
    pieces = gather_rows(pieces, tables.source, tables.places)
    return assemble(pieces, exchange.axes, exchange.ranks, exports.shape[1:])


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
    exports = jnp.zeros((len(tables.exports), *d_replicas.shape[1:]), d_replicas.dtype)
    exports = vary_over(exports, varying_axes(d_replicas))
    _, send_back = jax.vjp(lambda exports: _send_pieces(exports, tables, exchange), exports)
    return *send_back(d_replicas), None


_pull.defvjp(lambda exports, tables, exchange: (_pull(exports, tables, exchange), tables), _return_pulled)


@jax.custom_vjp
def _pack(buffers, slot, x):
    """Copy the experts in the slots ``slot`` (zeros for EMPTY), and return ``(buffers, exports, x)``.

    Barriers make the copies wait for ``x``, and the returned ``x`` wait for the copies. The experts themselves pass no
    barrier, so that kernels read them directly from the parameters.
    """
    slot, x = jax.lax.optimization_barrier((slot, x))
    exports = sum(
        experts.at[jnp.where(in_buffer, index, len(experts))].get(mode="fill", fill_value=0)
        for experts, index, in_buffer in _in_buffers(buffers, slot)
    )
    exports, x = jax.lax.optimization_barrier((exports, x))
    return buffers, exports, x


def _unpack(slot, cotangents):
    """Add the gradients of the copies to those of the experts, one by one and in place.

    A barrier makes the backward pass of the layer below wait for this.
    """
    d_buffers, d_exports, d_x = cotangents
    d_exports, d_x = jax.lax.optimization_barrier((d_exports, d_x))

    def add_to(d_experts, index, in_buffer):
        def add(copy, d_experts):
            place = jnp.where(in_buffer[copy], index[copy], 0)
            d_copy = jnp.where(in_buffer[copy], d_exports[copy], 0)
            return jax.lax.dynamic_update_index_in_dim(d_experts, d_experts[place] + d_copy, place, 0)

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
