"""What the layers of a micro-batch follow, laid out as Tunix wants every array of a training example: samples first.

`relibra_jax.nnx.PreparedBatch` holds arrays over the ranks as ``[L, N, G, ...]``. Tunix shards the first axis of each
array over ``data_sharding_axis``, so they travel as ``[ranks, L, ...]``, and no rank's part leaves it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer

FIRST_OVER_RANKS = PartitionSpec(RANKS)
"""How the arrays of a training example are sharded: Tunix's ``data_sharding_axis=(("node", "local"),)``."""


@functools.partial(jax.jit, static_argnames="mesh")
def ranks_first(layers: PreparedLayer, mesh: Mesh) -> PreparedLayer:
    """The layers of one micro-batch with the ranks as the first axis of every array.

    Args:
        layers: `PreparedBatch.micro_batch`, ``[L, N, G, ...]``, and homes ``[L, E]``.
        mesh: the mesh of ``node`` and ``local``.

    Returns:
        ``[N * G, L, ...]``, homes repeated for each rank.
    """
    ranks = math.prod(mesh.shape[axis] for axis in RANKS)

    def lead(leaf: jax.Array) -> jax.Array:
        leaf = jnp.moveaxis(leaf, 0, 2)
        return leaf.reshape(ranks, *leaf.shape[2:])

    fetch, tokens = jax.tree.map(lead, (layers.fetch, layers.tokens))
    home = jnp.broadcast_to(jnp.asarray(layers.home), (ranks, *layers.home.shape))
    rows = PreparedLayer(home, fetch, tokens)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, FIRST_OVER_RANKS))


def layer_of(rows: PreparedLayer, index: int, parallel: ExpertParallel) -> PreparedLayer:
    """One layer of what `ranks_first` returned, as `relibra_jax.nnx.MoELayer` takes it.

    Args:
        rows: the layers of one micro-batch, ranks first.
        index: the layer.
        parallel: how plans are run, which gives N and G.
    """

    def place(leaf: jax.Array) -> jax.Array:
        return leaf[:, index].reshape(*parallel.ranks, *leaf.shape[2:])

    fetch, tokens = jax.tree.map(place, (rows.fetch, rows.tokens))
    return PreparedLayer(rows.home[0, index], fetch, tokens)
