"""The collective that carries rows between ranks, and the same one that brings them back.

All know ``counts[P, P]``, the rows that each rank sends to each other, so nobody asks. Three kinds:

- ``padded``: `jax.lax.all_to_all` of equal lanes, one a pair of ranks. Runs everywhere; every lane is as long as the
  longest.
- ``ragged``: `jax.lax.ragged_all_to_all`. Rows lie close; only CUDA (and TPU) implement it. Unproven: it compiles for
  H100 and its index logic is tested through ``emulated``, but its results on hardware have not been checked.
- ``emulated``: what ``ragged`` does, by gathering everything everywhere. For tests on CPU.

The transpose of sending rows is sending cotangents back, so no gradient rests on the transpose of a collective.
"""

import functools
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num

from relibra_jax.capacity import ExchangeSizes
from relibra_jax.segments import segment_rows, starts

KINDS: Final = ("padded", "ragged", "emulated")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One exchange between the ranks along ``axes``, with buffers of fixed sizes."""

    kind: str
    axes: tuple[str, ...]
    ranks: int
    sizes: ExchangeSizes

    @property
    def send_rows(self) -> int:
        """Rows of the buffer that is sent."""
        return self.ranks * self.sizes.pair if self.kind == "padded" else self.sizes.send

    @property
    def receive_rows(self) -> int:
        """Rows of the buffer that is received."""
        return self.ranks * self.sizes.pair if self.kind == "padded" else self.sizes.receive

    def lanes(self, counts: Int[jax.Array, "P P"]) -> tuple[jax.Array, jax.Array]:
        """Where, in this rank's buffers, the rows for and from each rank start."""
        if self.kind == "padded":
            start = jnp.arange(self.ranks, dtype=counts.dtype) * self.sizes.pair
            return start, start
        me = jax.lax.axis_index(self.axes)
        return starts(counts[me]), starts(counts[:, me])

    def fits(self, counts: Int[jax.Array, "P P"]) -> jax.Array:
        """Whether the buffers of all ranks hold ``counts``."""
        if self.kind == "padded":
            return counts.max() <= self.sizes.pair
        return (counts.sum(1).max() <= self.sizes.send) & (counts.sum(0).max() <= self.sizes.receive)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(rows: Num[jax.Array, "r *d"], counts: Int[jax.Array, "P P"], exchange: Exchange) -> jax.Array:
    """Carry rows to the ranks whose lanes they lie in.

    Args:
        rows: ``[send_rows, ...]``, the rows for each rank from where `Exchange.lanes` says.
        counts: rows from each rank to each rank.
        exchange: the ranks, the kind and the buffer sizes of the exchange.

    Returns:
        ``[receive_rows, ...]``, the rows from each rank from where `Exchange.lanes` says, zeros elsewhere.
    """
    return _move(rows, counts, exchange, exchange.receive_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def send_back(rows: Num[jax.Array, "r *d"], counts: Int[jax.Array, "P P"], exchange: Exchange) -> jax.Array:
    """The way back of `send`, and its transpose: ``[receive_rows, ...]`` to ``[send_rows, ...]``."""
    return _move(rows, counts.T, exchange, exchange.send_rows)


send.defvjp(
    lambda rows, counts, exchange: (send(rows, counts, exchange), counts),
    lambda exchange, counts, cotangent: (send_back(cotangent, counts, exchange), None),
)
send_back.defvjp(
    lambda rows, counts, exchange: (send_back(rows, counts, exchange), counts),
    lambda exchange, counts, cotangent: (send(cotangent, counts, exchange), None),
)


def _move(rows, counts, exchange: Exchange, receive_rows: int):
    axes = exchange.axes
    if exchange.kind == "padded":
        lanes = rows.reshape(exchange.ranks, exchange.sizes.pair, *rows.shape[1:])
        return jax.lax.all_to_all(lanes, axes, 0, 0, tiled=True).reshape(rows.shape)
    me = jax.lax.axis_index(axes)
    send_start, receive_start = starts(counts, 1), starts(counts, 0)
    if exchange.kind == "emulated":
        everywhere = jax.lax.all_gather(rows, axes, tiled=True)
        source = jnp.arange(exchange.ranks) * rows.shape[0] + send_start[:, me]
        index = segment_rows(receive_rows, receive_start[:, me], counts[:, me], source)
        return everywhere.at[jnp.where(index < 0, everywhere.shape[0], index)].get(mode="fill", fill_value=0)
    # Zeros that depend on the rows: a constant would hold a buffer from a program's start to its end.
    zero = jnp.where(counts[0, 0] < 0, rows[(0,) * rows.ndim], 0)
    empty = jnp.broadcast_to(zero, (receive_rows, *rows.shape[1:]))
    return jax.lax.ragged_all_to_all(
        rows, empty, send_start[me], counts[me], receive_start[me], counts[:, me], axis_name=axes
    )
