"""The homes of a plan as an order of experts, for trainers that have no slots.

Such a trainer stacks its experts along an axis, or numbers them, and assigns them to ranks in contiguous blocks.
Position p of that order corresponds to home slot p. So an expert at position ``home[l, e]`` is on the rank that the
plan chose for it. Everything with one entry per expert is reordered: weights, their optimizer state, and the outputs
and biases of the router. Expert ids are positions in the order, so they are mapped. All functions get the homes
*before* and *after* a reorder. For the first reorder, *before* is `logical_order`; to restore the order of the
checkpoint, *after* is `logical_order`.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Num

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.types import EMPTY, Array


def logical_order(num_layers: int, num_experts: int) -> Int[np.ndarray, "L E"]:
    """Return the homes of a model that was never reordered: expert e is at position e in every layer.

    Args:
        num_layers: the number of MoE layers of the model.
        num_experts: the number of experts of each layer.

    Returns:
        The homes, int32, with ``arange(E)`` in every row.

    >>> logical_order(2, 3).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """
    return np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))


def source_positions(before: Num[Array, "..."], after: Num[Array, "..."]) -> Int[Array, "L E"]:
    """Return the old position of the expert that each new position holds.

    Args:
        before: the position of each expert before the reorder, ``[L, E]``; `logical_order` if the model was never
            reordered.
        after: the position of each expert after the reorder, ``[L, E]``, for example ``Plan.home``.

    Returns:
        For each new position, the old position of its expert. Indexing an expert axis with a row of the result reorders
        it. The result is NumPy int32, or a JAX array under a trace.

    Raises:
        ValueError: if the shapes differ, or a row is not a permutation of the positions. Traced homes are not checked.

    >>> source_positions(np.array([[0, 1, 2]]), np.array([[2, 0, 1]])).tolist()
    [[1, 2, 0]]
    """
    if isinstance(before, jax.core.Tracer) or isinstance(after, jax.core.Tracer):
        return jax.numpy.take_along_axis(before, jax.numpy.argsort(after, axis=-1), axis=-1)
    experts = np.shape(after)[-1] if np.ndim(after) else 0
    old, new = check_homes(before, experts, "before"), check_homes(after, experts, "after")
    if len(old) != len(new):
        raise ValueError(
            f"before has {len(old)} layers and after has {len(new)}; they must have the same number"
        )
    return np.take_along_axis(old, np.argsort(new, axis=-1), axis=-1)


def map_ids(ids: Any, before: Num[Array, "..."], after: Num[Array, "..."]) -> Any:
    """Translate expert ids from one order of experts to another.

    Replayed routes contain logical experts, so they are mapped from `logical_order` to the homes of the model. The ids
    that the router of the reordered model chooses are mapped back to `logical_order`.

    Args:
        ids: the expert ids, integers ``[..., L, K]``, NumPy or JAX. EMPTY (-1) stands for no expert.
        before: the homes that define the given ids, ``[L, E]``.
        after: the homes that define the returned ids, ``[L, E]``.

    Returns:
        The mapped ids, in the shape and dtype of ``ids``. EMPTY stays EMPTY, and the top-k order is unchanged.

    Raises:
        ValueError: if the shapes do not match, if a row of the homes is not a permutation, or if a NumPy array ``ids``
            contains a number that is neither an expert nor EMPTY. The message gives the first such number and its
            index.

    >>> map_ids(np.array([[[0, 2], [1, -1]]]), logical_order(2, 3), np.array([[2, 0, 1], [0, 2, 1]])).tolist()
    [[[2, 1], [2, -1]]]
    """
    layers, experts = np.shape(after)
    if np.ndim(ids) < 2 or ids.shape[-2] != layers or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"ids: expected integers [..., L={layers}, K], found {ids.dtype}{list(np.shape(ids))}"
        )
    if isinstance(ids, np.ndarray):
        invalid = (ids != EMPTY) & ((ids < 0) | (ids >= experts))
        if invalid.any():
            place = tuple(np.argwhere(invalid)[0].tolist())
            raise ValueError(f"ids{list(place)}: {ids[place]} is outside 0..{experts - 1} and not {EMPTY}")
    # With the arguments exchanged, source_positions gives the new position for each old position.
    target = source_positions(after, before)
    xp = np if isinstance(ids, np.ndarray) and isinstance(target, np.ndarray) else jax.numpy
    mapped = xp.asarray(target)[np.arange(layers)[:, None], xp.where(ids == EMPTY, 0, ids)]
    return xp.where(ids == EMPTY, ids, mapped.astype(ids.dtype))
