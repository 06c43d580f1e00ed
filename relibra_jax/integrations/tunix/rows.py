"""The layout of prepared layers inside Tunix's training examples, with the ranks as the first axis.

`relibra_jax.nnx.PreparedBatch` has arrays over the ranks of shape ``[L, N, G, ...]``. Tunix shards the first axis of
every array of a training example over ``data_sharding_axis``. So the arrays are converted to ``[ranks, L, ...]``, which
moves no data between ranks.
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
"""The sharding of the arrays of a training example, Tunix's ``data_sharding_axis=(("node", "local"),)``."""


@functools.partial(jax.jit, static_argnames="mesh")
def ranks_first(layers: PreparedLayer, mesh: Mesh) -> PreparedLayer:
    """Return the prepared layers of one micro-batch with the ranks as the first axis of every array.

    Args:
        layers: the layers that `PreparedBatch.micro_batch` returns, with arrays ``[L, N, G, ...]``.
        mesh: the mesh with the axes ``node`` and ``local``.

    Returns:
        The layers with arrays ``[N * G, L, ...]``. The experts in the slots are repeated for each rank.
    """
    ranks = math.prod(mesh.shape[axis] for axis in RANKS)

    def lead(leaf: jax.Array) -> jax.Array:
        leaf = jnp.moveaxis(leaf, 0, 2)
        return leaf.reshape(ranks, *leaf.shape[2:])

    fetch, tokens = jax.tree.map(lead, (layers.fetch_tables, layers.token_tables))
    slot_expert = jnp.broadcast_to(jnp.asarray(layers.slot_expert), (ranks, *layers.slot_expert.shape))
    rows = PreparedLayer(slot_expert, fetch, tokens)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, FIRST_OVER_RANKS))


def layer_of(rows: PreparedLayer, index: int, parallel: ExpertParallel) -> PreparedLayer:
    """Return one of the layers that `ranks_first` returned, in the layout that `relibra_jax.nnx.MoELayer` expects.

    Args:
        rows: the prepared layers of one micro-batch, with the ranks as the first axis.
        index: the index of the layer.
        parallel: the mesh, topology, buffer sizes and exchange of the prepared batch. It determines N and G.
    """

    def place(leaf: jax.Array) -> jax.Array:
        return leaf[:, index].reshape(*parallel.ranks, *leaf.shape[2:])

    fetch, tokens = jax.tree.map(place, (rows.fetch_tables, rows.token_tables))
    return PreparedLayer(rows.slot_expert[0, index], fetch, tokens)
