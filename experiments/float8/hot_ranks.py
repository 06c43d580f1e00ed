"""A rule that finds overloaded ranks, which then compute their experts in float8.

All ranks of a layer wait for the one with the most token copies. ReaLB (arXiv:2604.19503) lets such a rank compute its
experts in a lower precision if it has more than a minimum of tokens. Here the rule reads what a plan gives every rank:
planners do not know of it, and it does not change the plan. There are three differences. ReaLB decides while the model
runs, whereas the load of a recorded batch is known before. ReaLB also requires that most tokens of the rank come from
images; text has no such tokens, so here any rank may be hot. And ReaLB computes in FP4, this module in e4m3
(`experiments.float8.grouped_mlp`). Float8 serves rollout and recompute only, never passes that compute gradients.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Int

from experiments.float8.grouped_mlp import grouped_mlp_float8
from pallas_kernels import grouped_mlp
from relibra_jax.contract.types import LayerPlan, Plan
from relibra_jax.execution.expert_mlp import GeneralMlp
from relibra_jax.execution.mesh import RANKS
from relibra_jax.nnx import MoELayer
from relibra_jax.support.limits import check_integer, check_not_negative


@dataclass(frozen=True, kw_only=True)
class HotRanks:
    """A rule for hot ranks: their load exceeds a multiple of the mean, and they have enough rows for float8 to pay off.

    A rule is itself the function with which a rank computes its rows: in float8 if the rank is hot, and exactly
    otherwise. Pass it to a layer as ``expert_mlp`` (`relibra_jax.execution.moe_layer`, `relibra_jax.nnx.MoELayer`), or
    use `in_float8` for a whole model.

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

    def __call__(
        self,
        rows: jax.Array,
        weights: Sequence[jax.Array],
        group_sizes: jax.Array,
        row_scale: jax.Array,
        *,
        implementation: str | None,
    ) -> jax.Array:
        """Compute the rows of one rank, with the arguments of `grouped_mlp`, inside `jax.shard_map` over the ranks."""
        own = group_sizes.sum(dtype=jnp.int32)
        hot = self.is_hot(own, jax.lax.psum(own, RANKS) / jax.lax.axis_size(RANKS))
        exact, rounded = (
            functools.partial(function, implementation=implementation)
            for function in (grouped_mlp, grouped_mlp_float8)
        )
        return jax.lax.cond(hot, rounded, exact, rows, weights, group_sizes, row_scale)

    def is_hot(self, rows: Int[jax.Array, "*ranks"], mean: jax.Array) -> Bool[jax.Array, "*ranks"]:
        """Return whether ranks with this many rows are hot, if ``mean`` is the mean over the ranks."""
        return (rows > self.threshold * mean) & (rows >= self.min_rows)


def mark_hot_ranks(plan: Plan | LayerPlan, rule: HotRanks) -> Bool[jax.Array, "*stack N G"]:
    """Find the hot ranks of a plan in every micro-batch and layer, those whose layers then compute in float8.

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
    return rule.is_hot(rows, rows.astype(jnp.float32).mean((-2, -1), keepdims=True))


def in_float8[Module: nnx.Module](model: Module, rule: HotRanks) -> Module:
    """Make a model of the same parameters for passes without gradients, in which hot ranks compute in float8.

    The model has the arrays that ``model`` has now: make another one after an update. It takes the same prepared
    batches, and runs with live routing too. It raises an error if gradients are computed
    (`experiments.float8.grouped_mlp`).

    Args:
        model: the model, with any number of `MoELayer`.
        rule: the rule for which ranks are hot.

    Raises:
        ValueError: if experts have biases, or another activation than SwiGLU.

    >>> from relibra_jax import Topology
    >>> from relibra_jax.nnx import GATINGS
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> layer = MoELayer(topology, 8, 16, GATINGS["gpt-oss"], rngs=nnx.Rngs(0))
    >>> in_float8(layer, HotRanks(threshold=1.2)).expert_mlp
    HotRanks(threshold=1.2, min_rows=2048)
    """
    model = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MoELayer):
            if isinstance(module.expert_mlp, GeneralMlp):
                raise ValueError(f"experts have {module.expert_mlp}, but float8 is for SwiGLU without biases")
            module.expert_mlp = rule
    return model
