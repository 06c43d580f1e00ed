"""The exchange that fetches one layer's replicas straight from their homes, as one rank sees it, inside shard_map.

At the layer's start each rank *packs* the exports, copies of its home experts that other ranks ask for, and *pushes*
them beside attention. The push does not depend on attention, but it is tied to the layer's input by a barrier, so
that no more than one layer's push runs ahead. A rank moves and holds its R slots, not its node's experts. The
transpose brings the replicas' gradients back to their homes, where they are added in a fixed order to the gradients
that are there, without a second buffer of the homes' size: so the home experts themselves pass through the fetch.

Two ways: ``reduce_scatter`` of a send buffer that is padded to every slot of the domain (zeros where another rank
owns the expert, so that the sum is a copy, exact in any dtype), and a ``ragged`` exchange of packed exports
(`relibra_jax.execution.exchange`, ``emulated`` included).

Under `jax.checkpoint` replicas are fetched again in the backward pass instead of being kept.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.execution.exchange import Exchange, send
from relibra_jax.execution.gather import inverse_index
from relibra_jax.segments import starts
from relibra_jax.types import EMPTY

FETCHES: Final = ("reduce_scatter", "ragged", "emulated")


def fetch(
    home: Float[jax.Array, "H ..."],
    wanted: Int[jax.Array, "P R"],
    x: jax.Array,
    kind: str,
    exchange: Exchange,
) -> tuple[Float[jax.Array, "H ..."], Float[jax.Array, "R ..."], jax.Array]:
    """Fetch the replicas of this rank.

    Args:
        home: this rank's home experts.
        wanted: for each replica slot of the domain, the home slot it copies, counted over the domain's ranks; EMPTY
            for none. A rank's slots ascend by home slot, so that what arrives lands in its place.
        x: the layer's input.
        kind: one of `FETCHES`.
        exchange: the exchange of exported experts between the ranks of the domain.

    Returns:
        ``home``, which stands for the home experts from here on; the replicas (zeros in empty slots); and ``x`` behind
        the barrier.
    """
    ranks, slots = wanted.shape
    me, owner = jax.lax.axis_index(exchange.axes), jnp.where(wanted == EMPTY, EMPTY, wanted // home.shape[0])
    slot = jnp.where(owner == me, wanted % home.shape[0], EMPTY).ravel()
    if kind == "reduce_scatter":
        home, exports, x = _pack(home, slot, x)
        with jax.named_scope("replica_fetch"):
            exports = exports.reshape(ranks, slots, *home.shape[1:])
            return home, jax.lax.psum_scatter(exports, exchange.axes, tiled=True)[0], x
    counts = (owner[None] == jnp.arange(ranks)[:, None, None]).sum(-1, dtype=jnp.int32)
    mine = slot != EMPTY
    packed = jnp.where(mine, starts(mine.astype(jnp.int32)), EMPTY)
    index = inverse_index(packed, exchange.send_rows)
    home, exports, x = _pack(home, jnp.where(index == EMPTY, EMPTY, slot[index]), x)
    with jax.named_scope("replica_fetch"):
        return home, send(exports, counts, exchange), x


@jax.custom_vjp
def _pack(home, slot, x):
    """The home experts, copies of the chosen ones (zeros for EMPTY), made once ``x`` is there, and ``x`` once they are.

    The home experts themselves pass no barrier: kernels read them where the parameters lie.
    """
    slot, x = jax.lax.optimization_barrier((slot, x))
    exports = home.at[jnp.where(slot == EMPTY, home.shape[0], slot)].get(mode="fill", fill_value=0)
    exports, x = jax.lax.optimization_barrier((exports, x))
    return home, exports, x


def _unpack(slot, cotangents):
    """The copies' gradients, added to those of the home experts one after the other, in place, before the layer below
    starts."""
    d_home, d_exports, d_x = cotangents
    d_exports, d_x = jax.lax.optimization_barrier((d_exports, d_x))

    def add(copy, d_home):
        at = jnp.maximum(slot[copy], 0)
        d_copy = jnp.where(slot[copy] == EMPTY, 0, d_exports[copy])
        return jax.lax.dynamic_update_index_in_dim(d_home, d_home[at] + d_copy, at, 0)

    d_home, d_x = jax.lax.optimization_barrier((jax.lax.fori_loop(0, len(slot), add, d_home), d_x))
    return d_home, None, d_x


_pack.defvjp(lambda home, slot, x: (_pack(home, slot, x), slot), _unpack)
