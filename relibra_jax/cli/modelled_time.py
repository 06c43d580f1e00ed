"""Modelled times of a trace's batches, read at the size of real micro-batches."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.cli.batching import Batches
from relibra_jax.cli.options import Costs
from relibra_jax.cli.planner_runs import PlannedBatch
from relibra_jax.cli.traces import Trace
from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.cost.step_time import RankTime, rank_time
from relibra_jax.limits import check_positive
from relibra_jax.node_visits import node_visits
from relibra_jax.types import Array, Topology


class CostModel(NamedTuple):
    """The cost model at the scale that `Costs` asks for."""

    cluster: Cluster
    """The hardware."""
    model: Model
    """The model, with the trace's number of experts and top-k."""
    context: float
    """The mean length of a sequence, tokens."""
    scale: float
    """How many tokens each token of the trace stands for."""
    hierarchical: bool
    """Whether a token crosses to a node once, rather than each of its copies."""

    def rank_time(self, batch: PlannedBatch, topology: Topology) -> RankTime:
        """The modelled forward seconds of every rank under a plan."""
        visits = self._visits(batch, topology)
        return _rank_time(batch.batch_plan.layer_plans(), topology, visits=visits, **self.setting())

    def batch_time(self, batch: PlannedBatch, topology: Topology) -> BatchTime:
        """The modelled seconds of a batch under its plan, the reorder before it included."""
        return batch_time(
            batch.batch_plan,
            topology,
            visits=self._visits(batch, topology),
            previous_home=batch.previous_home,
            **self.setting(),
        )

    def balanced_time(self, load: Array, topology: Topology) -> BatchTime:
        """The modelled seconds of a perfectly balanced batch with as many tokens."""
        dispatch = "hierarchical" if self.hierarchical else "flat"
        return balanced_time(load, topology, dispatch=dispatch, **self.setting())

    def _visits(self, batch: PlannedBatch, topology: Topology) -> Int[np.ndarray, "M L P N"] | None:
        return node_visits(batch.replay, batch.batch_plan, topology) if self.hierarchical else None

    def setting(self) -> dict[str, Any]:
        """The arguments of `relibra_jax.cost.step_time.rank_time` that say what time stands for."""
        return {"cluster": self.cluster, "model": self.model, "context": self.context, "scale": self.scale}


_rank_time = jax.jit(rank_time, static_argnames=("context", "scale"))


def make_cost_model(costs: Costs, trace: Trace, batches: Batches, topology: Topology) -> CostModel:
    """The cost model that scales a trace's micro-batches to the tokens that ``costs`` names.

    Args:
        costs: names of the cluster and the model, and the sizes to which the trace is scaled.
        trace: the trace, for its number of experts and top-k.
        batches: the batches of the trace, for the tokens of their micro-batches.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the cluster or the model is unknown, a number is not positive and finite, or times would exceed
            float32.
    """
    for name, value, table in (("hardware", costs.hardware, CLUSTERS), ("model", costs.model, MODELS)):
        if value not in table:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(table)}")
    check_positive("context", costs.context)
    check_positive("tokens_per_rank", costs.tokens_per_rank)
    model = dataclasses.replace(
        MODELS[costs.model], top_k=trace.replay.expert_ids.shape[-1], num_experts=trace.num_experts
    )
    tokens = np.mean([replay.mask.sum() for replay in batches.replays]) / batches.num_micro_batches
    scale = costs.tokens_per_rank * topology.num_ranks / max(float(tokens), 1.0)
    # A rank that had all tokens of a batch would compute so much in one layer.
    flops = model.token_flops(costs.context) + 2 * model.top_k * model.expert_params
    flops *= costs.tokens_per_rank * topology.num_ranks * batches.num_micro_batches
    if not flops < float(np.finfo(np.float32).max):
        raise ValueError(
            f"context={costs.context} and tokens_per_rank={costs.tokens_per_rank} make {flops:.3g} FLOP a layer, more"
            " than float32 holds"
        )
    return CostModel(CLUSTERS[costs.hardware], model, costs.context, scale, costs.dispatch == "hierarchical")
