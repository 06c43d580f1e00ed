"""The outcome of one planner on a setting: its plans, and the numbers that describe them."""

import dataclasses
import functools
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.plan import rank_load, replica_count, resident_experts
from relibra_jax.contract.types import EMPTY, Price
from relibra_jax.cost.batch_time import BatchTime
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.memory import rank_memory
from relibra_jax.evaluation.columns import Column, column
from relibra_jax.evaluation.planned import PlannedBatch
from relibra_jax.evaluation.prices import (
    Crossings,
    Waits,
    count_crossings,
    count_visits,
    count_waits,
    time_of_balanced,
    time_of_batch,
)
from relibra_jax.evaluation.setting import Setting
from relibra_jax.planning.metrics import (
    batch_imbalance,
    cross_node_load,
    imbalance,
    moved_experts,
    replication_bound,
)
from relibra_jax.planning.planners import PlannerEntry
from relibra_jax.support.argument_types import checks_arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The plans of one planner, and the numbers that describe them, each computed when it is first read."""

    planner: str
    """The name of the planner in the comparison."""
    entry: PlannerEntry
    """The planner, and how samples are assigned for it."""
    setting: Setting
    """The batches, ranks and costs."""
    batches: list[PlannedBatch] = dataclasses.field(repr=False)
    """The measured batches with their plans."""
    timings: list[float] = dataclasses.field(default_factory=list)
    """The measured seconds of planning the last batch after compilation, for each timed run."""

    @column("imbalance", lambda outcome: f"{outcome.imbalance:.4f}", balanced=lambda _: "1.0000")
    def imbalance(self) -> float:
        """Max / mean of rank load over the batch; 1 is perfect. It is the sum of maxima over the sum of means, averaged
        over layers."""
        return float(batch_imbalance(self.rank_load))

    @column()
    def imbalance_p95(self) -> float:
        """The 95th percentile of the imbalance over layers and micro-batches."""
        return float(np.percentile(np.asarray(imbalance(self.rank_load)), 95))

    @column()
    def imbalance_max(self) -> float:
        """The largest imbalance of any layer and micro-batch."""
        return float(np.asarray(imbalance(self.rank_load)).max())

    @column()
    def bound(self) -> float:
        """The imbalance if every layer and micro-batch reached its replication bound, given the homes."""
        bounds = [
            replication_bound(
                batch.batch_plan.load,
                batch.batch_plan.plan.home,
                topology=self.setting.topology,
                across_nodes=self._across_nodes,
            )
            for batch in self.batches
        ]
        mean = self.rank_load.mean((2, 3)).sum(0)
        return float(np.where(mean > 0, np.concatenate(bounds).sum(0) / np.maximum(mean, 1e-9), 1).mean())

    @column("attn", lambda outcome: f"{outcome.attention_imbalance:.2f}", balanced=lambda _: "1.00")
    def attention_imbalance(self) -> float:
        """Imbalance of tokens over ranks, which attention feels."""
        return float(batch_imbalance(np.concatenate([batch.rank_tokens for batch in self.batches])[:, None]))

    @column("error", lambda outcome: f"{outcome.forecast_error:.0%}")
    def forecast_error(self) -> float:
        """Mean error of an expert's expected load, relative to the mean load, as in MoE-GPS (arXiv 2506.07366); 0 for
        planners that see the true loads."""
        return float(np.mean([batch.forecast_error for batch in self.batches]))

    @column()
    def cross_node_share(self) -> float:
        """The share of token copies that leave their node at dispatch."""
        crossing = [np.asarray(cross_node_load(batch.batch_plan.layer_plans())) for batch in self.batches]
        copies = [np.asarray(batch.batch_plan.load) for batch in self.batches]
        sent, total = (sum(int(each.sum(dtype=np.int64)) for each in part) for part in (crossing, copies))
        return sent / max(1, total)

    @column("crossings", lambda outcome: f"{outcome.crossings:.2f}/{outcome.crossings_busiest:.2f}")
    def crossings(self) -> float:
        """What the slow network carries per token at dispatch (tokens, or token copies with flat dispatch), for the
        mean and the busiest rank; on a single node, what ranks send to each other."""
        return float(np.mean([each.mean for each in self._crossings]))

    @column()
    def crossings_busiest(self) -> float:
        """The crossings per token of the busiest rank, sent or received; of the busiest node if ranks share a link."""
        return float(np.mean([each.busiest for each in self._crossings]))

    @column()
    def waited_between(self) -> float:
        """Rows between nodes for which dispatch waits as exchanges run, over those that the busiest rank needs; 1 if
        lanes are level and nothing is padded."""
        return float(np.mean([each.between for each in self._waits]))

    @column()
    def waited_inside(self) -> float:
        """The same for rows inside nodes."""
        return float(np.mean([each.inside for each in self._waits]))

    @column("repl", lambda outcome: f"{outcome.replicas:.1f}")
    def replicas(self) -> float:
        """Replicas of a layer in one micro-batch, on average."""
        topology = self.setting.topology
        return float(np.mean([replica_count(each.batch_plan.plan, topology).mean() for each in self.batches]))

    @column("resid", lambda outcome: f"{outcome.residents:.1f}", with_residents=True)
    def residents(self) -> float:
        """Residents of a layer, on average."""
        held = [resident_experts(batch.batch_plan.plan, self.setting.topology) for batch in self.batches]
        return float(np.mean([(np.asarray(each) != EMPTY).sum((1, 2, 3)).mean() for each in held]))

    @column("GB", lambda outcome: f"{outcome.rank_memory / 1e9:.1f}")
    def rank_memory(self) -> float:
        """Modelled memory of a rank, in bytes in the JSON file. Resident slots count only if the planner fills any."""
        topology = self.setting.topology
        if not self.residents:
            topology = dataclasses.replace(topology, resident_slots=0)
        return rank_memory(topology, self.cost_model.model, shards=self.cost_model.shards).total

    @column()
    def moved_experts(self) -> float:
        """The mean number of experts of a layer that change rank before a batch."""
        slots = self.setting.topology.home_slots
        moved = [
            moved_experts(batch.batch_plan.plan.home, batch.previous_home, home_slots=slots).mean()
            for batch in self.batches
        ]
        return float(np.mean(moved))

    @column("plan", lambda outcome: f"{outcome.plan_seconds * 1e3:.0f}ms")
    def plan_seconds(self) -> float:
        """Measured time to plan one batch, after compilation: the median of several runs; NaN if it was not timed."""
        return float(np.median(self.timings)) if self.timings else float("nan")

    @column()
    def modelled_parts(self) -> dict[str, float]:
        """The parts of the modelled time, by their names in `relibra_jax.cost.batch_time.BatchTime`."""
        parts = [each.parts() for each in self._times]
        return {name: float(np.mean([float(each[name]) for each in parts])) for name in parts[0]}

    @column("exchange", lambda outcome: f"{outcome.exchange_seconds:.2f}s")
    def exchange_seconds(self) -> float:
        """Part of time: dispatch and combine."""
        return self.modelled_parts["exchange"]

    @column("push", lambda outcome: f"{outcome.push_seconds:.2f}s", with_residents=True)
    def push_seconds(self) -> float:
        """Part of time: residents' weights and gradients."""
        return self.modelled_parts["push"]

    @column("reorder", lambda outcome: f"{outcome.reorder_seconds:.2f}s")
    def reorder_seconds(self) -> float:
        """Part of time: experts moved to new homes."""
        return self.modelled_parts["reorder"]

    @column(
        "time",
        lambda outcome: f"{outcome.modelled_seconds:.2f}s",
        balanced=lambda outcome: f"{outcome.balanced_seconds:.2f}s",
    )
    def modelled_seconds(self) -> float:
        """Modelled time of a batch."""
        return sum(self.modelled_parts.values())

    @column("share", lambda outcome: f"{outcome.share_of_balanced:.1%}", balanced=lambda _: "100%")
    def share_of_balanced(self) -> float:
        """Modelled time of a perfectly balanced batch with uniform routing, divided by this row's time; above 100% if
        fewer tokens cross. Planning is taken to be hidden."""
        return self.balanced_seconds / self.modelled_seconds

    @column("overlap", lambda outcome: f"{outcome.share_overlapped:.1%}", balanced=lambda _: "100%")
    def share_overlapped(self) -> float:
        """Share if every exchange overlapped the compute of its layer, in both runs; nothing runs so."""
        balanced, own = (_mean_seconds(times, "overlapped") for times in (self._balanced, self._times))
        return balanced / own

    @column()
    def share_of_local(self) -> float:
        """Share of a balanced batch with the locality of the same samples: as many crossings as they have under the
        same assignment at contiguous homes, evenly spread."""
        topology, cost = self.setting.topology, self._cost
        local = [time_of_balanced(batch, topology, cost, local=True) for batch in self.batches]
        return _mean_seconds(local) / self.modelled_seconds

    @column()
    def share_as_needed(self) -> float:
        """Share if exchanges sent only the rows that are needed, without padding."""
        runs = self.cost_model.on(self.setting.topology)  # with the path of the exchange that runs
        needed = dataclasses.replace(runs, exchange="needed")
        return self.balanced_seconds / _mean_seconds(self._times_at(needed))

    @column()
    def share_planning_exposed(self) -> float:
        """Share if nothing hid planning on this machine: ``plan_seconds`` count as part of the time."""
        return self.balanced_seconds / (self.modelled_seconds + self.plan_seconds)

    @column()
    def least_seconds(self) -> float:
        """A lower bound of the modelled time over all homes, residents, replicas and assignments of samples
        (`relibra_jax.cost.least_time`). Replicas may be on any node if the planner may place them there."""
        return self.setting.least_seconds(across_nodes=self._across_nodes)

    @column("left", lambda outcome: f"{outcome.left:.0%}")
    def left(self) -> float:
        """How far time is above a lower bound for any plan, which is the most that a better plan could gain. The bound
        is a relaxation, and loose for what nodes and ranks send to each other."""
        return self.modelled_seconds / self.least_seconds - 1 if self.least_seconds else 0.0

    def numbers(self) -> dict[str, Any]:
        """Return the planner's name and all columns, by their names in the JSON file."""
        return {"planner": self.planner, **{each.name: getattr(self, each.name) for each in COLUMNS}}

    @functools.cached_property
    def rank_load(self) -> Int[np.ndarray, "M L N G"]:
        """The token copies that each rank computes, with the measured batches concatenated along M."""
        return np.concatenate([np.asarray(rank_load(batch.batch_plan.plan)) for batch in self.batches])

    @functools.cached_property
    def balanced_seconds(self) -> float:
        """The modelled time of a perfectly balanced batch with uniform routing."""
        return _mean_seconds(self._balanced)

    @property
    def cost_model(self) -> CostModel:
        """The cost model."""
        return self.setting.cost_model

    @functools.cached_property
    def visits(self) -> list[Int[jax.Array, "M L P V"] | None]:
        """The node visits of each batch's tokens; None on the flat path."""
        return [count_visits(batch, self.setting.topology, self._cost) for batch in self.batches]

    @functools.cached_property
    def _cost(self) -> Price:
        return self.cost_model.price(self.setting.topology)

    @property
    def _across_nodes(self) -> bool:
        return bool(self.entry.across_nodes or self._cost.across_nodes)

    @functools.cached_property
    def _crossings(self) -> list[Crossings]:
        topology, shared_link = self.setting.topology, self._cost.shared_link
        return [
            count_crossings(batch, topology, shared_link=shared_link, visits=visits)
            for batch, visits in zip(self.batches, self.visits, strict=True)
        ]

    @functools.cached_property
    def _waits(self) -> list[Waits]:
        return [
            count_waits(batch, self.setting.topology, self._cost, visits=visits)
            for batch, visits in zip(self.batches, self.visits, strict=True)
        ]

    @functools.cached_property
    def _times(self) -> list[BatchTime]:
        return self._times_at(self.cost_model)

    @functools.cached_property
    def _balanced(self) -> list[BatchTime]:
        return [time_of_balanced(batch, self.setting.topology, self._cost) for batch in self.batches]

    def _times_at(self, cost_model: CostModel) -> list[BatchTime]:
        topology, cost = self.setting.topology, cost_model.price(self.setting.topology)
        return [
            time_of_batch(batch, topology, cost, visits=visits)
            for batch, visits in zip(self.batches, self.visits, strict=True)
        ]


COLUMNS: Final = tuple(each for each in vars(Outcome).values() if isinstance(each, Column))
"""All numbers of an outcome, in the order of the table."""


@checks_arguments
def table_columns(outcome: Outcome) -> list[Column[Any]]:
    """Return the columns of the table: those with a heading, and those of residents only with resident slots."""
    residents = outcome.setting.topology.resident_slots > 0
    return [each for each in COLUMNS if each.heading and (residents or not each.with_residents)]


def _mean_seconds(times: list[BatchTime], name: str = "total") -> float:
    """Return the mean over batches of the total time, or of the time under another name."""
    return float(np.mean([float(getattr(time, name)) for time in times]))
