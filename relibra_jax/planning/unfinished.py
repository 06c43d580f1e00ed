"""Token counts of a batch whose rollout still runs, from which planning can start early."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.types import EMPTY, Array, check_shape


def fill_unfinished(
    sample_load: Integer[Array, "B L E"], tokens: Integer[Array, " B"], finished: Bool[Array, " B"]
) -> tuple[Int[jax.Array, "B L E"], Int[jax.Array, " B"]]:
    """Replace the counts of unfinished samples of a batch by those of finished samples.

    An unfinished sample gets the counts of the finished sample nearest to it in the batch; of two equally near ones,
    the earlier. Responses to one prompt are neighbours in the batch, and their routing is similar. Single samples are
    used instead of a mean so that micro-batches are as uneven as they will be. Works under jit.

    Args:
        sample_load: the number of token copies of each sample for each expert. Rows of unfinished samples are not read.
        tokens: the length of each sample in real tokens. Entries of unfinished samples are not read.
        finished: whether each sample has finished. If none has, all counts are 0.

    Returns:
        The counts and lengths of all samples, int32, for `relibra_jax.planning.plan_batch.plan_loads` or
        `relibra_jax.planning.plan_stages.plan_stage_loads`. Use the homes and residents of that plan as the
        ``warm_start`` of the plan from the complete counts.

    Raises:
        ValueError: if the arrays have different numbers of samples.

    >>> load, tokens = jnp.array([[[9, 1]], [[0, 0]], [[0, 0]], [[2, 6]]]), jnp.array([5, 0, 0, 4])
    >>> load, tokens = fill_unfinished(load, tokens, jnp.array([True, False, False, True]))
    >>> load[:, 0].tolist(), tokens.tolist()
    ([[9, 1], [9, 1], [2, 6], [2, 6]], [5, 5, 4, 4])
    """
    check_shape("tokens", tokens.shape, sample_load.shape[:1])
    check_shape("finished", finished.shape, sample_load.shape[:1])
    index = jnp.arange(len(tokens), dtype=jnp.int32)
    beyond = 2 * len(tokens)
    earlier = jax.lax.cummax(jnp.where(finished, index, -beyond))
    later = jax.lax.cummin(jnp.where(finished, index, beyond), reverse=True)
    nearest = jnp.where(index - earlier <= later - index, earlier, later)
    nearest = jnp.where(jnp.asarray(finished).any(), nearest, EMPTY)

    def of_nearest(counts: Array) -> jax.Array:
        return (
            jnp.asarray(counts, jnp.int32)
            .at[nearest]
            .get(mode="fill", fill_value=0, wrap_negative_indices=False)
        )

    return of_nearest(sample_load), of_nearest(tokens)
