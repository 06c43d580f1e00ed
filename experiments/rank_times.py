"""The times of ranks that wait for each other: each rank's expert compute, timed alone on one device.

A step waits for its slowest rank in every stage, which is one layer of one micro-batch. Each rank's rows, grouped as in
the plan, can be timed without a cluster. The slowest rank's time, summed over stages, is what expert compute would take
on one such device per rank. It excludes exchanges, replica pushes and attention.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from experiments.interleaving import interleaved
from pallas_kernels import grouped_mlp
from relibra_jax.contract.types import Array


def quotas_of_ranks(quota: Int[Array, "M L N G S"]) -> Int[np.ndarray, "stages ranks S"]:
    """Return the quotas of a plan by stage and flat rank."""
    return np.asarray(quota).reshape(-1, quota.shape[2] * quota.shape[3], quota.shape[4])


def rank_seconds(
    quotas: Mapping[str, Int[np.ndarray, "stages ranks S"]],
    rows: jax.Array,
    buffers: Sequence[jax.Array],
    *,
    repeats: int,
    implementation: str | None = None,
    shortest: float = 0.0,
) -> dict[str, Float[np.ndarray, "stages ranks"]]:
    """Time the grouped MLP with gradients for the group sizes of every rank in every stage, alternating.

    Args:
        quotas: the group sizes, by the name of the planner.
        rows: the rows ``[r, D]``, at least as many as any rank has.
        buffers: the weights of all slots, in one or more buffers ``[slots, 3, D, F]``.
        repeats: the number of readings of each rank's work, of which the median counts.
        implementation: the implementation of `pallas_kernels` to time.
        shortest: the minimum duration of a reading in seconds.

    Returns:
        The median seconds, by the name of the planner.
    """
    runs: dict[Any, Callable[[], object]] = {
        (name, *place): functools.partial(
            expert_gradients, rows, tuple(buffers), jnp.asarray(quota[place]), implementation
        )
        for name, quota in quotas.items()
        for place in np.ndindex(quota.shape[:2])
    }
    seconds = {name: np.zeros(quota.shape[:2]) for name, quota in quotas.items()}
    for (name, *place), median in interleaved(runs, repeats=repeats, shortest=shortest).items():
        seconds[name][tuple(place)] = median
    return seconds


@functools.partial(jax.jit, static_argnums=3)
def expert_gradients(rows, buffers, sizes, implementation):
    """Return the output of the grouped MLP, and the gradients of rows and buffers for the output as its cotangent."""

    def call(rows, buffers):
        return grouped_mlp(rows, buffers, sizes, implementation=implementation)

    out, pull = jax.vjp(call, rows, buffers)
    return out, *pull(out)


def slowest_seconds(seconds: Float[np.ndarray, "stages ranks"]) -> float:
    """Return the seconds of the slowest rank, summed over stages.

    >>> slowest_seconds(np.array([[1.0, 3.0], [2.0, 1.0]]))
    5.0
    """
    return float(seconds.max(1).sum())


def imbalance_over_stages(values: Num[np.ndarray, "stages ranks"]) -> float:
    """Return the sum over stages of the slowest rank over the sum of the means; of seconds or of rows.

    >>> imbalance_over_stages(np.array([[1.0, 3.0], [2.0, 2.0]]))
    1.25
    """
    return float(values.max(1).sum() / values.mean(1).sum())
