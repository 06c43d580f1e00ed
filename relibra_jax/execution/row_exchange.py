"""An exchange of rows of a batch between the ranks, for arrays of which every process has a part.

Recorded routes are the largest arrays of a batch: gigabytes, of which a rank needs a small share. They stay with the
process that has their samples until the plan is known, and then go to the ranks that train on them, one micro-batch at
a time. A rank holds no more than its own rows and the routes of one micro-batch at once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.plan_agreement import add_up


class Places(NamedTuple):
    """Places of rows on the ranks."""

    rank: Int[np.ndarray, "..."]
    """The flat rank that has each row; EMPTY for no row."""
    place: Int[np.ndarray, "..."]
    """The index of the row on that rank."""

    def take(self, number: Int[np.ndarray, "..."]) -> "Places":
        """Return the places of some rows, by their numbers; EMPTY for EMPTY."""
        if not len(self.rank):
            return Places(*(np.full(number.shape, EMPTY, np.int32) for _ in self))
        return Places(np.where(number == EMPTY, EMPTY, self.rank[number]), self.place[number])


def own_ranks(mesh: Mesh) -> Int[np.ndarray, " D"]:
    """Return the flat ranks of this process."""
    process = jax.process_index()
    return np.flatnonzero([device.process_index == process for device in mesh.devices.ravel()])


def deal_rows(own: Int[np.ndarray, " b"], num_rows: int, mesh: Mesh, axes: tuple[str, ...]) -> Places:
    """Deal the rows of every process to its ranks in turn. All processes call it.

    Args:
        own: the numbers in the batch of the rows that this process has.
        num_rows: B, the number of rows of all processes.
        mesh: the mesh of the ranks.
        axes: the mesh axes over which rows are sharded.

    Returns:
        The place of each row of the batch.

    Raises:
        ValueError: if a row belongs to no process or to several, or if the mesh has other axes, or in another order.
    """
    if tuple(axes) != mesh.axis_names:
        raise ValueError(
            f"own: rows of processes go to meshes whose axes are all those of tokens, {axes}, not {mesh.axis_names}"
        )
    check_owners(own, num_rows)
    ranks, index = own_ranks(mesh), np.arange(len(own))
    rank, place = (np.zeros(num_rows, np.int32) for _ in range(2))
    rank[own], place[own] = ranks[index % len(ranks)], index // len(ranks)
    return Places(*add_up((rank, place)))


def check_owners(own: Int[np.ndarray, " b"], num_rows: int) -> None:
    """Raise ValueError on all processes unless every row of a batch belongs to exactly one. All processes call it."""
    owners = np.zeros(num_rows, np.int32)
    np.add.at(owners, own, 1)
    owners = add_up(owners)
    if (owners != 1).any():
        row = int((owners != 1).argmax())
        raise ValueError(f"own: sample {row} of {num_rows} is with {owners[row]} processes, not with one")


def put_rows(
    rows: Shaped[np.ndarray, "b *rest"], places: Places, mesh: Mesh, axes: tuple[str, ...]
) -> Shaped[jax.Array, "R_s *rest"]:
    """Put the rows of this process on its ranks, as `deal_rows` dealt them. Ranks with fewer have zeros after them."""
    ranks, room = own_ranks(mesh), int(places.place.max(initial=-1)) + 1
    of_rank = {int(rank): rows[number :: len(ranks)] for number, rank in enumerate(ranks)}

    def of_device(index: Any) -> np.ndarray:
        mine = of_rank[(index[0].start or 0) // room]
        return np.concatenate([mine, np.zeros((room - len(mine), *mine.shape[1:]), mine.dtype)])

    shape = (mesh.devices.size * room, *rows.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(axes)), of_device)


@functools.partial(jax.jit, static_argnames=("mesh", "axes"))
def exchange_rows(
    rows: Shaped[jax.Array, "R_s *rest"],
    wanted: Any,
    *,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> Shaped[jax.Array, "C R_k *rest"]:
    """Bring every rank the rows that it wants, in C parts one after the other.

    Args:
        rows: the rows of all ranks, sharded over them.
        wanted: the `Places` ``[C, R, k]`` of the rows that each rank wants, equal on all processes.
        mesh: the mesh of the ranks.
        axes: the mesh axes over which rows are sharded, all of them.

    Returns:
        The rows, sharded over the ranks along their second axis; zeros where none is wanted.
    """

    def on_rank(rows, wanted):
        me = jax.lax.axis_index(axes)

        def one_part(part):
            rank, place = part
            is_mine = (rank == me).reshape(*rank.shape, *[1] * (rows.ndim - 1))
            leaving = jnp.where(is_mine, rows[jnp.maximum(place, 0)], jnp.zeros((), rows.dtype))
            arrived = jax.lax.all_to_all(leaving, axes, 0, 0, tiled=True)
            return arrived[jnp.maximum(rank[me], 0), jnp.arange(rank.shape[1])]

        return jax.lax.map(one_part, wanted)

    spread = PartitionSpec(axes)
    return jax.shard_map(
        on_rank, mesh=mesh, in_specs=(spread, PartitionSpec()), out_specs=PartitionSpec(None, axes)
    )(rows, tuple(jnp.asarray(each, jnp.int32) for each in wanted))
