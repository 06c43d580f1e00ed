"""The plans of a batch for a `relibra_jax.nnx.Balancer`: from routes or counts to checked plans, without a model.

A `BatchPlanner` has no state. What one batch leaves to the next is passed to it and returned: the way of running layers
that the first batch chooses (`Chosen`), the planner's state and the random key.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, PRNGKeyArray, PyTree

from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.planner import Placement, Planner
from relibra_jax.contract.types import Array, BatchPlan, Price, check_shape
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.balancer_state import saved_way
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.checks import check_batch_routes, check_counts, check_plans_from_counts
from relibra_jax.nnx.derived_cost import stage_prices
from relibra_jax.nnx.stage_plans import check_plans, on_host, plan_on_host, to_host, with_exact_loads
from relibra_jax.nnx.way_prices import (
    OTHER_REPLICAS,
    allowed_way,
    cheapest_way,
    cost_in_way,
    estimate_seconds,
    run_in_way,
)
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.batch import Batch, fill_unfinished
from relibra_jax.planning.plan_batch import Stage
from relibra_jax.routing.exchange_rules import Way
from relibra_jax.routing.node_streams import lay_out_streams
from relibra_jax.routing.sequence_packing import SequenceLayout, lay_out_sequences

LAYOUTS: Final = {"packed": lay_out_sequences, "split": lay_out_streams}
"""The layouts of sequences that hold several samples."""


class Chosen(NamedTuple):
    """How the layers of a run are run and priced."""

    parallel: ExpertParallel
    """The settings with which layers run."""
    cost: CostModel | None
    """The cost model of what runs. None if plans are for balance, or before a model is known to derive one from."""
    way: Way | None
    """The way of running layers. None before the first batch, which chooses it."""


class Carried(NamedTuple):
    """What one batch leaves to the plans of the next."""

    chosen: Chosen
    """How layers run."""
    state: PyTree
    """The planner's state."""
    key: PRNGKeyArray
    """The random key for the next batch."""


class PlannedStages(NamedTuple):
    """A batch with its checked plans, on the host."""

    routes: BatchRoutes | None
    """The routes of the batch. None if it was planned from counts alone."""
    batch: Batch
    """The counts of the samples."""
    top_k: int
    """K, the number of experts of a token."""
    parallel: ExpertParallel
    """The settings with which layers run, in the chosen way."""
    stages: Sequence[Stage]
    """The stages, with the micro-batches of all data-parallel groups."""
    prices: Sequence[Price]
    """The price of each stage."""
    plans: Sequence[BatchPlan]
    """The plan of each stage."""
    layouts: Sequence[SequenceLayout]
    """The sequences of each stage; none if they are padded."""
    after: Carried
    """What the batch leaves to the next one."""
    seconds: float
    """The seconds in which the host computed and checked the plans."""

    @property
    def cost(self) -> CostModel | None:
        """The cost model of what layers run. None if plans are for balance."""
        return self.after.chosen.cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlanner:
    """Plans the batches of a run on the host."""

    planner: Planner
    """The planner."""
    given: ExpertParallel
    """The settings as they were given, which may leave choices."""
    num_layers: int
    """L, the number of MoE layers of the model."""
    sequences: str
    """``padded``, ``packed`` or ``split``, as `relibra_jax.nnx.Balancer` takes it."""
    assign: Assign | None
    """The function that assigns samples; None keeps the initial assignment."""

    def take(self, way: Way, cost: CostModel | None) -> Chosen:
        """Run layers in a given way.

        Args:
            way: the way, one of those that the settings allow.
            cost: the cost model of another way; None if plans are for balance.
        """
        priced = None if cost is None else cost_in_way(cost, way, self.given)
        return Chosen(run_in_way(self.given, way), priced, way)

    def by_rule(self, cost: CostModel) -> Chosen:
        """Run layers in the way that the rules give, without a choice by price."""
        return self.take(self.given.ways(cost.model.top_k)[0], cost)

    def restored(self, way: Way | None, cost: CostModel | None) -> Chosen:
        """Return what a saved run has chosen, as far as it can run here.

        Args:
            way: its way; None if it had made no choice.
            cost: the cost model of this run; None as for `take`.
        """
        if way is not None:
            return self.take(allowed_way(way, self.given), cost)
        return Chosen(self.given, None if cost is None else self.by_rule(cost).cost, None)

    def plan(
        self,
        before: Carried,
        routes: BatchRoutes | None,
        counts: Batch | None,
        stages: Sequence[Stage],
        *,
        updates: Sequence[int] | None,
        start: Placement | None,
    ) -> PlannedStages:
        """Plan the stages of a batch from its routes or its counts, and check the plans.

        The first batch that has a cost model chooses the way of running layers.

        Args:
            before: what the batch before left.
            routes: the routes of the batch; None to plan from counts alone.
            counts: the counts of all samples; None counts the routes.
            stages: the stages, with the micro-batches of all data-parallel groups.
            updates: the number of optimizer updates of each stage, as `relibra_jax.nnx.Balancer.prepare_stages` takes
                it.
            start: the homes and residents at which the search starts; None for those of the planner's state.

        Raises:
            ValueError: if the routes or counts are wrong, or a plan breaks a rule.
        """
        begin, chosen = time.perf_counter(), before.chosen
        given_topology, prices = chosen.parallel.topology, self._prices(chosen, len(stages), updates)
        size = {"num_experts": given_topology.num_experts, "num_layers": self.num_layers}
        if routes is not None:
            check_batch_routes(routes, counts, aligned_left=self.sequences in LAYOUTS, **size)
        if counts is not None:
            top_k = check_counts(counts, None, **size)
            batch = jax.tree.map(np.asarray, counts)
        else:
            assert routes is not None
            top_k = routes.top_k
            with on_host():
                batch = routes.count(self.planner, given_topology, prices)
        if routes is None:
            check_plans_from_counts(chosen.parallel, top_k)
        next_key, key = jax.random.split(before.key)
        search = functools.partial(
            self._search, batch, stages, updates, state=before.state, key=key, start=start
        )
        plans, state = search(chosen)
        searched_striped = prices[0].striped
        if chosen.way is None and chosen.cost is not None:
            chosen, plans, state = self._choose_way(
                chosen, batch, plans, state, search, updates=updates, has_routes=routes is not None
            )
            prices = self._prices(chosen, len(stages), updates)
        parallel = chosen.parallel.with_striping(top_k)
        layouts = self._lay_out(plans, batch, parallel)
        if self.sequences == "split" or parallel.is_striped or searched_striped:
            plans = with_exact_loads(
                plans,
                routes,
                batch,
                layouts if self.sequences == "split" else (),
                parallel.topology,
                striped=parallel.is_striped,
            )
        check_plans(
            plans, parallel.topology, across_nodes=bool(parallel.across_nodes), way=saved_way(chosen.way)
        )
        return PlannedStages(
            routes=routes,
            batch=batch,
            top_k=top_k,
            parallel=parallel,
            stages=stages,
            prices=prices,
            plans=plans,
            layouts=layouts,
            after=Carried(chosen, state, next_key),
            seconds=time.perf_counter() - begin,
        )

    def plan_finished(
        self,
        before: Carried,
        batch: Batch,
        finished: Bool[Array, " B"],
        stages: Sequence[Stage],
        *,
        updates: Sequence[int] | None,
    ) -> Placement:
        """Search homes and residents for a batch of which only some samples have finished.

        The arguments are those of `plan`, and:

        Args:
            batch: the counts of the samples. Those of unfinished ones are not read.
            finished: True for samples that have finished, at least one of them.

        Raises:
            ValueError: if the planner cannot start from given homes, no sample has finished, or the counts have another
                number of layers or experts than the model.
        """
        if not self.planner.takes_homes:
            raise ValueError(
                "plan_ahead: the planner has no `reorder` and `replicate`, so its search cannot start from given homes"
            )
        topology = before.chosen.parallel.topology
        shape = (len(batch.lengths), self.num_layers, topology.num_experts)
        check_shape("sample_load", batch.sample_load.shape, shape)
        if not np.asarray(finished).any():
            raise ValueError(f"plan_ahead: none of {len(batch.lengths)} samples has finished")
        filled = fill_unfinished(*to_host((batch, finished)))
        key = jax.random.split(before.key, 3)[2]
        (plan, *_), _ = self._search(
            filled, stages, updates, before.chosen, state=before.state, key=key, start=None
        )
        with on_host():
            residents = jax.device_get(resident_experts(plan.plan, topology))
        return Placement(plan.plan.home, residents)

    def _prices(self, chosen: Chosen, num_stages: int, updates: Sequence[int] | None) -> tuple[Price, ...]:
        return stage_prices(
            chosen.cost, chosen.parallel, num_stages, updates=updates, sequences=self.sequences
        )

    def _lay_out(
        self, plans: Sequence[BatchPlan], batch: Batch, parallel: ExpertParallel
    ) -> tuple[SequenceLayout, ...]:
        """Lay out the samples of all stages in sequences, if these hold several samples."""
        if self.sequences not in LAYOUTS:
            return ()
        lay_out, lengths = LAYOUTS[self.sequences], np.asarray(batch.lengths)
        return tuple(lay_out(plan.assignment, lengths, align=parallel.aligned_positions) for plan in plans)

    def _search(
        self,
        batch: Batch,
        stages: Sequence[Stage],
        updates: Sequence[int] | None,
        chosen: Chosen,
        *,
        state: PyTree,
        key: PRNGKeyArray,
        start: Placement | None,
    ) -> tuple[tuple[BatchPlan, ...], PyTree]:
        """Search the plan of each stage of a batch; return them and the planner's state after the batch."""
        return plan_on_host(
            batch,
            self.planner,
            state,
            chosen.parallel.topology,
            stages=stages,
            prices=self._prices(chosen, len(stages), updates),
            assign=self.assign,
            key=key,
            start=start,
        )

    def _choose_way(
        self,
        chosen: Chosen,
        batch: Batch,
        plans: tuple[BatchPlan, ...],
        state: PyTree,
        search: functools.partial[tuple[tuple[BatchPlan, ...], PyTree]],
        *,
        updates: Sequence[int] | None,
        has_routes: bool,
    ) -> tuple[Chosen, tuple[BatchPlan, ...], PyTree]:
        """Choose the way of running layers by the price of the first batch; return it with its plans and state.

        If replicas on other nodes may pay, the batch is planned with them too, and if replicas are doubtful, without
        any. Planners that do not take given homes are run as published.

        Args:
            chosen: the settings as they were given, and their cost model.
            batch: the samples of the batch.
            plans: the plan of each stage, for the way that the rules give.
            state: the planner's state after these plans.
            search: returns the plans and the state for another choice.
            updates: the number of optimizer updates of each stage.
            has_routes: whether the routes are known. Without them, the loads of striped layers are unknown.
        """
        cost = chosen.cost
        assert cost is not None

        def prices_of(cost: CostModel) -> tuple[Price, ...]:
            return self._prices(chosen._replace(cost=cost), len(plans), updates)

        ways = [way for way in self.given.ways(cost.model.top_k) if has_routes or not way.striped]
        best = self.take(cheapest_way(plans, batch, self.given, ways, cost, prices_of), cost)
        if not self.planner.takes_homes:
            return best, plans, state
        for change, may_pay, least, line in OTHER_REPLICAS:
            prices = self._prices(best, len(plans), updates)
            assert best.way is not None
            if not (best.way.replicas and may_pay(plans, batch, self.given, prices)):
                continue
            seconds = estimate_seconds(plans, batch, best.parallel.topology, prices)
            other = self.take(change(best.way), cost)
            tried, tried_state = search(other)
            other_prices = self._prices(other, len(plans), updates)
            saved = 1 - estimate_seconds(tried, batch, other.parallel.topology, other_prices) / seconds
            if saved < least:
                continue
            best, plans, state = other, tried, tried_state
            if not jax.process_index():
                print(f"relibra_jax: {line} a batch takes {saved:.1%} less modelled time", file=sys.stderr)
        return best, plans, state
