"""The balancer: one call prepares a batch between its rollout and its training steps.

A batch is everything between two placements. `Balancer.prepare` begins a batch. It assigns the samples to micro-batches
and ranks, places and replicates the experts, checks the plan, sizes the buffers, and moves the experts with their
optimizer state. The caller then runs its own training loop. The pure functions behind it are public:
`relibra_jax.planning.plan_stages.plan_stages`, `relibra_jax.contract.check.check_plan`,
`relibra_jax.routing.sizes.count_capacities`, `relibra_jax.nnx.homes.reorder_experts`.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Int, Integer, PRNGKeyArray

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.planner import Placement, Planner
from relibra_jax.contract.types import Array, BatchPlan, RoutingReplay, Topology, check_shape
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.balancer_state import BalancerState, check_state, from_host, to_host, zero_capacities
from relibra_jax.nnx.batch_checks import check_aligned_left, check_model_homes, check_replay_layers
from relibra_jax.nnx.batch_order import BatchOrder
from relibra_jax.nnx.derived_cost import BALANCE, check_cost, derive_cost, resolve_cost
from relibra_jax.nnx.finite import check_finite
from relibra_jax.nnx.homes import reorder_experts
from relibra_jax.nnx.modelled_times import ModelledTimes, model_stage
from relibra_jax.nnx.prepare_batch import live_stages, replayed_batch
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.nnx.put_on_mesh import put_on_mesh, replicate
from relibra_jax.nnx.stage_plans import Search, make_search, plan_and_check, plan_unfinished
from relibra_jax.nnx.stage_sizes import count_visits, grow_sizes, stage_shape
from relibra_jax.planning.assignment import Assign, assign_samples
from relibra_jax.routing.exchange_rules import AUTO
from relibra_jax.routing.row_packing import pack_rows as lay_out_rows
from relibra_jax.routing.sizes import Capacities


class Balancer:
    """The load balancer of a Flax model: it prepares every batch for the model's `relibra_jax.nnx.MoELayer` layers.

    ``data_axes``, ``path``, ``exchange``, ``fetch``, ``implementation`` and ``check_rows`` are fields of
    `ExpertParallel`, which describes them in full.

    Args:
        planner: the planner, for example `relibra_jax.relibra`.
        topology: the expert-parallel group.
        mesh: the device mesh, from `relibra_jax.execution.expert_mesh` or another mesh with the same axes. Other
            axes (data, FSDP) replicate the group.
        num_layers: L, the number of MoE layers of the model.
        num_micro_batches: M, the number of micro-batches that each copy of the group runs for one gradient, for
            `prepare`.
        key: random key for the planner and the assignment, the same on all processes.
        assign: the function that assigns samples to micro-batches and ranks. Pass the same object for every balancer
            of equal settings, or each of them compiles its search again. None keeps the initial assignment: samples in
            order, or packed by length with ``pack_rows``.
        across_nodes: whether the planner may put a replica on a different node than its expert's home.
        capacities: initial buffer sizes for stages of every shape. Sizes of an earlier run save the first batches from
            compiling steps for smaller buffers.
        pack_rows: whether a row holds several samples, one after another. Padding is then at most 5% of the positions
            where the sample lengths allow it (`relibra_jax.routing.row_packing`). With packed rows, samples must be
            aligned to the left, the initial assignment packs them by length, and the model needs
            `PreparedBatch.packing`.
        data_axes: the other mesh axes over which tokens are split. None takes all of them.
        path: ``flat`` for one exchange over all ranks, ``hierarchical``, or ``auto``.
        exchange: the kind of token exchange.
        fetch: the kind of replica fetch.
        implementation: the implementation of `pallas_kernels.grouped_mlp`.
        check_rows: whether layers count the rows that reach their slots.
        cost: the price for which batches are planned, a `relibra_jax.cost.cost_model.CostModel`. Where it says
            ``auto``, it takes what layers run. None derives one from the first model that is prepared and from the
            kind of its devices (`relibra_jax.nnx.derived_cost.derive_cost`), with attention of the usual size, 4 D^2
            weights and heads of together D, and no output head. Give one if the model differs or trains with
            several updates. ``"balance"`` plans for balance instead of time, for ablations.

    Raises:
        ValueError: if the mesh does not fit the topology, a name is unknown, a number is below 1, or ``cost`` is fixed
            to a path, exchange, layout of rows or number of copies that does not run.

    >>> import optax
    >>> from relibra_jax import relibra
    >>> from relibra_jax.execution import expert_mesh
    >>> from relibra_jax.execution.gating import GATINGS
    >>> from relibra_jax.nnx import MoELayer
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> mesh = expert_mesh(topology, devices=jax.devices()[:1])
    >>> model = MoELayer(topology, 8, 16, GATINGS["gpt-oss"], rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> options = {"num_layers": 1, "num_micro_batches": 2, "key": jax.random.key(0)}
    >>> balancer = Balancer(relibra(), topology, mesh=mesh, **options)
    >>> ids = np.tile(np.arange(4, dtype=np.uint8), (6, 5, 1, 1))  # [B T L K]
    >>> batch = balancer.prepare(model, optimizer, RoutingReplay(ids, np.ones((6, 5), bool)))
    >>> batch.to_ranks(np.zeros((6, 5, 8))).shape, batch.parallel.capacities.rows
    ((2, 3, 5, 8), 80)
    """

    def __init__(
        self,
        planner: Planner,
        topology: Topology,
        *,
        mesh: Mesh,
        num_layers: int,
        num_micro_batches: int,
        key: PRNGKeyArray,
        assign: Assign | None = assign_samples,
        across_nodes: bool = False,
        capacities: Capacities | None = None,
        pack_rows: bool = False,
        data_axes: tuple[str, ...] | None = None,
        path: str = AUTO,
        exchange: str = AUTO,
        fetch: str = AUTO,
        implementation: str | None = None,
        check_rows: bool = False,
        cost: CostModel | Literal["balance"] | None = None,
    ):
        if num_micro_batches < 1 or num_layers < 1:
            raise ValueError(
                f"num_micro_batches={num_micro_batches} and num_layers={num_layers} must be at least 1"
            )
        self.planner, self.topology, self.mesh, self.assign = planner, topology, mesh, assign
        self.num_layers, self.num_micro_batches = num_layers, num_micro_batches
        self._parallel = ExpertParallel(
            mesh=mesh,
            topology=topology,
            data_axes=data_axes,
            path=path,
            exchange=exchange,
            fetch=fetch,
            across_nodes=across_nodes,
            implementation=implementation,
            check_rows=check_rows,
        )
        planner_key, self._key = jax.random.split(key)
        self._planner_state = planner.init(topology, num_layers, key=planner_key)
        self._home = np.asarray(contiguous_homes(topology, num_layers))
        self._first_capacities = capacities or zero_capacities(counts_visits=path != "flat")
        self._capacities: dict[str, Capacities] = {}
        self._pack_rows = pack_rows
        self._row_shapes: dict[str, tuple[int, int]] = {}
        self._order = BatchOrder()
        self._warm_start: Placement | None = None
        self._for_balance, self._cost = cost == BALANCE, None
        if isinstance(cost, CostModel):
            self._cost = self._resolve(cost)
        elif cost not in (None, BALANCE):
            raise ValueError(f"cost={cost!r} must be a CostModel, {BALANCE!r}, or None to derive one")

    @property
    def cost(self) -> CostModel | None:
        """The cost model for which batches are planned, with what layers run in place of every ``auto``.

        None if batches are planned for balance, and before the first batch if the cost model is derived. With
        ``balancer.cost.price(topology)``, `relibra_jax.plan_batch` finds the same plans.
        """
        return self._cost

    @property
    def live(self) -> ExpertParallel:
        """The settings for layers on live routing: experts at home, no residents or replicas, worst-case buffers."""
        topology = dataclasses.replace(self.topology, replica_slots=0, resident_slots=0)
        return dataclasses.replace(self._parallel, topology=topology, capacities=None)

    @property
    def state(self) -> BalancerState:
        """The state that the next batch depends on. Set it to resume from a checkpoint.

        Raises:
            ValueError: on setting, if the state belongs to another planner or a different number of layers or experts.
        """
        planner, key = jax.tree.map(to_host, (self._planner_state, self._key))
        return BalancerState(planner, key, self._home, self._capacities)

    @state.setter
    def state(self, state: BalancerState) -> None:
        check_state(self.state, state, self._first_capacities)
        home = check_homes(state.home, self.topology.num_experts, "balancer state, home")
        live = (self._planner_state, self._key)
        self._planner_state, self._key = jax.tree.map(from_host, (state.planner, state.key), live)
        self._home, self._capacities = home, state.capacities
        self._order.begin(None)
        self._order.discard()
        self._warm_start = None

    def prepare(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None,
        replay: RoutingReplay | None,
        *,
        num_samples: int | None = None,
        capacities: Capacities | None = None,
    ) -> PreparedBatch:
        """Plan a batch, size its buffers, and move the model's experts to the homes of the plan.

        If there are several processes, every process must call it with the same replay. Parameters and optimizer state
        that are not on the mesh yet are put there, according to their sharding metadata. Preparing a replay invalidates
        the batch that was prepared from the previous replay. Preparing live routing does not.

        Args:
            model: a module with L `MoELayer`. Its experts move in place.
            optimizer: the optimizer of the model, whose state moves too. None if the model is not trained.
            replay: the recorded routing of all samples of the batch. None prepares live routing: samples stay in
                order, experts stay where they are, and there are no replicas.
            num_samples: B, the number of samples, for live routing only.
            capacities: buffer sizes, for live routing only. None takes the worst case.

        Returns:
            The prepared batch, an argument of its training steps.

        Raises:
            ValueError: if the cost model has other sizes than the model's layers, the replay has a different number of
                layers or experts than the model, the optimizer has
                made no step since the previous batch was prepared, the model's homes differ from the balancer's, a
                parameter is not finite, the processes computed different plans, or the plan breaks a rule. Nothing has
                moved then.
        """
        (batch,) = self.prepare_stages(
            *(model, optimizer, replay),
            num_micro_batches=(self.num_micro_batches,),
            num_samples=num_samples,
            capacities=capacities,
        )
        return batch

    def prepare_stages(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None,
        replay: RoutingReplay | None,
        *,
        num_micro_batches: Sequence[int],
        samples: Sequence[range | None] | None = None,
        updates: Sequence[int] | None = None,
        num_samples: int | None = None,
        capacities: Capacities | None = None,
    ) -> tuple[PreparedBatch, ...]:
        """Prepare a batch of several stages, such as a recompute of all samples and updates from parts of them.

        One search plans all stages (`relibra_jax.planning.plan_stages.plan_stages`). Experts move once, to homes that
        all stages share, and all stages have the same residents. The caller may run the stages in any order and as
        often as it likes until it prepares the next batch, which requires one optimizer step from any stage: a loop may
        stop early. The weights of residents change with every optimizer step, so every update pushes them.

        Args:
            model: a module with L `MoELayer`, as for `prepare`.
            optimizer: the optimizer of the model, as for `prepare`.
            replay: the recorded routing of all samples of the batch, or None, as for `prepare`.
            num_micro_batches: M of each stage in each copy of the group, in the order in which the stages run.
            samples: a range of consecutive samples for each stage, where None is all samples:
                ``(None, range(0, 16), range(16, 32))`` for a recompute of 32 samples and two updates. By default every
                stage has all samples.
            updates: the number of optimizer updates of each stage, for the price: 0 for a recompute, which has only a
                forward pass. By default 1 for each of several stages, and those of the cost model for a single stage.
            num_samples: B, the number of samples, for live routing only.
            capacities: buffer sizes, for live routing only, as for `prepare`.

        Returns:
            The prepared batch of each stage. `PreparedBatch.to_ranks` of each takes arrays of the whole batch. Stages
            with equal numbers of micro-batches and rows have equal buffer sizes, and therefore share compiled steps.

        Raises:
            ValueError: under the conditions of `prepare`, if the samples of a stage are not consecutive, if a stage has
                fewer samples than micro-batches, or if ``updates`` does not have a number for each stage.
        """
        self._price(model)
        if replay is None:
            live = dataclasses.replace(self.live, capacities=capacities)
            stages = live_stages(
                live, num_samples=num_samples, num_micro_batches=num_micro_batches, samples=samples
            )
            put_on_mesh(model, optimizer, self.mesh)
            return stages
        if not isinstance(replay, RoutingReplay):
            raise ValueError(
                f"replay: expected a RoutingReplay(expert_ids, mask), found {type(replay).__name__}"
            )
        if num_samples is not None or capacities is not None:
            raise ValueError(
                "num_samples and capacities are for live routing: remove them, the replay determines both"
            )
        check_model_homes(model, self._home)
        self._order.check_stepped(optimizer)
        check_finite(model)
        with jax.profiler.TraceAnnotation("plan"):
            start = time.perf_counter()
            replay = RoutingReplay(np.asarray(replay.expert_ids), np.asarray(replay.mask))
            check_replay_layers(replay, num_experts=self.topology.num_experts, num_layers=self.num_layers)
            if self._pack_rows:
                check_aligned_left(np.asarray(replay.mask))
            key, assign_key = jax.random.split(self._key)
            search = self._search(len(replay.mask), num_micro_batches, samples, updates)
            planned = plan_and_check(
                *(replay, self._planner_state, assign_key, search),
                across_nodes=self._parallel.across_nodes,
                warm_start=self._warm_start,
            )
            plans = planned.stages
            plan_seconds = time.perf_counter() - start
        with jax.profiler.TraceAnnotation("size"):
            start = time.perf_counter()
            visits = [count_visits(replay, plan, self._parallel) for plan in plans]
            sizes = grow_sizes(self._capacities, self._first_capacities, plans, visits, self._parallel)
            seconds = (plan_seconds, time.perf_counter() - start)
        with jax.profiler.TraceAnnotation("migrate"):
            model_times: list[Callable[[], ModelledTimes] | None] = [None] * len(plans)
            if self._cost is not None:
                model_times = [
                    functools.partial(
                        model_stage, plan, planned.counts, search, number, previous_home=self._home
                    )
                    for number, plan in enumerate(plans)
                ]
            stages = tuple(
                self._replayed_stage(
                    plan, sizes[stage_shape(plan, self._parallel)], replay, seconds, stage_visits, times
                )
                for plan, stage_visits, times in zip(plans, visits, model_times, strict=True)
            )
            put_on_mesh(model, optimizer, self.mesh)
            home = np.asarray(plans[0].plan.home)
            reorder_experts(model, optimizer, home, mesh=self.mesh, topology=self.topology)
        self._planner_state, self._key = planned.state, key
        self._home, self._capacities, self._warm_start = home, sizes, None
        check_in_force = self._order.begin(optimizer)
        for stage in stages:
            stage.check_in_force = check_in_force
        return stages

    def discard(self) -> None:
        """Discard the last prepared batch and the result of `plan_ahead`.

        The next batch may then be prepared without an optimizer step in between.
        """
        self._order.discard()
        self._warm_start = None

    def plan_ahead(
        self,
        sample_load: Integer[Array, "B L E"],
        tokens: Integer[Array, " B"],
        finished: Bool[Array, " B"],
        *,
        num_micro_batches: Sequence[int] | None = None,
        samples: Sequence[range | None] | None = None,
        updates: Sequence[int] | None = None,
    ) -> None:
        """Search homes for the next batch while its rollout still runs, from the counts of the finished samples.

        The next `prepare` starts its search from the result and runs half as many rounds. A caller that runs this
        method in a thread must wait for the thread before it calls `prepare`, which otherwise starts without the result
        and discards it. Call the method again when more samples have finished; it then searches from the beginning.
        It moves no experts, and checkpoints do not save its result: a restored run plans its next batch without a warm
        start. If there are several processes, every process must call it with the same counts.

        Args:
            sample_load: token copies of each finished sample for each expert, from `relibra_jax.sample_counts` in
                the rollout workers or from `relibra_jax.sample_load`. Entries of unfinished samples are not read.
            tokens: the number of real tokens of each finished sample.
            finished: True for samples that have finished. An unfinished sample counts like the nearest finished one
                (`relibra_jax.planning.unfinished.fill_unfinished`).
            num_micro_batches: M of each stage, for `prepare_stages`. By default that of `prepare`.
            samples: the samples of each stage, as for `prepare_stages`.
            updates: the number of optimizer updates of each stage, as for `prepare_stages`. A cost model that is
                derived is not known before the first batch, so the search is then for balance.

        Raises:
            ValueError: if the planner cannot start from given homes, no sample has finished, or the counts have another
                number of layers or experts than the model.
        """
        if self.planner.replicate is None:
            raise ValueError(
                "plan_ahead: the planner has no `replicate`, so its search cannot start from given homes"
            )
        shape = (len(tokens), self.num_layers, self.topology.num_experts)
        check_shape("sample_load", sample_load.shape, shape)
        if not np.asarray(finished).any():
            raise ValueError(f"plan_ahead: none of {len(tokens)} samples has finished")
        numbers = num_micro_batches or (self.num_micro_batches,)
        search = self._search(len(tokens), numbers, samples, updates)
        key = jax.random.split(self._key, 3)[2]
        batch_number = self._order.number
        with jax.profiler.TraceAnnotation("plan_ahead"):
            placement = plan_unfinished(*(sample_load, tokens, finished), self._planner_state, key, search)
        if self._order.number == batch_number:
            self._warm_start = placement

    def _resolve(self, cost: CostModel) -> CostModel:
        """Return a cost model for what layers run, which depends on whether buffer sizes count crossings."""
        parallel = dataclasses.replace(self._parallel, capacities=self._first_capacities)
        return resolve_cost(cost, parallel, pack_rows=self._pack_rows)

    def _price(self, model: nnx.Module) -> None:
        """Derive the cost model from the first model, or check that it has the model's sizes."""
        if self._for_balance:
            return
        if self._cost is None:
            derived = derive_cost(model, num_layers=self.num_layers, mesh=self.mesh)
            self._cost = self._resolve(derived)
        check_cost(self._cost, model, num_layers=self.num_layers)

    def _search(
        self,
        num_samples: int,
        num_micro_batches: Sequence[int],
        samples: Sequence[range | None] | None,
        updates: Sequence[int] | None,
    ) -> Search:
        """Return the settings of the search for the plans of some stages."""
        return make_search(
            *(self.planner, self.topology, self.assign, self._cost),
            num_samples=num_samples,
            num_micro_batches=num_micro_batches,
            copies=math.prod(self._parallel.copies),
            samples=samples,
            updates=updates,
            pack_rows=self._pack_rows,
        )

    def _replayed_stage(
        self,
        plan: BatchPlan,
        sizes: Capacities,
        replay: RoutingReplay,
        seconds: tuple[float, float],
        visits: Int[np.ndarray, "M L P N"] | None,
        model_times: Callable[[], ModelledTimes] | None,
    ) -> PreparedBatch:
        plan_on_mesh = jax.tree.map(functools.partial(replicate, mesh=self.mesh), plan)
        layout, rows = None, plan.assignment.sample[0].size
        if self._pack_rows:
            shape = stage_shape(plan, self._parallel)
            layout = lay_out_rows(plan.assignment, replay.mask.sum(1), shape=self._row_shapes.get(shape))
            self._row_shapes[shape] = layout.shape
            rows = self.topology.num_ranks * layout.shape[0]
        rows *= math.prod(self._parallel.copies)
        parallel = dataclasses.replace(self._parallel, capacities=sizes, rows=rows)
        return replayed_batch(
            *(plan_on_mesh, parallel, replay),
            assignment=plan.assignment,
            rows=layout,
            seconds=seconds,
            visits=visits,
            model_times=model_times,
        )
