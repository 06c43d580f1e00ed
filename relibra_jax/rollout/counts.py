"""Counts of expert loads that a rollout worker sends for planning, in place of the routes.

The route of a token takes ``L * K`` ids, whereas the counts of a sample take ``L * E`` numbers, however long it is.
docs/guides/counts.md describes which process sends what.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.planner import Routes
from relibra_jax.contract.replay import count_copies, id_dtype
from relibra_jax.contract.types import Array
from relibra_jax.rollout.expected import expect
from relibra_jax.rollout.rows import read_rows
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer


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
    every: int | None = None,
) -> tuple[Integer[np.ndarray, "B L E"], Int[np.ndarray, " B"], Routes | None]:
    """Count the token copies that every sample sends to every expert, from the recording of an engine.

    The result equals `relibra_jax.sample_load` of the replay that `relibra_jax.replay_from_rollout` reads, with the
    same checks. The function uses NumPy alone and no device, so a rollout worker can call it. It decodes, checks and
    counts one sample at a time in the dtype of the recording, and widens the ids of one layer of it, so its memory does
    not grow with the number of samples, apart from its result.

    Args:
        source, layout, mask, num_experts, top_k, num_layers, moe_layers, start, fill, live_routing: as in
            `relibra_jax.replay_from_rollout`, for the samples of this worker.
        every: the distance at which real tokens are taken as a sample of the routes, the same for all workers: the
            tokens of the batch divided by the 16,384 that planning needs. An odd number does not fall on the same
            positions of samples of equal length. None takes none; planning for crossings needs some.

    Returns:
        The load ``[B, L, E]`` in token copies, the number of tokens ``[B]`` of each sample, int32, and the sampled
        routes in the smallest dtype; ``Batch(*sample_counts(...))`` is a `relibra_jax.Batch` of the worker's samples,
        and `relibra_jax.join_batches` joins those of several workers. The load has the smallest of uint8, uint16 and
        int32 that can count the tokens of the longest sample, which is enough because no token has an expert twice.

    Raises:
        ValueError: under the conditions of `relibra_jax.replay_from_rollout`, or if ``every`` is below 1.

    >>> rows = np.array([[[0, 1]], [[3, 1]]])  # 2 tokens, 1 layer, top-2
    >>> mask = np.array([[False, True, True]])
    >>> model = {"num_experts": 4, "top_k": 2, "num_layers": 1}
    >>> load, tokens, routes = sample_counts([rows], layout="vllm", mask=mask, every=2, **model)
    >>> load.tolist(), load.dtype, tokens.tolist(), routes.expert_ids.tolist(), routes.sample.tolist()
    ([[[1, 2, 0, 1]]], dtype('uint8'), [2], [[[0, 1]]], [0])
    """
    expected = expect(
        mask,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=num_layers,
        moe_layers=moe_layers,
        start=start,
    )
    if every is not None:
        check_integer("every", every, least=1)
    shape = (len(expected.tokens), len(expected.moe_layers), num_experts)
    load = np.zeros(shape, _load_dtype(max(expected.tokens, default=0)))
    samples = read_rows(source, expected, layout=layout, fill=fill, live_routing=live_routing)
    taken = [np.zeros((0, *shape[1:2], top_k), id_dtype(num_experts))]
    numbers, first = [np.zeros(0, np.int32)], 0
    for sample, rows in enumerate(samples):
        load[sample] = count_copies(rows, num_experts=num_experts)
        if every is not None:
            taken.append(rows[-first % every :: every].astype(taken[0].dtype))
            numbers.append(np.full(len(taken[-1]), sample, np.int32))
        first += len(rows)
    routes = None if every is None else Routes(np.concatenate(taken), np.concatenate(numbers))
    return load, np.array(expected.tokens, np.int32), routes


def _load_dtype(tokens: int) -> np.dtype:
    return np.dtype(np.uint8 if tokens < 1 << 8 else np.uint16 if tokens < 1 << 16 else np.int32)
