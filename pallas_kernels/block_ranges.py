"""The blocks of keys that a block of queries needs, and the blocks of queries that need a block of keys."""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

NO_FIRST: Final = jnp.iinfo(jnp.int32).max
"""The first key of queries without keys, among them those that fill the last block. It lowers no block's bound."""
NO_LAST: Final = -1
"""Their last key."""
LOWEST: Final = -1e30
"""The largest score before the first block of keys: finite, so that differences of maxima are defined."""


class Ranges(NamedTuple):
    """The keys of every query, in whole blocks, and the bounds of the loops over blocks."""

    first: jax.Array
    """The first key of each query, int32 ``[blocks * block]``."""
    last: jax.Array
    """The last key of each query, int32 ``[blocks * block]``."""
    key_begin: jax.Array
    """The first block of keys that a block of queries needs, int32 ``[blocks of queries]``."""
    key_end: jax.Array
    """The block of keys after the last one, int32 ``[blocks of queries]``. It is not after ``key_begin`` if none is
    needed."""

    def of_keys(self, key_blocks: int) -> tuple[jax.Array, jax.Array]:
        """Return the first block of queries that needs each block of keys, and the one after the last.

        Args:
            key_blocks: the number of blocks of keys.
        """
        numbers = jnp.arange(key_blocks, dtype=jnp.int32)[None]
        needed = (self.key_begin[:, None] <= numbers) & (numbers < self.key_end[:, None])
        blocks = len(self.key_begin)
        begin = jnp.argmax(needed, axis=0).astype(jnp.int32)
        end = blocks - jnp.argmax(needed[::-1], axis=0).astype(jnp.int32)
        return begin, jnp.where(needed.any(0), end, begin)


def block_ranges(first: jax.Array, last: jax.Array, query_block: int, key_block: int) -> Ranges:
    """Return the ranges of queries in whole blocks.

    Args:
        first: the first key of each query, int32 ``[T]``, at least 0.
        last: its last key, int32 ``[T]``. It is before ``first`` for a query without keys.
        query_block: the number of queries of a block.
        key_block: the number of keys of a block.

    >>> ranges = block_ranges(jnp.array([0, 0, 2, 2, 4]), jnp.array([0, 1, 2, 3, 4]), 2, 2)
    >>> ranges.key_begin.tolist(), ranges.key_end.tolist()
    ([0, 1, 2], [1, 2, 3])
    """
    room = -len(first) % query_block
    empty = last < first
    first, last = jnp.where(empty, NO_FIRST, first), jnp.where(empty, NO_LAST, last)
    first = jnp.pad(first, (0, room), constant_values=NO_FIRST)
    last = jnp.pad(last, (0, room), constant_values=NO_LAST)
    begin = first.reshape(-1, query_block).min(1) // key_block
    end = last.reshape(-1, query_block).max(1) // key_block + 1
    return Ranges(first, last, begin, end)
