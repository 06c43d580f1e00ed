"""Run planners over a trace, batch by batch as a trainer would, and measure what they do."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.configs import Batching, Costs
from experiments.traces import Trace
from relibra_jax.plan import check_plan, rank_load, replica_count
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.cost.step_time import (
    LayerTime,
    RankTime,
    balanced_time,
    batch_time,
    layer_time,
    rank_time,
    reorder_time,
)
from relibra_jax.cost.hardware import CLUSTERS, MODELS, Cluster, Model
from relibra_jax.planning.metrics import (
    batch_imbalance,
    cross_node_load,
    imbalance,
    moved_experts,
    replication_bound,
)
from relibra_jax.planning.planners import Assign, PlannerEntry, plan_batch
from relibra_jax.replay import expert_load
from relibra_jax.token_split import node_visits
from relibra_jax.types import Assignment, Plan, RoutingReplay, Topology

TIMED_RUNS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A planner, and who assigns the samples."""

    row: PlannerEntry
    assign: Assign | None = None
    """None keeps the order of the trace."""


class Batches(NamedTuple):
    """A trace cut into batches; with two or more, the first ``history`` are planned but not measured."""

    replays: list[RoutingReplay]
    num_micro_batches: int
    history: int
    samples_left: int
    """Samples at the end of the trace that do not fill a batch."""


class Planned(NamedTuple):
    """One measured batch."""

    replay: RoutingReplay
    assignment: Assignment
    load: jax.Array
    plan: Plan
    previous_home: jax.Array


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one contender made of a trace; the arrays at the end stay out of the JSON."""

    planner: str
    imbalance: float
    """Over the measured batches: a layer's sum of maxima over its sum of means, averaged over layers."""
    imbalance_p95: float
    """95th percentile over layers and micro-batches."""
    imbalance_max: float
    bound: float
    """The same imbalance if every layer and micro-batch reached its replication bound, given the homes."""
    attention_imbalance: float
    """Of tokens over ranks, in the same sense."""
    cross_node_share: float
    """Share of token copies that leave their node at dispatch."""
    replicas: float
    """Replicas of one layer in one micro-batch, on average."""
    moved_experts: float
    """Experts of one layer that change rank before a batch, on average."""
    modelled_seconds: float
    """Modelled time of the layers of one batch, the reorder included; not measured."""
    share_of_balanced: float
    """Modelled time of a perfectly balanced batch over this one's."""
    plan_seconds: float
    """Measured time of one batch's plan after compilation, the median of several runs."""
    planned: list[Planned] = dataclasses.field(repr=False)

    @property
    def rank_load(self) -> np.ndarray:
        """Of the measured batches, one after another: ``[M L N G]``."""
        return np.concatenate([np.asarray(rank_load(batch.plan)) for batch in self.planned])

    def numbers(self) -> dict[str, object]:
        """Everything but the arrays."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "planned"}


class CostModel(NamedTuple):
    """Modelled times at the scale that `Costs` asks for."""

    cluster: Cluster
    model: Model
    context: float
    scale: float
    hierarchical: bool

    def ranks(self, batch: Planned, topology: Topology) -> RankTime:
        """Of every rank under a plan."""
        visits = None
        if self.hierarchical:
            visits = node_visits(batch.replay, batch.assignment, batch.plan, topology)
        return priced(batch.plan, batch.load, topology, visits=visits, **self._known())

    def balanced(self, load: jax.Array, topology: Topology) -> LayerTime:
        """Of a perfectly balanced batch."""
        return layer_time(balanced_time(load, topology, hierarchical=self.hierarchical, **self._known()))

    def _known(self) -> dict[str, Any]:
        return {"cluster": self.cluster, "model": self.model, "context": self.context, "scale": self.scale}


priced = jax.jit(rank_time, static_argnames=("context", "scale"))


def cost_model(costs: Costs, trace: Trace, batches: Batches, topology: Topology) -> CostModel:
    """Scale the trace's micro-batches to the tokens that ``costs`` names.

    Raises:
        ValueError: an unknown cluster or model, or a number that is not positive.
    """
    for name, value, table in (("hardware", costs.hardware, CLUSTERS), ("model", costs.model, MODELS)):
        if value not in table:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(table)}")
    for name, number in (("context", costs.context), ("tokens_per_rank", costs.tokens_per_rank)):
        if not number > 0:
            raise ValueError(f"{name}={number} must be positive")
    model = MODELS[costs.model]
    top_k = trace.replay.expert_ids.shape[-1]
    model = dataclasses.replace(model, top_k=top_k, num_experts=trace.num_experts)
    tokens = np.mean([replay.mask.sum() for replay in batches.replays]) / batches.num_micro_batches
    scale = costs.tokens_per_rank * topology.num_ranks / max(float(tokens), 1.0)
    return CostModel(CLUSTERS[costs.hardware], model, costs.context, scale, costs.dispatch == "hierarchical")


def make_batches(trace: Trace, batching: Batching) -> Batches:
    """Cut a trace into batches.

    Raises:
        ValueError: sizes that do not fit each other or the trace.
    """
    samples, per_micro_batch, batch = len(trace.replay.mask), batching.micro_batch_size, batching.batch_size
    if per_micro_batch < 1:
        raise ValueError(f"micro_batch_size={per_micro_batch} must be at least 1")
    if batch is None:
        batch = max(1, samples // 2 // per_micro_batch) * per_micro_batch
    if batch < 1 or batch % per_micro_batch:
        raise ValueError(f"batch_size={batch} must be a multiple of micro_batch_size={per_micro_batch}")
    if batch > samples:
        raise ValueError(f"batch_size={batch} exceeds the {samples} samples of {trace.name}")
    order = np.arange(samples)
    if batching.order == "shuffled":
        order = np.random.default_rng(batching.seed).permutation(samples)
    chosen = [order[start : start + batch] for start in range(0, samples - batch + 1, batch)]
    replays = [RoutingReplay(trace.replay.expert_ids[part], trace.replay.mask[part]) for part in chosen]
    return Batches(replays, batch // per_micro_batch, int(len(chosen) > 1), samples - batch * len(chosen))


def run_contender(
    contender: Contender, batches: Batches, topology: Topology, *, seed: int
) -> tuple[list[Planned], float]:
    """The plans of the measured batches, each judged, and the median seconds of planning the last one.

    Where samples keep their order, counting their load is not part of planning; where they are assigned, it is.
    """
    row, assign, num_micro_batches = contender.row, contender.assign, batches.num_micro_batches
    layers = batches.replays[0].expert_ids.shape[2]
    in_order = assign_in_order(len(batches.replays[0].mask), topology, num_micro_batches=num_micro_batches)
    update = jax.jit(row.planner.update)
    joint = jax.jit(
        functools.partial(plan_batch, assign=assign, num_micro_batches=num_micro_batches),
        static_argnums=(1, 3),
    )

    state = row.planner.init(topology, layers, key=jax.random.key(seed))
    home = jnp.tile(jnp.arange(topology.num_experts)[None], (layers, 1))
    planned = []
    for number, replay in enumerate(batches.replays):
        before = state
        if assign is None:
            assignment = in_order
            load = count_load(replay, assignment, num_experts=topology.num_experts)
            plan, state = update(load, state, topology)
        else:
            assignment, plan, state = joint(replay, row.planner, state, topology)
            load = count_load(replay, assignment, num_experts=topology.num_experts)
        check_plan(plan, load, topology, intra_node=row.intra_node)
        if number >= batches.history:
            planned.append(Planned(replay, assignment, load, plan, home))
        home = plan.home
    if assign is None:
        return planned, _median_seconds(lambda: update(load, before, topology))
    return planned, _median_seconds(lambda: joint(replay, row.planner, before, topology))


count_load = jax.jit(expert_load, static_argnames="num_experts")


def compare(
    contenders: Mapping[str, Contender],
    batches: Batches,
    topology: Topology,
    costs: CostModel,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """Run every contender over the same batches; ``progress`` is called with the name of each that has finished."""
    outcomes = []
    for name, contender in contenders.items():
        planned, seconds = run_contender(contender, batches, topology, seed=seed)
        outcomes.append(_outcome(name, contender.row, planned, seconds, topology, costs))
        progress(name)
    return outcomes


def _outcome(
    name: str, row: PlannerEntry, planned: list[Planned], seconds: float, topology: Topology, costs: CostModel
) -> Outcome:
    by_rank = np.concatenate([np.asarray(rank_load(batch.plan)) for batch in planned])
    tokens = np.concatenate([np.asarray(batch.load.sum(-1)) for batch in planned])
    bound = functools.partial(replication_bound, topology=topology, across_nodes=not row.intra_node)
    bounds = np.concatenate([np.asarray(jax.jit(bound)(batch.load, batch.plan.home)) for batch in planned])
    each = np.asarray(imbalance(by_rank))
    mean = by_rank.mean((2, 3)).sum(0)
    reorders = [
        float(
            reorder_time(
                batch.plan.home, batch.previous_home, topology, cluster=costs.cluster, model=costs.model
            )
        )
        for batch in planned
    ]
    modelled = sum(
        float(batch_time(layer_time(costs.ranks(batch, topology)), reorder=reorder))
        for batch, reorder in zip(planned, reorders, strict=True)
    )
    balanced = sum(float(batch_time(costs.balanced(batch.load, topology))) for batch in planned)
    moved = [
        moved_experts(b.plan.home, b.previous_home, home_slots=topology.home_slots).mean() for b in planned
    ]
    return Outcome(
        planner=name,
        imbalance=float(batch_imbalance(by_rank)),
        imbalance_p95=float(np.percentile(each, 95)),
        imbalance_max=float(each.max()),
        bound=float(np.where(mean > 0, bounds.sum(0) / np.maximum(mean, 1e-9), 1).mean()),
        attention_imbalance=float(batch_imbalance(tokens)),
        cross_node_share=float(
            sum(int(np.asarray(cross_node_load(b.plan, b.load)).sum(dtype=np.int64)) for b in planned)
            / max(1, int(tokens.sum(dtype=np.int64)))
        ),
        replicas=float(np.mean([replica_count(batch.plan).mean() for batch in planned])),
        moved_experts=float(np.mean(moved)),
        modelled_seconds=modelled / len(planned),
        share_of_balanced=balanced / modelled if modelled else 1.0,
        plan_seconds=seconds,
        planned=planned,
    )


def _median_seconds(run: Callable[[], object]) -> float:
    """Of several calls, after one to compile."""
    times = []
    for _ in range(TIMED_RUNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
