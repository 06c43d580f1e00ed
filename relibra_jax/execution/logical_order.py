"""Logical order: expert arrays as ``[E, ...]`` in the order of the expert ids, sharded over the ranks along E.

Checkpoints and `relibra_jax.nnx.logical_params` hold experts in this order. A migration to the identity homes brings
them into it: each rank then has the bytes of its part, and only the shape changes.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from relibra_jax.execution.expert_labels import ExpertLeaf, slot_spec
from relibra_jax.execution.mesh import RANKS


def identity_homes(home: Int[np.ndarray, "L E"]) -> Int[np.ndarray, "L E"]:
    """Return homes like ``home`` with every expert in the slot of its id."""
    return np.broadcast_to(np.arange(home.shape[1], dtype=np.int32), home.shape)


def logical_shape(leaf: ExpertLeaf) -> tuple[int, ...]:
    """Return the shape of an expert leaf in logical order: ``[E, ...]``, or ``[l, E, ...]`` for l stacked layers."""
    shape, axis = leaf.array.shape, int(leaf.stacked)
    return (*shape[:axis], math.prod(shape[axis : axis + 3]), *shape[axis + 3 :])


def logical_sharding(slots: NamedSharding, leaf: ExpertLeaf) -> NamedSharding:
    """Return the sharding of a leaf in logical order, from its sharding ``slots`` in ``[N, G, H, ...]``."""
    stack = (None,) * leaf.stacked
    return slots.update(spec=PartitionSpec(*stack, RANKS, *slots.spec[len(stack) + 3 :]))


def regroup(array: jax.Array, leaf: ExpertLeaf, *, merge: bool) -> jax.Array:
    """Reshape ``[N, G, H, ...]`` to ``[E, ...]``, or back, with the same bytes on each rank. ``array`` is donated."""
    slots = leaf.array.sharding.with_memory_kind(array.sharding.memory_kind)
    return _regroup_program(slots, logical_sharding(slots, leaf), stacked=leaf.stacked, merge=merge)(array)


@functools.cache
def _regroup_program(
    slots: NamedSharding, logical: NamedSharding, *, stacked: bool, merge: bool
) -> Callable[[jax.Array], jax.Array]:
    specs, shardings = (slot_spec(slots, stacked=stacked), logical.spec), (slots, logical)
    old, new = (0, 1) if merge else (1, 0)
    part = functools.partial(jnp.squeeze if merge else jnp.expand_dims, axis=(stacked, stacked + 1))
    view = jax.shard_map(part, mesh=slots.mesh, in_specs=specs[old], out_specs=specs[new])
    return jax.jit(view, donate_argnums=0, out_shardings=shardings[new])
