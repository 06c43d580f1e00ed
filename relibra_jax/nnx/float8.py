"""Prepared batches whose hot ranks compute their experts in float8, for rollout and recompute."""

import dataclasses
import functools

import jax

from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.hot_ranks import HotRanks, mark_hot_ranks
from relibra_jax.nnx.prepare_batch import by_copy
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.types import Plan


def in_float8(batch: PreparedBatch, rule: HotRanks) -> PreparedBatch:
    """The same batch for passes that nothing is learnt from: hot ranks compute their experts in float8.

    Plan, tables and buffers are those of ``batch``, which goes on moving samples (``to_ranks``, ``from_ranks``) and
    serves the updates: `relibra_jax.nnx.accumulate_gradients` refuses what this returns. Live routing is marked in the
    step, from the load that it counts; for a rollout without a batch, ``dataclasses.replace(balancer.live,
    float8=rule)``.

    Args:
        batch: what `relibra_jax.nnx.Balancer.prepare` returned, in replay or live.
        rule: what makes a rank hot.

    Returns:
        A batch to give to jitted steps, in force as long as ``batch`` is.

    Raises:
        ValueError: if another batch has been prepared since.

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
    """Raise ValueError if ranks of the batch compute in float8, which nothing is learnt from."""
    if batch.parallel.float8 is not None:
        raise ValueError(
            f"updates compute exactly, and this batch is in float8 ({batch.parallel.float8}): give them the batch that"
            " in_float8 was given"
        )


@functools.partial(jax.jit, static_argnames="parallel")
def _mark(layers: PreparedLayer, plan: Plan, parallel: ExpertParallel) -> PreparedLayer:
    """The layers ``[M, L, *copies]`` with the marks of their plans."""
    assert layers.tokens is not None
    assert parallel.float8 is not None
    marks = by_copy(mark_hot_ranks(plan, parallel.float8), parallel.copies)
    return layers._replace(tokens=layers.tokens._replace(float8=marks))
