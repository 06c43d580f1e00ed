"""A rule that marks overloaded ranks, which then compute their experts in float8.

All ranks of a layer wait for the one with the most token copies. ReaLB (arXiv:2604.19503) lets such a rank compute its
experts in a lower precision if it has more than a minimum of tokens. Here the marks are computed from a finished plan:
planners do not use them, and they do not change the plan. There are three differences. ReaLB decides while the model
runs, whereas the load of a recorded batch is known before. ReaLB also requires that most tokens of the rank come from
images; text has no such tokens, so here any rank may be marked. And ReaLB computes in FP4, this library in e4m3
(`pallas_kernels.grouped_mlp_float8`). Float8 serves rollout and recompute only, never passes that compute gradients.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from relibra_jax.contract.types import LayerPlan, Plan
from relibra_jax.support.limits import check_integer, check_not_negative


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class HotRanks:
    """A rule for hot ranks: their load exceeds a multiple of the mean, and they have enough rows for float8 to pay off.

    Raises:
        ValueError: if ``threshold`` is negative or not finite, or if ``min_rows`` is not an integer of at least 1.

    >>> HotRanks(threshold=1.2).min_rows
    2048
    """

    threshold: float
    """A hot rank has more than this many times the mean load of its micro-batch and layer. 0 marks all ranks that have
    at least ``min_rows`` rows."""
    min_rows: int = 2048
    """The fewest rows of a hot rank. The default is that of ReaLB, below which its ranks stay in bfloat16."""

    def __post_init__(self) -> None:
        check_not_negative("threshold", self.threshold)
        check_integer("min_rows", self.min_rows, least=1)


def mark_hot_ranks(plan: Plan | LayerPlan, rule: HotRanks) -> Bool[jax.Array, "*stack N G"]:
    """Mark the hot ranks of a plan in every micro-batch and layer. Works under jit and vmap.

    Args:
        plan: the plan. Only its quotas are read.
        rule: the rule that decides which ranks are hot.

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
