"""Counts instead of routes: what planning needs of a rollout, made where the rollout is.

A route is ``L * K`` ids a token, a count ``L * E`` numbers a sample, however long. docs/guides/counts.md says who sends
what.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.rollout.expected import expect
from relibra_jax.rollout.rows import read_rows
from relibra_jax.types import Array


def sample_counts(
    source: Any,
    *,
    layout: str,
    mask: Bool[Array, "B T"],
    num_experts: int,
    top_k: int,
    num_layers: int,
    moe_layers: Sequence[int] | None = None,
    start: int | Sequence[int] | Int[Array, "B"] | None = None,
    fill: str | None = None,
    live_routing: Callable[[np.ndarray], Array] | None = None,
) -> tuple[Integer[np.ndarray, "B L E"], Int[np.ndarray, " B"]]:
    """Count the token copies that every sample sends to every expert, from what an engine recorded.

    It is `relibra_jax.sample_load` of the replay that `relibra_jax.replay_from_rollout` reads, checked as that is, in
    NumPy alone: no device is touched, so that it runs in a rollout worker.

    Args:
        source, layout, mask, num_experts, top_k, num_layers, moe_layers, start, fill, live_routing: as in
            `relibra_jax.replay_from_rollout`, for the samples of this worker.

    Returns:
        The load ``[B, L, E]``, token copies, and the tokens ``[B]`` of each sample, int32. The load has the smallest of
        uint8, uint16 and int32 that holds the longest sample, as no expert comes twice in a token's route; loads of
        several workers can be concatenated as they are. Both are what `relibra_jax.plan_loads` takes.

    Raises:
        ValueError: as `relibra_jax.replay_from_rollout`.

    >>> rows = np.array([[[0, 1]], [[3, 1]]])  # 2 tokens, 1 layer, top-2
    >>> mask = np.array([[False, True, True]])
    >>> load, tokens = sample_counts([rows], layout="vllm", mask=mask, num_experts=4, top_k=2, num_layers=1)
    >>> load.tolist(), load.dtype, tokens.tolist()
    ([[[1, 2, 0, 1]]], dtype('uint8'), [2])
    """
    expected = expect(
        mask,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=num_layers,
        moe_layers=moe_layers,
        start=start,
    )
    rows = read_rows(source, expected, layout=layout, fill=fill, live_routing=live_routing)
    layers, longest = rows.shape[1], max(expected.tokens, default=0)
    load = np.zeros((len(expected.tokens), layers, num_experts), _load_dtype(longest))
    first = 0
    for sample, tokens in enumerate(expected.tokens):
        # A histogram of each layer is 20 times as fast as np.add.at, and needs no offsets of ids in 64 bits.
        for layer in range(layers):
            ids = rows[first : first + tokens, layer].ravel()
            load[sample, layer] = np.bincount(ids, minlength=num_experts)
        first += tokens
    return load, np.array(expected.tokens, np.int32)


def _load_dtype(tokens: int) -> np.dtype:
    return np.dtype(np.uint8 if tokens < 1 << 8 else np.uint16 if tokens < 1 << 16 else np.int32)
