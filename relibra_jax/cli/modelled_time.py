"""Modelled times of the batches of a trace, which is scaled to the size of real micro-batches."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.cli.batching import Batches
from relibra_jax.cli.options import Costs
from relibra_jax.cli.planner_runs import PlannedBatch
from relibra_jax.cost.batch_time import BatchTime, balanced_time, batch_time
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.cost.least_time import LeastTime, least_time
from relibra_jax.cost.memory import RankMemory, check_rank_memory, rank_memory
from relibra_jax.cost.models import MODELS, Model
from relibra_jax.cost.step_time import ACTIVATION_BYTES, RankTime, rank_time
from relibra_jax.cost.traffic import count_traffic, transfer_time
from relibra_jax.cost.unit_times import unit_times
from relibra_jax.limits import check_integer, check_positive
from relibra_jax.node_visits import node_visits
from relibra_jax.suggestions import suggest_names
from relibra_jax.traces.trace import Trace
from relibra_jax.types import Array, RoutingReplay, Topology, UnitTimes


class Crossings(NamedTuple):
    """Crossings of the slow network per token at dispatch: tokens (hierarchical path) or token copies (flat path)."""

    mean: float
    """The mean over all tokens of a batch."""
    busiest: float
    """What the busiest rank sends or receives, divided by the tokens of the mean rank; of the busiest node where the
    ranks of a node share a link. Over micro-batches it is the sum of maxima over the sum of means, which determines the
    time."""


class LinkTimes(NamedTuple):
    """The two networks during dispatch, for every rank; combine moves the same rows back."""

    inside: np.ndarray
    """``[M L N G]``, modelled seconds for which the links inside the node are busy."""
    crossing: np.ndarray
    """``[M L N G]``, modelled seconds for which the links between nodes are busy."""
    sent: np.ndarray
    """``[M L N G]``, tokens (hierarchical path) or token copies (flat path) sent to other nodes, at the scale of the
    cost model."""


class CostModel(NamedTuple):
    """The cost model of the cluster, the model and the sizes that `Costs` names."""

    cluster: Cluster
    """The hardware."""
    model: Model
    """The sizes of the model, with the trace's number of experts and top-k."""
    context: float
    """The mean length of a sequence, in tokens."""
    scale: float
    """The number of tokens that each token of the trace stands for."""
    hierarchical: bool = True
    """Whether a token crosses to a node once. Otherwise each of its copies crosses by itself."""
    updates: int = 1
    """The number of optimizer updates in a batch."""
    recompute: bool = False
    """Whether a batch has one more forward pass, which recomputes old log-probabilities."""
    shards: int = 1
    """The number of data-parallel copies over which optimizer state and gradient accumulators are sharded."""

    @property
    def dispatch(self) -> str:
        """The name of the dispatch path in `relibra_jax.cost`: ``hierarchical`` or ``flat``."""
        return "hierarchical" if self.hierarchical else "flat"

    def unit_times(self) -> UnitTimes:
        """Return the seconds that a unit of work takes on a rank, which planners get as their ``cost``."""
        return unit_times(dispatch=self.dispatch, **self.setting(), **self._passes())

    def rank_time(
        self, batch: PlannedBatch, topology: Topology, visits: Int[Array, "M L P N"] | None
    ) -> RankTime:
        """Return the modelled forward seconds of every rank under a plan, given the `visits` of its tokens."""
        return _rank_time(batch.batch_plan.layer_plans(), topology, visits=visits, **self.setting())

    def link_times(
        self, batch: PlannedBatch, topology: Topology, visits: Int[Array, "M L P N"] | None
    ) -> LinkTimes:
        """Return the modelled seconds of dispatch over each of the two networks, which work at the same time."""
        traffic = _count_traffic(batch.batch_plan.layer_plans(), topology, visits=visits)
        traffic = jax.tree.map(np.asarray, traffic)
        size, nothing = self.scale * ACTIVATION_BYTES * self.model.width, np.zeros(traffic.slow_sent.shape)
        inside = traffic._replace(slow_sent=nothing, slow_received=nothing)
        crossing = traffic._replace(fast_sent=nothing, fast_received=nothing)
        return LinkTimes(
            inside=np.asarray(transfer_time(inside, size, self.cluster)),
            crossing=np.asarray(transfer_time(crossing, size, self.cluster)),
            sent=self.scale * traffic.slow_sent,
        )

    def batch_time(
        self, batch: PlannedBatch, topology: Topology, visits: Int[Array, "M L P N"] | None
    ) -> BatchTime:
        """Return the modelled seconds of a batch under its plan, with the reorder before it.

        Args:
            batch: the batch with its plan.
            topology: the expert-parallel group.
            visits: the node visits of its tokens, as `CostModel.visits` returns them.
        """
        return batch_time(
            batch.batch_plan,
            topology,
            visits=visits,
            previous_home=batch.previous_home,
            **self.setting(),
            **self._passes(),
        )

    def balanced_time(self, load: Array, topology: Topology) -> BatchTime:
        """Return the modelled seconds of a perfectly balanced batch that has as many tokens as ``load``."""
        return balanced_time(load, topology, dispatch=self.dispatch, **self.setting(), **self._passes())

    def least_time(self, replay: RoutingReplay, topology: Topology, across_nodes: bool) -> LeastTime:
        """Return a lower bound of the modelled seconds of a batch over all plans."""
        return least_time(replay, topology, cost=self.unit_times(), across_nodes=across_nodes)

    def visits(self, batch: PlannedBatch, topology: Topology) -> Int[Array, "M L P N"] | None:
        """Count the node visits of a batch's tokens with `node_visits`; return None on the flat path."""
        return node_visits(batch.replay, batch.batch_plan, topology) if self.hierarchical else None

    def crossings(
        self, batch: PlannedBatch, topology: Topology, visits: Int[Array, "M L P N"] | None
    ) -> Crossings:
        """Return the crossings of the slow network per token of a batch.

        Args:
            batch: the batch with its plan.
            topology: the expert-parallel group.
            visits: the node visits of its tokens, as `CostModel.visits` returns them.
        """
        traffic = _count_traffic(batch.batch_plan.layer_plans(), topology, visits=visits)
        slow = np.stack([traffic.slow_sent, traffic.slow_received]).astype(float)
        if self.cluster.shared_link:
            slow = slow.mean(-1)[..., None]
        tokens = float(np.asarray(batch.batch_plan.load).sum(dtype=np.int64)) / self.model.top_k
        busiest = topology.num_ranks * slow.max((0, 3, 4)).sum()
        sent = topology.num_ranks * slow[0].mean((2, 3)).sum()
        return Crossings(sent / max(tokens, 1.0), busiest / max(tokens, 1.0))

    def rank_memory(self, topology: Topology, *, residents: bool) -> RankMemory:
        """Return the modelled memory of a rank in bytes, with or without the resident slots of the topology."""
        if not residents:
            topology = dataclasses.replace(topology, resident_slots=0)
        return rank_memory(topology, self.model, shards=self.shards)

    def setting(self) -> dict[str, Any]:
        """Return the hardware, model and sizes, as keyword arguments of `relibra_jax.cost.step_time.rank_time`."""
        return {"cluster": self.cluster, "model": self.model, "context": self.context, "scale": self.scale}

    def _passes(self) -> dict[str, Any]:
        return {"updates": self.updates, "recompute": self.recompute}


_rank_time = jax.jit(rank_time, static_argnames=("context", "scale"))
_count_traffic = jax.jit(count_traffic)


def find_model(name: str) -> Model:
    """Look up a model of `MODELS` by its name.

    Raises:
        ValueError: if there is no model of this name. The message suggests similar names.
    """
    return _look_up("model", name, MODELS)


def find_cluster(name: str) -> Cluster:
    """Look up a cluster of `CLUSTERS` by its name.

    Raises:
        ValueError: if there is no cluster of this name. The message suggests similar names.
    """
    return _look_up("cluster", name, CLUSTERS)


def _look_up[Entry](kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    if name not in table:
        raise ValueError(f"{kind}={name!r} must be one of {', '.join(table)}{suggest_names(name, table)}")
    return table[name]


def make_cost_model(costs: Costs, trace: Trace, batches: Batches, topology: Topology) -> CostModel:
    """Make the cost model that scales the micro-batches of a trace to ``costs.tokens_per_rank``.

    Args:
        costs: the names of the cluster and the model, and the sizes that the trace is scaled to.
        trace: the trace, which gives the number of experts and top-k.
        batches: the batches of the trace, which give the number of tokens in a micro-batch.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the cluster or the model is unknown, a number is out of its range, the work of a layer exceeds
            float32, or the resident slots do not fit the memory of a rank.
    """
    published, cluster = find_model(costs.model), find_cluster(costs.cluster)
    check_positive("context", costs.context)
    check_positive("tokens_per_rank", costs.tokens_per_rank)
    check_integer("shards", costs.shards, least=1)
    check_integer("updates", costs.updates, least=1)
    if costs.updates > batches.num_micro_batches:
        raise ValueError(f"updates={costs.updates} exceeds micro_batches={batches.num_micro_batches}")
    model = dataclasses.replace(
        published, top_k=trace.replay.expert_ids.shape[-1], num_experts=trace.num_experts
    )
    tokens = np.mean([replay.mask.sum() for replay in batches.replays]) / batches.num_micro_batches
    scale = costs.tokens_per_rank * topology.num_ranks / max(float(tokens), 1.0)
    # The work of one layer on a rank that has all tokens of the batch: the largest number that the cost model can meet.
    flops = model.token_flops(costs.context) + 2 * model.top_k * model.expert_params
    flops *= costs.tokens_per_rank * topology.num_ranks * batches.num_micro_batches
    if not flops < float(np.finfo(np.float32).max):
        raise ValueError(
            f"context={costs.context} and tokens_per_rank={costs.tokens_per_rank} give {flops:.3g} FLOP per layer, more"
            " than float32 can represent"
        )
    if topology.resident_slots:
        check_rank_memory(topology, model, cluster=cluster, shards=costs.shards)
    return CostModel(
        cluster,
        model,
        costs.context,
        scale,
        hierarchical=costs.dispatch == "hierarchical",
        updates=costs.updates,
        recompute=costs.recompute,
        shards=costs.shards,
    )
