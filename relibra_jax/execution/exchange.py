"""The collective that sends rows between ranks, and its reverse.

Every rank knows beforehand how many rows it sends to and receives from each other rank (its `Lanes`), so the exchange
sends no sizes. There are four kinds:

- ``padded``: `jax.lax.all_to_all` with equal lanes, one for each pair of ranks. It runs everywhere, and every lane is
  as long as the longest of any layer and micro-batch. The rows that a rank keeps are after its lanes, so that they make
  no lane longer.
- ``fitted``: lanes of one of ten lengths, the least that suffices for the layer and micro-batch
  (`relibra_jax.routing.lane_lengths`). All ranks know that length beforehand, so that they choose the same all-to-all.
  One compiled program has all of them. Layers in pieces choose once for all their exchanges, among four lengths
  (`relibra_jax.execution.pipeline`).
- ``ragged``: `jax.lax.ragged_all_to_all`, without padding, which only CUDA and TPU implement. Rows arrive in the order
  of the receiver's slots, so that nothing has to arrange them. It works inside a node; between nodes, exchanges are
  fitted. Between several GPUs it is unproven, and `relibra_jax.execution.exchange_check` proves it on a machine. Tests
  cover its index logic through ``emulated``.
- ``emulated``: the same result as ``ragged``, computed by gathering all rows on every rank. For tests on CPU.

``nccl_ep`` is not such a collective, but another way of dispatch and combine: `relibra_jax.execution.nccl_ep`.

The transpose of sending rows is defined as sending cotangents back, so gradients do not depend on JAX's transpose of a
collective.
"""

import functools
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.mesh import RANKS, vary_over
from relibra_jax.routing.exchange_rules import IN_LANES
from relibra_jax.routing.lane_lengths import lane_lengths
from relibra_jax.routing.segments import segment_rows, starts
from relibra_jax.routing.sizes import ExchangeSizes

NCCL_EP: Final = "nccl_ep"
KINDS: Final = (*IN_LANES, "ragged", "emulated", NCCL_EP)
UPDATES: Final = 64
"""The least number of updates of a ragged exchange for each pair of ranks. XLA's kernel needs about 256 blocks for the
rate of NVLink, which four ranks with fewer updates do not have (docs/guides/layer-price.md)."""


class Lanes(NamedTuple):
    """The rows that one rank exchanges with each of the P ranks, including itself, and their places in the buffers.

    Where buffers have lanes, there is one run of rows for each rank, ``[*stack, P]``. A ragged exchange has several:
    ``[P, n]``, or `updates`.
    """

    sent: Int[jax.Array, "*runs"]
    """The number of rows for each rank."""
    received: Int[jax.Array, "*runs"]
    """The number of rows from each rank."""
    send_start: Int[jax.Array, "*runs"]
    """The first row for each rank in this rank's send buffer."""
    receive_start: Int[jax.Array, "*runs"]
    """The first row from each rank in this rank's receive buffer."""
    peer_receive_start: Int[jax.Array, "*runs"]
    """The first row from this rank in the receive buffer of each rank."""
    peer_send_start: Int[jax.Array, "*runs"]
    """The first row for this rank in the send buffer of each rank."""
    length: Int[jax.Array, "*stack"] | None = None
    """The number of the length that a fitted exchange sends of every lane, in `Exchange.lengths`, equal on all ranks;
    None for other kinds."""

    def back(self) -> "Lanes":
        """Return the lanes of the reverse exchange."""
        return Lanes(
            sent=self.received,
            received=self.sent,
            send_start=self.receive_start,
            receive_start=self.send_start,
            peer_receive_start=self.peer_send_start,
            peer_send_start=self.peer_receive_start,
            length=self.length,
        )


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One exchange between the ranks along ``axes``, with buffers of fixed sizes."""

    kind: str
    axes: tuple[str, ...]
    ranks: int
    sizes: ExchangeSizes
    sixteenths: int | None = None
    """The part of every lane that a fitted exchange sends, if it is chosen for several exchanges together."""
    copies: int = 1
    """The most rows into which a rank alone, with nothing to send, copies one of its rows."""

    @property
    def has_lanes(self) -> bool:
        """Whether buffers have a lane of equal length for every rank."""
        return self.kind in IN_LANES

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of which a fitted exchange sends one of every lane, ascending."""
        return lane_lengths(self.sizes.pair, self.sizes.lengths)

    @property
    def chosen_length(self) -> int | None:
        """The rows that the exchange sends of every lane, if it has lanes and nothing is left to choose."""
        if self.kind == "padded":
            return self.sizes.pair
        return None if self.sixteenths is None else -(-self.sizes.pair * self.sixteenths // 16)

    @property
    def send_rows(self) -> int:
        """The number of rows of the send buffer."""
        return self._padded_rows if self.has_lanes else self.sizes.send

    @property
    def receive_rows(self) -> int:
        """The number of rows of the receive buffer."""
        return self._padded_rows if self.has_lanes else self.sizes.receive

    @property
    def _padded_rows(self) -> int:
        """The places in lanes: a lane for every rank, of which a rank's own is empty, and the kept rows after them."""
        return self.ranks * self.sizes.pair + self.sizes.own

    def lanes(self, counts: Int[jax.Array, "P P"]) -> Lanes:
        """Compute this rank's lanes from the rows that each rank sends to each, which are equal on all ranks."""
        own = jax.lax.axis_index(self.axes)
        rank = jnp.arange(self.ranks, dtype=counts.dtype)
        start = jnp.where(rank == own, self.ranks, rank) * self.sizes.pair
        peer_start = jnp.where(rank == own, self.ranks, own).astype(counts.dtype) * self.sizes.pair
        length = self._length(counts) if self.kind == "fitted" else None
        return Lanes(counts[own], counts[:, own], start, start, peer_start, peer_start, length)

    def runs(self, counts: Int[jax.Array, "P P S"]) -> Lanes:
        """Compute this rank's runs of a ragged exchange, one for each slot of each rank.

        What a rank sends is in the order of ranks, then slots; what it receives in the order of its slots, then ranks.

        Args:
            counts: the rows that each rank sends to each slot of each rank, equal on all ranks.
        """
        own = jax.lax.axis_index(self.axes)
        send_start = starts(counts.reshape(self.ranks, -1)).reshape(counts.shape)
        by_slot = jnp.moveaxis(counts, 0, 2)
        receive_start = starts(by_slot.reshape(self.ranks, -1)).reshape(by_slot.shape)
        receive_start = jnp.moveaxis(receive_start, 2, 0)
        return Lanes(
            sent=counts[own],
            received=counts[:, own],
            send_start=send_start[own],
            receive_start=receive_start[:, own],
            peer_receive_start=receive_start[own],
            peer_send_start=send_start[:, own],
        )

    def in_rows(self, rows: int) -> "Exchange":
        """Return the exchange of elements that have ``rows`` rows each."""
        return replace(self, sizes=jax.tree.map(lambda size: size * rows, self.sizes))

    def lane_order(self) -> Int[jax.Array, " P"]:
        """Return the ranks in the order of their rows in this rank's send buffer."""
        rank = jnp.arange(self.ranks, dtype=jnp.int32)
        if not self.has_lanes:
            return rank
        own_last = jnp.where(rank == jax.lax.axis_index(self.axes), self.ranks, rank)
        return jnp.argsort(own_last)

    def fits(self, counts: Int[jax.Array, "P P"]) -> jax.Array:
        """Return whether the buffers of all ranks are large enough for ``counts``, the rows from each rank to each."""
        fits = counts.sum(0).max() <= self.sizes.receive
        if not self.has_lanes:
            return fits & (counts.sum(1).max() <= self.sizes.send)
        return fits & (self._longest(counts) <= self.sizes.pair) & (counts.diagonal().max() <= self.sizes.own)

    def _longest(self, counts: Int[jax.Array, "P P"]) -> Int[jax.Array, ""]:
        return jnp.where(jnp.eye(self.ranks, dtype=bool), 0, counts).max()

    def _length(self, counts: Int[jax.Array, "P P"]) -> Int[jax.Array, ""]:
        """Return the number of the least length that suffices on all ranks of the group."""
        longest = jax.lax.pmax(vary_over(self._longest(counts), RANKS), RANKS)
        return jnp.searchsorted(jnp.array(self.lengths, longest.dtype), longest).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(rows: Num[jax.Array, "r *d"], lanes: Lanes, exchange: Exchange) -> jax.Array:
    """Send the runs of rows of this rank to their ranks.

    Args:
        rows: ``[send_rows, ...]``.
        lanes: this rank's `updates`.
        exchange: the ranks, the kind and the buffer sizes of the exchange, which is ragged or emulated.

    Returns:
        ``[receive_rows, ...]``, with the received rows in their places. Other rows have no meaning and may be NaN.
    """
    return _move(rows, lanes, exchange, exchange.receive_rows)


def send_back(rows: Num[jax.Array, "r *d"], lanes: Lanes, exchange: Exchange) -> jax.Array:
    """Send rows back, ``[receive_rows, ...]`` to ``[send_rows, ...]``: the reverse of `send`, and its transpose."""
    return _move(rows, lanes.back(), exchange, exchange.send_rows)


send.defvjp(
    lambda rows, lanes, exchange: (send(rows, lanes, exchange), lanes),
    lambda exchange, lanes, cotangent: (send_back(cotangent, lanes, exchange), None),
)


def swap_lanes(
    rows: Num[jax.Array, "r *d"], axes: tuple[str, ...], ranks: int, length: int
) -> Num[jax.Array, "r *d"]:
    """Exchange equal lanes with the ranks along ``axes``; the rows after the lanes stay. JAX can transpose it."""
    if not length:
        return rows
    lanes, kept_rows = jnp.split(rows, [ranks * length])
    received_lanes = jax.lax.all_to_all(lanes, axes, 0, 0, tiled=True)
    # Outside jit, XLA:CPU crashes where it compiles a concatenation with no rows.
    return jnp.concatenate([received_lanes, kept_rows]) if len(kept_rows) else received_lanes


def _move(rows, lanes: Lanes, exchange: Exchange, receive_rows: int):
    shape = (receive_rows, *rows.shape[1:])
    if exchange.kind == "emulated":
        all_rows = jax.lax.all_gather(rows, exchange.axes, tiled=True)
        # Segments must ascend. An empty one must come before another with the same start.
        order = jnp.lexsort((lanes.received, lanes.receive_start))
        rank = jnp.arange(exchange.ranks, dtype=jnp.int32).repeat(len(order) // exchange.ranks)
        segments = lanes.receive_start, lanes.received, rank * len(rows) + lanes.peer_send_start
        index = segment_rows(receive_rows, *(segment[order] for segment in segments))
        # What is not received shows up if anything reads it.
        nothing = jnp.nan if jnp.issubdtype(rows.dtype, jnp.inexact) else jnp.iinfo(rows.dtype).max
        index = jnp.where(index == EMPTY, len(all_rows), index)
        return all_rows.at[index].get(mode="fill", fill_value=nothing)
    # What `jax.lax.empty` compiles to, but dependent on the rows: JAX moves empty arrays out of the loop over layers,
    # where XLA then copies them for each layer.
    buffer = jax.ffi.ffi_call("AllocateBuffer", jax.typeof(rows).update(shape=shape))(rows)
    return jax.lax.ragged_all_to_all(
        rows,
        buffer,
        lanes.send_start,
        lanes.sent,
        lanes.peer_receive_start,
        lanes.received,
        axis_name=exchange.axes,
    )


def updates(runs: Lanes) -> Lanes:
    """Return the updates with which XLA runs a ragged exchange: one for each run, and empty ones.

    XLA's kernel for GPUs has one thread block for each update, and as many blocks as the largest power of two in a
    rank's number of updates, at most 64, share their rows evenly, however uneven runs are (docs/guides/gpu-kernels.md).
    So there are at least `UPDATES` for each rank, and a power of two.

    Args:
        runs: the runs ``[P, n]``.

    Returns:
        The updates ``[P * U]``, rank by rank.

    >>> jax.tree.map(jnp.size, updates(Lanes(*[jnp.zeros((2, 65), int)] * 6))).sent
    256
    """
    number = max(UPDATES, 1 << (runs.sent.shape[1] - 1).bit_length())
    return jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, number - leaf.shape[1]))).ravel(), runs)
