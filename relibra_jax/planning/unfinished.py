"""Counts of a batch whose rollout still runs, so that its plan can be searched for before it ends."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Integer

from relibra_jax.types import EMPTY, Array, check_shape


def fill_unfinished(
    sample_load: Integer[Array, "B L E"], tokens: Integer[Array, " B"], finished: Bool[Array, " B"]
) -> tuple[Int[jax.Array, "B L E"], Int[jax.Array, " B"]]:
    """Let the finished samples of a batch stand in for those that still run.

    A sample that runs counts as the finished sample nearest to it in the batch, the earlier one of two: responses to
    one prompt are neighbours there, and route alike. Single samples stand in, and no mean, so that micro-batches are
    as uneven as they will be. Works under jit.

    Args:
        sample_load: token copies of each sample for each expert; those of samples that run are not read.
        tokens: the length of each sample, in real tokens; those of samples that run are not read.
        finished: the samples that have finished. If none has, all counts are 0.

    Returns:
        Counts and lengths of all samples, int32, for `relibra_jax.planning.plan_batch.plan_loads` or
        `relibra_jax.planning.plan_stages.plan_stage_loads`. Of their plan, homes and residents are worth keeping: as
        the ``warm_start`` of the plan from all counts.

    Raises:
        ValueError: if the arrays are of different numbers of samples.

    >>> load, tokens = jnp.array([[[9, 1]], [[0, 0]], [[0, 0]], [[2, 6]]]), jnp.array([5, 0, 0, 4])
    >>> load, tokens = fill_unfinished(load, tokens, jnp.array([True, False, False, True]))
    >>> load[:, 0].tolist(), tokens.tolist()
    ([[9, 1], [9, 1], [2, 6], [2, 6]], [5, 5, 4, 4])
    """
    check_shape("tokens", tokens.shape, sample_load.shape[:1])
    check_shape("finished", finished.shape, sample_load.shape[:1])
    number = jnp.arange(len(tokens), dtype=jnp.int32)
    behind = 2 * len(tokens)
    before = jax.lax.cummax(jnp.where(finished, number, -behind))
    after = jax.lax.cummin(jnp.where(finished, number, behind), reverse=True)
    nearest = jnp.where(number - before <= after - number, before, after)
    nearest = jnp.where(jnp.asarray(finished).any(), nearest, EMPTY)

    def of_nearest(counts: Array) -> jax.Array:
        return (
            jnp.asarray(counts, jnp.int32)
            .at[nearest]
            .get(mode="fill", fill_value=0, wrap_negative_indices=False)
        )

    return of_nearest(sample_load), of_nearest(tokens)
