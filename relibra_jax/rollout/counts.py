"""Counts of expert loads that a rollout worker sends for planning, in place of the routes.

The route of a token takes ``L * K`` ids, whereas the counts of a sample take ``L * E`` numbers, however long it is.
docs/guides/counts.md describes which process sends what.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.replay import count_copies
from relibra_jax.contract.types import Array
from relibra_jax.rollout.expected import expect
from relibra_jax.rollout.rows import read_rows
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
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
    """Count the token copies that every sample sends to every expert, from the recording of an engine.

    The result equals `relibra_jax.sample_load` of the replay that `relibra_jax.replay_from_rollout` reads, with the
    same checks. The function uses NumPy alone and no device, so a rollout worker can call it.

    Args:
        source, layout, mask, num_experts, top_k, num_layers, moe_layers, start, fill, live_routing: as in
            `relibra_jax.replay_from_rollout`, for the samples of this worker.

    Returns:
        The load ``[B, L, E]`` in token copies, and the number of tokens ``[B]`` of each sample, int32; both are
        arguments of `relibra_jax.Batch`. The load has the smallest of uint8, uint16 and int32 that can count the
        tokens of the longest sample, which is enough because no token has an expert twice. The loads of several workers
        can be concatenated.

    Raises:
        ValueError: under the conditions of `relibra_jax.replay_from_rollout`.

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
    shape = (len(expected.tokens), len(expected.moe_layers), num_experts)
    load = np.zeros(shape, _load_dtype(max(expected.tokens, default=0)))
    samples = read_rows(source, expected, layout=layout, fill=fill, live_routing=live_routing)
    for sample, rows in enumerate(samples):
        load[sample] = count_copies(rows, num_experts=num_experts)
    return load, np.array(expected.tokens, np.int32)


def _load_dtype(tokens: int) -> np.dtype:
    return np.dtype(np.uint8 if tokens < 1 << 8 else np.uint16 if tokens < 1 << 16 else np.int32)
