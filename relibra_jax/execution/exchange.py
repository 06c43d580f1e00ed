"""The collective that carries rows between ranks, and the same one that brings them back.

Every rank knows its `Lanes` beforehand, the rows for and from each other rank, so nobody asks. Three kinds:

- ``padded``: `jax.lax.all_to_all` of equal lanes, one a pair of ranks. Runs everywhere; every lane is as long as the
  longest. What a rank keeps lies behind its lanes, so that it makes none of them longer.
- ``ragged``: `jax.lax.ragged_all_to_all`. Rows lie close; only CUDA (and TPU) implement it. Unproven: it compiles for
  H100 and its index logic is tested through ``emulated``, but its results on hardware have not been checked.
- ``emulated``: what ``ragged`` does, by gathering everything everywhere. For tests on CPU.

The transpose of sending rows is sending cotangents back, so no gradient rests on the transpose of a collective.
"""

import functools
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num

from relibra_jax.capacity import ExchangeSizes
from relibra_jax.segments import segment_rows, starts

KINDS: Final = ("padded", "ragged", "emulated")


class Lanes(NamedTuple):
    """What one rank exchanges with each of the P ranks, itself among them, and where that lies at both ends."""

    sent: Int[jax.Array, "*stack P"]
    """Rows for each rank."""
    received: Int[jax.Array, "*stack P"]
    """Rows from each rank."""
    send_start: Int[jax.Array, "*stack P"]
    """Where the rows for each rank start in this rank's send buffer."""
    receive_start: Int[jax.Array, "*stack P"]
    """Where the rows from each rank start in this rank's receive buffer."""
    there: Int[jax.Array, "*stack P"]
    """Where this rank's rows start in the receive buffer of each rank."""
    whence: Int[jax.Array, "*stack P"]
    """Where the rows for this rank start in the send buffer of each rank."""

    def back(self) -> "Lanes":
        """The lanes of the way back."""
        return Lanes(self.received, self.sent, self.receive_start, self.send_start, self.whence, self.there)


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
        return self._padded_rows if self.kind == "padded" else self.sizes.send

    @property
    def receive_rows(self) -> int:
        """Rows of the buffer that is received."""
        return self._padded_rows if self.kind == "padded" else self.sizes.receive

    @property
    def _padded_rows(self) -> int:
        """A lane for every rank, of which a rank's own is empty, and what it keeps."""
        return self.ranks * self.sizes.pair + self.sizes.own

    def lanes(self, counts: Int[jax.Array, "P P"]) -> Lanes:
        """This rank's lanes, from the rows that each rank sends to each, the same on all ranks."""
        me = jax.lax.axis_index(self.axes)
        if self.kind == "padded":
            rank = jnp.arange(self.ranks, dtype=counts.dtype)
            start = jnp.where(rank == me, self.ranks, rank) * self.sizes.pair
            here = jnp.where(rank == me, self.ranks, me).astype(counts.dtype) * self.sizes.pair
            return Lanes(counts[me], counts[:, me], start, start, here, here)
        send_start, receive_start = starts(counts, 1), starts(counts, 0)
        return Lanes(
            *(counts[me], counts[:, me], send_start[me], receive_start[:, me]),
            *(receive_start[me], send_start[:, me]),
        )

    def lane_order(self) -> Int[jax.Array, " P"]:
        """The ranks in the order in which the rows for them lie in this rank's send buffer."""
        rank = jnp.arange(self.ranks, dtype=jnp.int32)
        if self.kind != "padded":
            return rank
        own_last = jnp.where(rank == jax.lax.axis_index(self.axes), self.ranks, rank)
        return jnp.argsort(own_last)

    def fits(self, counts: Int[jax.Array, "P P"]) -> jax.Array:
        """Whether the buffers of all ranks hold ``counts``."""
        if self.kind == "padded":
            others = jnp.where(jnp.eye(self.ranks, dtype=bool), 0, counts)
            return (others.max() <= self.sizes.pair) & (counts.diagonal().max() <= self.sizes.own)
        return (counts.sum(1).max() <= self.sizes.send) & (counts.sum(0).max() <= self.sizes.receive)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(rows: Num[jax.Array, "r *d"], lanes: Lanes, exchange: Exchange) -> jax.Array:
    """Carry rows to the ranks whose lanes they lie in.

    Args:
        rows: ``[send_rows, ...]``, the rows for each rank from where its lane starts.
        lanes: this rank's lanes.
        exchange: the ranks, the kind and the buffer sizes of the exchange.

    Returns:
        ``[receive_rows, ...]``, the rows from each rank from where its lane starts, zeros elsewhere.
    """
    return _move(rows, lanes, exchange, exchange.receive_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def send_back(rows: Num[jax.Array, "r *d"], lanes: Lanes, exchange: Exchange) -> jax.Array:
    """The way back of `send`, and its transpose: ``[receive_rows, ...]`` to ``[send_rows, ...]``."""
    return _move(rows, lanes.back(), exchange, exchange.send_rows)


send.defvjp(
    lambda rows, lanes, exchange: (send(rows, lanes, exchange), lanes),
    lambda exchange, lanes, cotangent: (send_back(cotangent, lanes, exchange), None),
)
send_back.defvjp(
    lambda rows, lanes, exchange: (send_back(rows, lanes, exchange), lanes),
    lambda exchange, lanes, cotangent: (send(cotangent, lanes, exchange), None),
)


def swap_lanes(
    rows: Num[jax.Array, "r *d"], axes: tuple[str, ...], ranks: int, length: int
) -> Num[jax.Array, "r *d"]:
    """Exchange equal lanes with the ranks along ``axes``; what lies behind them stays. JAX transposes it."""
    if not length:
        return rows
    for_others, own = jnp.split(rows, [ranks * length])
    arrived = jax.lax.all_to_all(for_others, axes, 0, 0, tiled=True)
    return jnp.concatenate([arrived, own])


def _move(rows, lanes: Lanes, exchange: Exchange, receive_rows: int):
    axes = exchange.axes
    if exchange.kind == "padded":
        return swap_lanes(rows, axes, exchange.ranks, exchange.sizes.pair)
    if exchange.kind == "emulated":
        everywhere = jax.lax.all_gather(rows, axes, tiled=True)
        source = jnp.arange(exchange.ranks, dtype=jnp.int32) * rows.shape[0] + lanes.whence
        index = segment_rows(receive_rows, lanes.receive_start, lanes.received, source)
        return everywhere.at[jnp.where(index < 0, everywhere.shape[0], index)].get(mode="fill", fill_value=0)
    # Zeros that depend on the rows: a constant would hold a buffer from a program's start to its end.
    zero = jnp.where(lanes.sent[0] < 0, rows[(0,) * rows.ndim], 0)
    empty = jnp.broadcast_to(zero, (receive_rows, *rows.shape[1:]))
    return jax.lax.ragged_all_to_all(
        rows, empty, lanes.send_start, lanes.sent, lanes.there, lanes.received, axis_name=axes
    )
