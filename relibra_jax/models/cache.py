"""The cache of keys and values that decoding reads and extends.

Samples have tokens of different numbers, yet all of them write their next one into the same column: one slice of every
array is written where it lies, whatever room there is. Where a sample has no token, its column is a gap, which nothing
attends to. Attention reads no more than the next power of two of the columns that are filled.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models.config import ModelConfig
from relibra_jax.types import Array

NOWHERE: Final = np.iinfo(np.int32).max
"""The position of a gap: behind all tokens, so that causal attention leaves it out."""
FEWEST_READ: Final = 64
"""Columns of the cache that attention reads at least, if there are so many."""


class Cache(NamedTuple):
    """Keys and values of the tokens that the model has seen; C columns of room."""

    keys: Float[Array, "layers B C heads width"]
    values: Float[Array, "layers B C heads width"]
    positions: Int[Array, "B C"]
    """int32, the position in its sample of the token in each column; `NOWHERE` where there is none."""
    filled: Int[Array, ""]
    """int32, the columns that have been written; those behind them are free."""

    def add_columns(self, mask: Bool[Array, "B t"]) -> tuple[Int[Array, "B t"], "Cache"]:
        """Give the next columns to new tokens, whose keys and values are to be written by every layer.

        Args:
            mask: True on real tokens, which come first.

        Returns:
            The positions of the new tokens, those of padding counted on; and the cache with t columns more, which
            hold no keys and values yet.

        Raises:
            ValueError: while tracing, if the whole cache has fewer than t columns.
        """
        new, room = mask.shape[1], self.positions.shape[1]
        if new > room:
            raise ValueError(f"{new} tokens a sample, the cache has room for {room}")
        lengths = (self.positions != NOWHERE).sum(1, dtype=jnp.int32)
        positions = lengths[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
        held = jax.lax.dynamic_update_slice_in_dim(
            self.positions, jnp.where(mask, positions, NOWHERE), self.filled, axis=1
        )
        return positions, self._replace(positions=held, filled=self.filled + new)


class LayerCache(NamedTuple):
    """One layer's part of a cache."""

    cache: Cache
    layer: Int[Array, ""]

    def write(
        self, keys: Float[Array, "B t heads width"], values: Float[Array, "B t heads width"]
    ) -> "LayerCache":
        """Write keys and values of the newest t columns."""
        at = (self.layer, 0, self.cache.filled - keys.shape[1], 0, 0)
        keys, values = (
            jax.lax.dynamic_update_slice(held, new[None], at)
            for held, new in ((self.cache.keys, keys), (self.cache.values, values))
        )
        return self._replace(cache=self.cache._replace(keys=keys, values=values))

    def attend(
        self, query: Float[Array, "B t query_heads width"], positions: Int[Array, "B t"]
    ) -> Float[jax.Array, "B t query_heads width"]:
        """What tokens at ``positions`` attend to: all tokens of the cache up to there."""
        rooms = _rooms(self.cache.positions.shape[1])
        enough = (self.cache.filled > jnp.array(rooms[:-1], jnp.int32)).sum()
        attend = [functools.partial(_attend_to_first, room) for room in rooms]
        return jax.lax.switch(enough, attend, query, positions, self)


def empty_cache(config: ModelConfig, samples: int, room: int, parallel: ExpertParallel) -> Cache:
    """A cache of ``room`` columns, sharded over the ranks by samples."""

    shape = (config.layers, samples, room, config.kv_heads, config.head_width)
    keys, values = (jnp.zeros(shape, jnp.dtype(config.dtype)) for _ in range(2))
    positions = jnp.full((samples, room), NOWHERE, jnp.int32)
    return shard_cache(Cache(keys, values, positions, jnp.int32(0)), parallel)


def shard_cache(cache: Cache, parallel: ExpertParallel) -> Cache:
    """A cache whose samples are sharded over the ranks, as programs that hand it on agree."""

    def place(leaf, *spec):
        sharding = NamedSharding(parallel.mesh, PartitionSpec(*spec))
        return jax.lax.with_sharding_constraint(leaf, sharding)

    by_layer = (None, *parallel.token_spec)
    return Cache(
        place(cache.keys, *by_layer),
        place(cache.values, *by_layer),
        place(cache.positions, *parallel.token_spec),
        place(cache.filled),
    )


def _rooms(columns: int) -> list[int]:
    """The numbers of columns that attention may read: doubled until there are no more.

    >>> _rooms(280), _rooms(64), _rooms(7)
    ([64, 128, 256, 280], [64], [7])
    """
    rooms = [FEWEST_READ]
    while rooms[-1] < columns:
        rooms.append(2 * rooms[-1])
    return [*rooms[:-1], columns]


def _attend_to_first(room, query, positions, of_layer: LayerCache):
    cache, layer = of_layer
    keys, values = (
        jax.lax.dynamic_slice(held, (layer, 0, 0, 0, 0), (1, held.shape[1], room, *held.shape[3:]))[0]
        for held in (cache.keys, cache.values)
    )
    causal = positions[:, None, :, None] >= cache.positions[:, None, None, :room]
    return jax.nn.dot_product_attention(query, keys, values, mask=causal)
