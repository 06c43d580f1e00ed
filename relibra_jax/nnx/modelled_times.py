"""The modelled time of a prepared batch, beside that of staying put and of a balanced run.

The times come from the price with which the batch was planned, and from the same estimate of crossings, here for all
layers. Nothing in them is measured.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Int

from relibra_jax.contract.plan import expert_totals
from relibra_jax.contract.types import Array, Assignment, BatchPlan, Price, Topology
from relibra_jax.cost.batch_time import BatchTime, balanced_time
from relibra_jax.nnx.stage_plans import on_host
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_batch import Stage, first_assignment
from relibra_jax.planning.plan_price import estimate_time
from relibra_jax.planning.replication import without_replicas
from relibra_jax.routing.striping import planned_load


class ModelledTimes(NamedTuple):
    """The modelled seconds of one stage of a batch, or of several together."""

    plan: BatchTime
    """The seconds under the plan."""
    staying: BatchTime
    """The seconds if the samples stayed where the search started and the experts at their previous homes, without
    residents and replicas."""
    balanced: BatchTime
    """The seconds of a balanced run with uniform routing (`relibra_jax.cost.batch_time.balanced_time`)."""


def model_stage(
    batch_plan: BatchPlan,
    batch: Batch,
    stage: Stage,
    price: Price,
    topology: Topology,
    *,
    previous_home: Int[Array, "L E"],
    moves: bool,
) -> ModelledTimes:
    """Model the times of one stage of a batch, on the host.

    Args:
        batch_plan: the plan of the stage.
        batch: the samples from which the batch was planned.
        stage: the stage.
        price: the price of the stage.
        topology: the expert-parallel group.
        previous_home: the homes before the batch.
        moves: whether the moves of experts count in this stage.
    """
    with on_host():
        start = first_assignment(stage, batch, price, topology)
        return _model_stage(batch_plan, start, batch, previous_home, price, topology=topology, moves=moves)


@functools.partial(jax.jit, static_argnames=("topology", "moves"))
def _model_stage(
    batch_plan: BatchPlan,
    start: Assignment,
    batch: Batch,
    previous_home: Int[Array, "L E"],
    price: Price,
    *,
    topology: Topology,
    moves: bool,
) -> ModelledTimes:
    load = planned_load(batch.sample_load, start, price)
    staying = BatchPlan(start, load, without_replicas(expert_totals(load), previous_home, topology))

    def model(plan: BatchPlan) -> BatchTime:
        before = previous_home if moves else None
        return estimate_time(plan, batch, topology, price, previous_home=before)

    balanced = balanced_time(
        batch_plan.load,
        batch.lengths,
        topology,
        price,
        sequence_length=batch.sequence_length,
        num_sequences=start.sample.shape[-1],
    )
    return ModelledTimes(model(batch_plan), model(staying), balanced)


def add_stages(stages: Sequence[ModelledTimes]) -> ModelledTimes:
    """Add up the modelled times of the stages of a batch."""
    return jax.tree.map(lambda *parts: sum(parts), *stages)


def summarise(times: ModelledTimes, plan_seconds: float) -> str:
    """Describe modelled times in five lines.

    Args:
        times: the modelled times.
        plan_seconds: the seconds that planning took.
    """
    plan, staying, balanced = (float(time.total) for time in times)
    return "\n".join(
        [
            "modelled time of this batch in seconds (a model, not a measurement)",
            *(f"  {name:<11} {_parts(time)}" for name, time in zip(_NAMES, times, strict=True)),
            f"  {balanced / plan:.1%} of the balanced run, {staying / plan - 1:+.1%} over staying put;"
            f" planned in {plan_seconds:.2f} s (measured)",
        ]
    )


_NAMES = ("plan", "staying put", "balanced")


def _parts(time: BatchTime) -> str:
    parts = " + ".join(f"{name} {float(value):.3g}" for name, value in time.parts().items() if value)
    return f"{float(time.total):.4g} = {parts}"
