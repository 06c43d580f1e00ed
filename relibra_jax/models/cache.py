"""The cache of keys and values that decoding reads and extends.

Samples have different numbers of tokens, yet all of them write their next token into the same column. A write is
therefore one slice of every array, in place, for a cache of any size. Where a sample has no token, its column is
a gap that no token attends to. Attention reads the filled columns, rounded up to a power of two.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from relibra_jax.contract.types import Array
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models.config import ModelConfig

NOWHERE: Final = np.iinfo(np.int32).max
"""The position of a gap, larger than that of any token, so that causal attention excludes it."""
FEWEST_READ: Final = 64
"""The smallest number of columns that attention reads, if the cache has that many."""


class Cache(NamedTuple):
    """Keys and values of the tokens that the model has seen, in C columns.

    Columns lie inside heads, as attention multiplies them. With heads inside columns, XLA for GPUs would copy the whole
    cache into the other layout before and after a decoding loop.
    """

    keys: Float[Array, "layers B heads C width"]
    values: Float[Array, "layers B heads C width"]
    positions: Int[Array, "B C"]
    """int32, the position of each column's token in its sample; `NOWHERE` in gaps."""
    filled: Int[Array, ""]
    """int32, the number of columns that have been written; those after them are free."""

    def add_columns(self, mask: Bool[Array, "B t"]) -> tuple[Int[Array, "B t"], "Cache"]:
        """Assign the next columns to new tokens, for which every layer then writes keys and values.

        Args:
            mask: True on real tokens, which precede the padding.

        Returns:
            The positions of the new tokens, where padding continues the count, and the cache with t more columns, which
            hold no keys and values yet.

        Raises:
            ValueError: while tracing, if the whole cache has fewer than t columns.
        """
        new, room = mask.shape[1], self.positions.shape[1]
        if new > room:
            raise ValueError(f"each sample has {new} new tokens, but the cache has room for only {room}")
        lengths = (self.positions != NOWHERE).sum(1, dtype=jnp.int32)
        positions = lengths[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
        column_positions = jax.lax.dynamic_update_slice_in_dim(
            self.positions, jnp.where(mask, positions, NOWHERE), self.filled, axis=1
        )
        return positions, self._replace(positions=column_positions, filled=self.filled + new)


class LayerCache(NamedTuple):
    """One layer's part of a cache."""

    cache: Cache
    layer: Int[Array, ""]

    def write(
        self, keys: Float[Array, "B t heads width"], values: Float[Array, "B t heads width"]
    ) -> "LayerCache":
        """Write the keys and values of the newest t columns."""
        at = (self.layer, 0, 0, self.cache.filled - keys.shape[1], 0)
        keys, values = (
            jax.lax.dynamic_update_slice(stored, new.swapaxes(1, 2)[None], at)
            for stored, new in ((self.cache.keys, keys), (self.cache.values, values))
        )
        return self._replace(cache=self.cache._replace(keys=keys, values=values))

    def attend(
        self,
        query: Float[Array, "B t query_heads width"],
        positions: Int[Array, "B t"],
        sinks: Float[Array, " query_heads"] | None = None,
        window: Int[Array, ""] | None = None,
    ) -> Float[jax.Array, "B t query_heads width"]:
        """Attend from the tokens at ``positions`` to all tokens of the cache up to these positions.

        Args:
            query: the queries of the tokens.
            positions: their positions in their samples.
            sinks: the score of each head's attention sink. None for none.
            window: the number of tokens, with itself, to which a token attends at most; the columns of earlier ones are
                kept. None for all.
        """
        rooms = _rooms(self.cache.positions.shape[1])
        branch = (self.cache.filled > jnp.array(rooms[:-1], jnp.int32)).sum()
        attend = [functools.partial(_attend_to_first, room) for room in rooms]
        return jax.lax.switch(branch, attend, query, positions, sinks, window, self)


def empty_cache(config: ModelConfig, samples: int, room: int, parallel: ExpertParallel) -> Cache:
    """Allocate a cache of ``room`` columns whose samples are sharded over the ranks.

    Args:
        config: the model's sizes and the dtype of the computation.
        samples: the number of samples.
        room: the number of columns C.
        parallel: the mesh over whose ranks the samples are sharded.
    """

    shape = (config.layers, samples, config.kv_heads, room, config.head_width)
    keys, values = (jnp.zeros(shape, jnp.dtype(config.dtype)) for _ in range(2))
    positions = jnp.full((samples, room), NOWHERE, jnp.int32)
    return shard_cache(Cache(keys, values, positions, jnp.int32(0)), parallel)


def repeat_samples(cache: Cache, copies: int, room: int, parallel: ExpertParallel) -> Cache:
    """Copy every sample of a cache, for samples that begin with the same tokens and continue differently.

    The copies of a sample follow one another and lie on its rank, so nothing is sent.

    Args:
        cache: the cache of B samples in at most ``room`` columns.
        copies: the number of copies of each sample.
        room: the number of columns of the result.
        parallel: the mesh over whose ranks the samples are sharded.

    Returns:
        A new cache of B x copies samples.
    """

    def copy(stored, samples, columns, fill):
        widths = [(0, 0)] * stored.ndim
        widths[columns] = (0, room - stored.shape[columns])
        return jnp.pad(jnp.repeat(stored, copies, axis=samples), widths, constant_values=fill)

    keys, values = (copy(stored, 1, 3, 0) for stored in (cache.keys, cache.values))
    copied = Cache(keys, values, copy(cache.positions, 0, 1, NOWHERE), cache.filled)
    return shard_cache(copied, parallel)


def shard_cache(cache: Cache, parallel: ExpertParallel) -> Cache:
    """Shard the samples of a cache over the ranks, so that all programs that pass it on use the same sharding.

    Args:
        cache: the cache.
        parallel: the mesh with the ranks.
    """

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
    """Return the numbers of columns that attention may read: doubled up to the size of the cache.

    >>> _rooms(280), _rooms(64), _rooms(7)
    ([64, 128, 256, 280], [64], [7])
    """
    rooms = [FEWEST_READ]
    while rooms[-1] < columns:
        rooms.append(2 * rooms[-1])
    return [*rooms[:-1], columns]


def _attend_to_first(room, query, positions, sinks, window, layer_cache: LayerCache):
    cache, layer = layer_cache
    keys, values = (
        jax.lax.dynamic_slice(stored, (layer, 0, 0, 0, 0), (1, *stored.shape[1:3], room, stored.shape[4]))[
            0
        ].swapaxes(1, 2)
        for stored in (cache.keys, cache.values)
    )
    own, stored = positions[:, None, :, None], cache.positions[:, None, None, :room]
    visible = stored <= own
    if window is not None:
        visible &= stored > own - window
    if sinks is None:
        return jax.nn.dot_product_attention(query, keys, values, mask=visible)
    return _attend_with_sinks(query, keys, values, visible, sinks)


def _attend_with_sinks(query, keys, values, visible, sinks):
    """Attend as `jax.nn.dot_product_attention` does on every platform, with one more score for each head."""
    samples, new, _, width = query.shape
    grouped = query.reshape(samples, new, keys.shape[2], -1, width)
    scores = jnp.einsum("bthgd,bshd->bhgts", grouped, keys, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(visible[:, :, None], scores, jnp.finfo(jnp.float32).min)
    of_sinks = sinks.astype(jnp.float32).reshape(1, *grouped.shape[2:4], 1, 1)
    of_sinks = jnp.broadcast_to(of_sinks, (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, of_sinks], axis=-1))[..., :-1]
    return jnp.einsum("bhgts,bshd->bthgd", weights.astype(values.dtype), values).reshape(query.shape)
