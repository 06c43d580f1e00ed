"""The exchange that fetches one layer's replicas from the ranks that hold their experts, as one rank sees it, inside
shard_map.

At the layer's start each rank *packs* the exports, copies of its experts that other ranks ask for, and *pushes* them
beside attention. The push does not depend on attention, but it is tied to the layer's input by a barrier, so that no
more than one layer's push runs ahead. A rank moves and holds its R slots, not its node's experts. The transpose brings
the replicas' gradients back to where their experts are, where they are added in a fixed order to the gradients that
are there, without a second buffer of their size: so the experts themselves pass through the fetch.

Three ways: ``padded``, where every exported expert leaves its rank once, in pieces
(`relibra_jax.execution.expert_pieces`), so that a rank sends about its exports and R experts, however hot one of them
is; a ``ragged`` exchange of packed exports (`relibra_jax.execution.exchange`, ``emulated`` included); and ``remote``,
where a rank pulls its R experts out of the exports of the others on its node, by a kernel that reads their memory
(`pallas_kernels.hopper.pull_kernel`). The gradients of what was pulled return in pieces, as in the padded way.
``remote`` is unproven: it compiles for H100, and its results on hardware have not been checked; its tables are tested
through ``remote_emulated``, which gathers everything everywhere. See docs/guides/gpu-fetch.md.

Under `jax.checkpoint` replicas are fetched again in the backward pass instead of being kept.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.pull_rows import pull_rows
from relibra_jax.execution.exchange import Exchange, send
from relibra_jax.execution.expert_pieces import assemble, scatter_pieces
from relibra_jax.execution.fetch_tables import FetchTables
from relibra_jax.execution.gather import gather_rows
from relibra_jax.execution.mesh import LOCAL, vary_over, varying_axes
from relibra_jax.types import EMPTY

type Held = tuple[jax.Array, ...]
"""The experts that a rank holds for the whole batch: those at home, then residents if there are any."""

IMPLEMENTATIONS: Final = {"remote": "mosaic", "remote_emulated": "xla"}
"""How `pallas_kernels.pull_rows` pulls, for each kind of fetch that does."""


def fetch(
    held: Held, tables: FetchTables, x: jax.Array, exchange: Exchange
) -> tuple[Held, Float[jax.Array, "R ..."], jax.Array]:
    """Fetch the replicas of this rank.

    Args:
        held: the buffers of this rank's experts, ``[H, ...]`` and by choice ``[B, ...]``.
        tables: the way of the replicas.
        x: the layer's input.
        exchange: the exchange of exported experts between the ranks of the domain.

    Returns:
        ``held``, which stands for the experts from here on; the replicas (zeros in empty slots); and ``x`` behind the
        barrier.
    """
    with jax.named_scope("replica_fetch"):
        held, exports, x = _pack(held, tables.exports, x)
        if tables.remote is not None:
            return held, _pull(exports, tables, exchange), x
        if tables.lanes is not None:
            return held, gather_rows(send(exports, tables.lanes, exchange), tables.source, tables.places), x
        return held, _send_pieces(exports, tables, exchange), x


def _send_pieces(exports, tables, exchange):
    """The replicas of this rank, from the exports of all ranks, in pieces."""
    pieces = scatter_pieces(exports, exchange.axes, exchange.ranks)
    pieces = gather_rows(pieces, tables.source, tables.places)
    return assemble(pieces, exchange.axes, exchange.ranks, exports.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pull(exports, tables, exchange):
    """The replicas of this rank, out of the exports of all ranks.

    Packed exports and not the experts themselves, which in a scanned stack are a slice of stacked parameters: XLA would
    merge slice and kernel, and a kernel inside such a fusion may be told the addresses of other buffers than its own
    (docs/guides/gpu-fetch.md).
    """
    rank, row = tables.remote
    return pull_rows(rank, row, exports, LOCAL, implementation=IMPLEMENTATIONS[exchange.kind])


def _return_pulled(exchange, tables, d_replicas):
    """The gradients of the exports, in pieces: the transpose of the padded way."""
    exports = jnp.zeros((len(tables.exports), *d_replicas.shape[1:]), d_replicas.dtype)
    exports = vary_over(exports, varying_axes(d_replicas))
    _, send_back = jax.vjp(lambda exports: _send_pieces(exports, tables, exchange), exports)
    return *send_back(d_replicas), None


_pull.defvjp(lambda exports, tables, exchange: (_pull(exports, tables, exchange), tables), _return_pulled)


@jax.custom_vjp
def _pack(held, slot, x):
    """The experts, copies of the chosen ones (zeros for EMPTY), made once ``x`` is there, and ``x`` once they are.

    The experts themselves pass no barrier: kernels read them where the parameters lie.
    """
    slot, x = jax.lax.optimization_barrier((slot, x))
    exports = sum(
        experts.at[jnp.where(here, index, len(experts))].get(mode="fill", fill_value=0)
        for experts, index, here in _in_buffers(held, slot)
    )
    exports, x = jax.lax.optimization_barrier((exports, x))
    return held, exports, x


def _unpack(slot, cotangents):
    """The copies' gradients, added to those of the experts one after the other, in place, before the layer below
    starts."""
    d_held, d_exports, d_x = cotangents
    d_exports, d_x = jax.lax.optimization_barrier((d_exports, d_x))

    def add_to(d_experts, index, here):
        def add(copy, d_experts):
            at = jnp.where(here[copy], index[copy], 0)
            d_copy = jnp.where(here[copy], d_exports[copy], 0)
            return jax.lax.dynamic_update_index_in_dim(d_experts, d_experts[at] + d_copy, at, 0)

        return jax.lax.fori_loop(0, len(slot), add, d_experts)

    d_held = tuple(add_to(*each) for each in _in_buffers(d_held, slot))
    d_held, d_x = jax.lax.optimization_barrier((d_held, d_x))
    return d_held, None, d_x


def _in_buffers(held, slot):
    """Each buffer, the index into it that ``slot`` means, and whether it means this buffer."""
    first = 0
    for experts in held:
        index = slot - first
        yield experts, index, (slot != EMPTY) & (index >= 0) & (index < len(experts))
        first += len(experts)


_pack.defvjp(lambda held, slot, x: (_pack(held, slot, x), slot), _unpack)
