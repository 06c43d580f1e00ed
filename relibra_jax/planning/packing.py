"""Greedy packing and copying of one row of loads; callers vmap over layers, nodes and micro-batches.

The functions do list scheduling as in EPLB (github.com/deepseek-ai/EPLB): the heaviest item goes first, to the pack
with the least load. Loads are compared in float32, and ties go to the lower index, as in EPLB.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from relibra_jax.contract.plan import inverse_permutation
from relibra_jax.contract.types import Array


def lightest_pack(
    load: Num[Array, " items"],
    start: Float[Array, " packs"],
    *,
    capacity: int,
) -> tuple[Int[jax.Array, " items"], Int[jax.Array, " items"]]:
    """Give every item, heaviest first, to the lightest pack that has room.

    Args:
        load: the load of each item; compared and summed in float32.
        start: the initial load of each pack.
        capacity: the number of items that a pack can take; ``items <= packs * capacity``.

    Returns:
        The pack of each item, and its position in the pack in order of arrival; int32.

    >>> pack, position = lightest_pack(jnp.array([5, 3, 4, 1]), jnp.zeros(2), capacity=2)
    >>> pack.tolist(), position.tolist()
    ([0, 1, 1, 0], [0, 1, 0, 1])
    """
    load = jnp.asarray(load, jnp.float32)
    if not load.size:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)  # without jit, a scan must not be empty
    order = jnp.argsort(-load, stable=True)

    def place(packs, item_load):
        total, count = packs
        pack = jnp.argmin(jnp.where(count < capacity, total, jnp.inf)).astype(jnp.int32)
        is_pack = jnp.arange(total.size) == pack
        position = jnp.sum(jnp.where(is_pack, count, 0))
        return (jnp.where(is_pack, total + item_load, total), count + is_pack), (pack, position)

    empty = (jnp.asarray(start, jnp.float32), jnp.zeros(start.shape, jnp.int32))
    _, (pack, position) = jax.lax.scan(place, empty, load[order])
    rank_of_item = inverse_permutation(order)
    return pack[rank_of_item], position[rank_of_item]


def pack_evenly(
    load: Num[Array, " items"], num_packs: int
) -> tuple[Int[jax.Array, " items"], Int[jax.Array, " items"]]:
    """Pack items into packs of equal size so that their loads are even.

    This is EPLB's ``balanced_packing`` for one row. With one item per pack, the items keep their order.

    Args:
        load: the load of each item.
        num_packs: the number of packs, which divides the number of items.

    Returns:
        The pack of each item and its position in the pack; int32.

    Raises:
        ValueError: if the items do not divide evenly over the packs.
    """
    items = load.shape[0]
    if items % num_packs:
        raise ValueError(f"{items} items must divide evenly over {num_packs} packs")
    if items == num_packs:
        return jnp.arange(items, dtype=jnp.int32), jnp.zeros(items, jnp.int32)
    return lightest_pack(load, jnp.zeros(num_packs), capacity=items // num_packs)


def add_copies(
    load: Num[Array, " items"], num_extra: int
) -> tuple[Int[jax.Array, " extra"], Int[jax.Array, " extra"], Int[jax.Array, " items"]]:
    """Copy the item with the largest load per copy, ``num_extra`` times.

    This is EPLB's ``replicate_experts`` for one row.

    Args:
        load: the load of each item, split evenly over its copies.
        num_extra: the number of copies to add to the first copy of each item.

    Returns:
        The item of each added copy, the number of the copy among those of its item (from 1), and the number of copies
        of each item; int32.

    >>> item, copy, count = add_copies(jnp.array([9, 2, 4]), 2)
    >>> item.tolist(), copy.tolist(), count.tolist()
    ([0, 0], [1, 2], [3, 1, 1])
    """
    load = jnp.asarray(load, jnp.float32)
    counts, no_copies = jnp.ones(load.size, jnp.int32), jnp.zeros(0, jnp.int32)
    if not num_extra:
        return no_copies, no_copies, counts  # as in `lightest_pack`

    def add(count, _):
        item = jnp.argmax(load / count).astype(jnp.int32)
        is_item = jnp.arange(load.size) == item
        return count + is_item, (item, jnp.sum(jnp.where(is_item, count, 0)))

    count, (item, copy) = jax.lax.scan(add, counts, length=num_extra)
    return item, copy, count
