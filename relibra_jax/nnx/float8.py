"""Prepared batches whose hot ranks compute their experts in float8, for rollout and recompute."""

import dataclasses
import functools

import jax

from relibra_jax.contract.types import Plan
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.nnx.prepare_batch import group_by_copy
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.routing.hot_ranks import HotRanks, mark_hot_ranks


def in_float8(batch: PreparedBatch, rule: HotRanks) -> PreparedBatch:
    """Copy a prepared batch for passes without gradients, in which hot ranks compute their experts in float8.

    The copy has the plan, tables and buffer sizes of ``batch``. Use ``batch`` itself to move samples (``to_ranks``,
    ``from_ranks``) and for the updates: `relibra_jax.nnx.accumulate_gradients` rejects the copy. For live routing the
    step counts the load and decides from it which ranks are hot. A rollout without a batch needs no copy but
    ``dataclasses.replace(balancer.live, float8=rule)``.

    Args:
        batch: the prepared batch (`relibra_jax.nnx.Balancer.prepare`), from a replay or for live routing.
        rule: the rule for which ranks are hot.

    Returns:
        A batch for jitted steps, valid as long as ``batch`` is.

    Raises:
        ValueError: if the balancer has prepared another batch since.

    >>> import numpy as np
    >>> from flax import nnx
    >>> from relibra_jax import RoutingReplay, Topology, static
    >>> from relibra_jax.nnx import GATINGS, Balancer, MoELayer, expert_mesh
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> mesh = expert_mesh(topology, devices=jax.devices()[:1])
    >>> model = MoELayer(topology, 8, 16, GATINGS["gpt-oss"], rngs=nnx.Rngs(0))
    >>> options = {"num_layers": 1, "num_micro_batches": 2, "key": jax.random.key(0)}
    >>> replay = RoutingReplay(np.tile(np.arange(4, dtype=np.uint8), (2, 5, 1, 1)), np.ones((2, 5), bool))
    >>> batch = Balancer(static(), topology, mesh=mesh, **options).prepare(model, None, replay)
    >>> in_float8(batch, HotRanks(threshold=0.0, min_rows=1)).layers().tokens.float8.tolist()  # [M L N G]
    [[[[True]]], [[[True]]]]
    """
    parallel, layers = dataclasses.replace(batch.parallel, float8=rule), batch.layers()
    if layers is None:
        marked = PreparedBatch(None, parallel)
    else:
        plan = batch.batch_plan
        marked = PreparedBatch(plan, parallel, layers=_mark(layers, plan.plan, parallel))
    marked.check_in_force = batch.check_in_force
    return marked


def check_exact(batch: PreparedBatch) -> None:
    """Raise ValueError if ranks of the batch compute in float8, which has no gradient."""
    if batch.parallel.float8 is not None:
        raise ValueError(
            f"updates cannot run in float8, but this batch has float8={batch.parallel.float8}: run them with the batch"
            " that was passed to in_float8"
        )


@functools.partial(jax.jit, static_argnames="parallel")
def _mark(layers: PreparedLayer, plan: Plan, parallel: ExpertParallel) -> PreparedLayer:
    """Mark the hot ranks in the tables of layers ``[M, L, *copies]``, by the quotas of the plan."""
    assert layers.tokens is not None
    assert parallel.float8 is not None
    marks = group_by_copy(mark_hot_ranks(plan, parallel.float8), parallel.copies)
    return layers._replace(tokens=layers.tokens._replace(float8=marks))
