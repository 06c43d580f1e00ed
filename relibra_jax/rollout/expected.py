"""The properties of a batch and its model that the caller states, against which every recording is checked."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from relibra_jax.contract.types import Array


class Expected(NamedTuple):
    """What the caller states about the batch and its model."""

    mask: np.ndarray
    """``[B, T]`` bool, True for real tokens."""
    num_experts: int
    """E, the number of logical experts of a layer."""
    top_k: int
    """K, the number of experts of a token."""
    num_layers: int
    """The number of hidden layers of the model, with dense layers."""
    moe_layers: tuple[int, ...]
    """The indices of the layers that have experts, ascending."""
    tokens: tuple[int, ...]
    """The number of real tokens of each sample."""
    start: tuple[int | None, ...]
    """The index, among the real tokens of each sample, of the token of its first row; None if the caller does not say.
    """


def expect(
    mask: Array,
    *,
    num_experts: int,
    top_k: int,
    num_layers: int,
    moe_layers: Sequence[int] | None,
    start: int | Sequence[int] | Array | None,
) -> Expected:
    """Check what the caller states about the batch and its model; the arguments are those of `replay_from_rollout`.

    Raises:
        ValueError: if the mask is not bool ``[B, T]``, if K is not in ``1..E``, if ``moe_layers`` are not ascending
            layers of the model, or if ``start`` is not in ``0..tokens`` for every sample.
    """
    mask = np.asarray(mask)
    layers = tuple(range(num_layers)) if moe_layers is None else tuple(moe_layers)
    if mask.dtype != np.bool_ or mask.ndim != 2:
        raise ValueError(f"mask must be bool [B, T], not {mask.dtype}{list(mask.shape)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be in 1..num_experts={num_experts}")
    if not layers or min(layers) < 0 or max(layers) >= num_layers or any(a >= b for a, b in pairwise(layers)):
        raise ValueError(f"moe_layers={list(layers)} must be ascending layers in 0..{num_layers - 1}")
    tokens = tuple(mask.sum(axis=1).tolist())
    return Expected(mask, num_experts, top_k, num_layers, layers, tokens, _starts(start, tokens))


def _starts(start: int | Sequence[int] | Array | None, tokens: tuple[int, ...]) -> tuple[int | None, ...]:
    if start is None:
        return (None,) * len(tokens)
    try:
        starts = np.asarray(start)
    except ValueError:  # ragged
        starts = np.empty(0, object)
    starts = starts if starts.size else starts.astype(np.int64)
    if starts.dtype.kind not in "iu" or starts.shape not in ((), (len(tokens),)):
        description = f"{starts.dtype}{list(starts.shape)}" if starts.size else repr(start)
        raise ValueError(
            f"start must be an integer that int64 holds, or {len(tokens)} of them, one for each sample,"
            f" not {description}"
        )
    first_tokens = tuple(np.broadcast_to(starts, len(tokens)).tolist())
    for sample, (first, real) in enumerate(zip(first_tokens, tokens, strict=True)):
        if not 0 <= first <= real:
            raise ValueError(f"sample {sample}: start={first} is outside its {real} real tokens")
    return first_tokens
