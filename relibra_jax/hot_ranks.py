"""Ranks that have more to compute than others, and are to compute it in float8: precision as a plan.

A layer waits for its fullest rank. ReaLB (arXiv:2604.19503) lets such a rank compute its experts in a lower precision,
where it has more than so many tokens. Marks follow from a plan and change nothing of it: planners know nothing of them.
ReaLB decides while the model runs; a recorded batch is known before it does. Of its conditions one has no counterpart
here, that most of the rank's tokens be those of images: text has none, so any rank may be marked. And its precision is
FP4, ours e4m3 (`pallas_kernels.grouped_mlp_float8`). Nothing is learnt from in float8: it is for rollout and recompute.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from relibra_jax.limits import check_integer, check_not_negative
from relibra_jax.types import LayerPlan, Plan


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class HotRanks:
    """Which ranks are hot: those above a multiple of the mean that have rows enough for it to pay.

    Raises:
        ValueError: if ``threshold`` is negative or not finite, or ``min_rows`` is no integer of at least 1.

    >>> HotRanks(threshold=1.2).min_rows
    2048
    """

    threshold: float
    """A rank is hot whose load is above so many times the mean of its micro-batch and layer; 0 for all ranks with rows
    enough."""
    min_rows: int = 2048
    """The fewest rows of a hot rank; by default the floor of ReaLB, below which its ranks stay in bfloat16."""

    def __post_init__(self) -> None:
        check_not_negative("threshold", self.threshold)
        check_integer("min_rows", self.min_rows, least=1)


def mark_hot_ranks(plan: Plan | LayerPlan, rule: HotRanks) -> Bool[jax.Array, "*stack N G"]:
    """Which ranks of a plan are hot, in every micro-batch and layer. Works under jit and vmap.

    Args:
        plan: the plan, of which only the quotas are read.
        rule: what makes a rank hot.

    Returns:
        True for hot ranks, ``[M, L, N, G]`` for a `Plan`.

    >>> import numpy as np
    >>> quota = np.array([[[40, 0], [30, 0]], [[20, 10], [0, 20]]])  # ranks of 40, 30, 30 and 20 rows, mean 30
    >>> plan = LayerPlan(np.zeros_like(quota), np.arange(4), quota, None)
    >>> mark_hot_ranks(plan, HotRanks(threshold=1.0, min_rows=1)).tolist()
    [[True, False], [False, False]]
    >>> mark_hot_ranks(plan, HotRanks(threshold=0.9, min_rows=31)).tolist()
    [[True, False], [False, False]]
    """
    rows = jnp.asarray(plan.quota, jnp.int32).sum(-1, dtype=jnp.int32)
    mean = rows.astype(jnp.float32).mean((-2, -1), keepdims=True)
    return (rows > rule.threshold * mean) & (rows >= rule.min_rows)
