"""A plan's homes as the order of experts in a trainer that has no slots.

Such a trainer stacks its experts along an axis, or numbers them, and deals them to ranks in contiguous blocks.
Position p of that order is home slot p, so an expert gets the rank that a plan gives it by standing at ``home[l, e]``.
What has an entry for each expert is taken in the new order: weights, their optimizer state, the router's outputs and
biases. Ids, which name positions, are mapped. Everything is told the homes *before* and *after*: the first time
`logical_order` comes before, and to come back to the order of the checkpoint, it comes after.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Num

from relibra_jax.plan_check import check_homes
from relibra_jax.types import EMPTY, Array


def logical_order(num_layers: int, num_experts: int) -> Int[np.ndarray, "L E"]:
    """The homes of a model that was never reordered: expert e at position e in every layer.

    Args:
        num_layers: how many MoE layers the model has.
        num_experts: how many experts each of them has.

    Returns:
        int32, ``arange(E)`` in every row.

    >>> logical_order(2, 3).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """
    return np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))


def source_positions(before: Num[Array, "..."], after: Num[Array, "..."]) -> Int[Array, "L E"]:
    """Where the expert of each position comes from.

    Args:
        before: ``[L, E]``, the position of each expert so far; `logical_order` if the model was never reordered.
        after: ``[L, E]``, the position of each expert from now on, ``Plan.home``.

    Returns:
        For each position after, the position before of the expert that stands there: the index by which an expert axis
        is taken. NumPy int32, or JAX under a trace.

    Raises:
        ValueError: if shapes differ, or a row is no permutation of the positions; under a trace neither is looked at.

    >>> source_positions(np.array([[0, 1, 2]]), np.array([[2, 0, 1]])).tolist()
    [[1, 2, 0]]
    """
    if isinstance(before, jax.core.Tracer) or isinstance(after, jax.core.Tracer):
        return jax.numpy.take_along_axis(before, jax.numpy.argsort(after, axis=-1), axis=-1)
    experts = np.shape(after)[-1] if np.ndim(after) else 0
    old, new = check_homes(before, experts, "before"), check_homes(after, experts, "after")
    if len(old) != len(new):
        raise ValueError(f"homes before have {len(old)} layers, homes after {len(new)}")
    return np.take_along_axis(old, np.argsort(new, axis=-1), axis=-1)


def map_ids(ids: Any, before: Num[Array, "..."], after: Num[Array, "..."]) -> Any:
    """Expert ids under the homes after, from ids under the homes before.

    Replayed routes name logical experts: they are mapped from `logical_order` to the homes of the model. What the
    reordered model's own router chooses is mapped back, to `logical_order`.

    Args:
        ids: integers ``[..., L, K]``, NumPy or JAX; EMPTY (-1) for a slot without an expert.
        before: ``[L, E]``, the homes that ``ids`` are written in.
        after: ``[L, E]``, the homes that they shall be written in.

    Returns:
        Integers of the shape and dtype of ``ids``, EMPTY where it is; ids in the order of the top k, as they were.

    Raises:
        ValueError: if shapes do not fit, homes are no permutations, or an id on the host is neither an expert nor
            EMPTY: the first one, with its place.

    >>> map_ids(np.array([[[0, 2], [1, -1]]]), logical_order(2, 3), np.array([[2, 0, 1], [0, 2, 1]])).tolist()
    [[[2, 1], [2, -1]]]
    """
    layers, experts = np.shape(after)
    if np.ndim(ids) < 2 or ids.shape[-2] != layers or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"ids: expected integers [..., L={layers}, K], found {ids.dtype}{list(np.shape(ids))}"
        )
    if isinstance(ids, np.ndarray):
        wrong = (ids != EMPTY) & ((ids < 0) | (ids >= experts))
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0].tolist())
            raise ValueError(f"ids{list(place)}: {ids[place]} is outside 0..{experts - 1} and not {EMPTY}")
    # The positions after of the experts at each position before: the same map, the other way round.
    target = source_positions(after, before)
    xp = np if isinstance(ids, np.ndarray) and isinstance(target, np.ndarray) else jax.numpy
    mapped = xp.asarray(target)[np.arange(layers)[:, None], xp.where(ids == EMPTY, 0, ids)]
    return xp.where(ids == EMPTY, ids, mapped.astype(ids.dtype))
