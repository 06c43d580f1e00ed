"""The balancer: one call prepares a batch between its rollout and its training steps.

A batch is everything between two placements. `Balancer.prepare` begins a batch. It assigns the samples to micro-batches
and ranks, places and replicates the experts, checks the plan, sizes the buffers, and moves the experts with their
optimizer state. The caller then runs its own training loop. The pure functions behind it are public:
`relibra_jax.plan_batch`, `relibra_jax.check_plan`, `relibra_jax.execution.count_capacities`,
`relibra_jax.nnx.reorder_experts`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from relibra_jax.contract.check import check_homes
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.planner import Placement, Planner
from relibra_jax.contract.types import Array, RoutingReplay
from relibra_jax.cost.cost_model import SEQUENCES, CostModel
from relibra_jax.execution.memory import MEMORY_KINDS
from relibra_jax.execution.parallel import ExpertParallel, check_exchanges
from relibra_jax.nnx.balancer_state import (
    BalancerState,
    BufferSizes,
    check_state,
    count_sizes,
    first_sizes,
    restored_leaf,
    restored_way,
    saved_leaf,
    saved_way,
    stage_shape,
    with_sizes_of_path,
)
from relibra_jax.nnx.batch_planner import BatchPlanner, Carried, Chosen, PlannedStages
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.batch_sequences import batch_sequences
from relibra_jax.nnx.checks import (
    check_experts_in_place,
    check_finite,
    check_model_homes,
    expert_marks,
)
from relibra_jax.nnx.derived_cost import (
    check_cost,
    derive_cost,
    resolve_cost,
    with_choices_of,
    with_dtype_of,
)
from relibra_jax.nnx.homes import reorder_experts
from relibra_jax.nnx.live_stages import live_stages
from relibra_jax.nnx.modelled_times import model_stage
from relibra_jax.nnx.prepared import HostBatch, PreparedBatch, prepare_replayed
from relibra_jax.nnx.put_on_mesh import put_on_mesh, replicate
from relibra_jax.planning.assignment import Assign, assign_samples
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_batch import Stage
from relibra_jax.routing.sizes import Capacities
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.interrupts import signals_deferred
from relibra_jax.support.programs import announce_compilation


class Balancer:
    """The load balancer of a Flax model: it prepares every batch for the model's `relibra_jax.nnx.MoELayer` layers.

    Args:
        planner: the planner, for example `relibra_jax.relibra`.
        parallel: the mesh, the topology and the exchanges with which the layers execute plans. Its ``capacities`` are
            the initial buffer sizes for stages of every shape: sizes of an earlier run save the first batches from
            compiling steps for smaller buffers.
        num_layers: L, the number of MoE layers of the model.
        num_micro_batches: M, the number of micro-batches that each data-parallel group runs for one gradient, for
            `prepare`.
        key: random key for the planner and the assignment, the same on all processes.
        cost: the price for which batches are planned, a `relibra_jax.cost.cost_model.CostModel`. Where it says
            ``auto``, it takes what layers run. None derives one from the first model that is prepared and from the
            kind of its devices (`relibra_jax.nnx.derived_cost.derive_cost`), with attention of the usual size (4 D^2
            weights, heads of total width D) and no output head. Give one if the model differs or trains with
            several updates. ``"balance"`` plans for balance instead of time, for ablations.
        assign: the function that assigns samples to micro-batches and ranks. Pass the same object for every balancer
            of equal settings, or each of them compiles its search again. None keeps the initial assignment: samples in
            order, or packed by length in packed sequences.
        sequences: ``padded`` gives every sample a sequence of its own. ``packed`` puts several samples in a sequence,
            one after another. A rank then has one sequence, as long as that of the fullest rank, rounded up
            (`relibra_jax.routing.sequence_packing`). ``split`` puts the samples of a node in one sequence, which its
            local ranks share evenly, so that no rank waits for another's long sample
            (`relibra_jax.routing.node_streams`). With packed and split sequences, samples must be aligned to the left,
            and the model needs `PreparedBatch.packing`. With split ones, its attention must also reach all tokens of a
            node, as that of `relibra_jax.models.LanguageModel` does.
        memory_kind: the memory of a batch's sequences and tables. With ``pinned_host`` they stay on the host, and
            `relibra_jax.nnx.accumulate_gradients` copies one micro-batch at a time to the devices. Other programs do
            so with `relibra_jax.execution.memory.take`. For a large batch this saves gigabytes of device memory.

    Raises:
        ValueError: if a number is below 1, a name is unknown, or ``cost`` is fixed to a path, exchange, layout of
            sequences or number of groups that does not run.

    >>> import optax
    >>> from relibra_jax import Topology, relibra
    >>> from relibra_jax.nnx import GATINGS, MoELayer, expert_mesh
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> parallel = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:1]), topology=topology)
    >>> model = MoELayer(topology, 8, 16, GATINGS["gpt-oss"], rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> balancer = Balancer(relibra(), parallel, num_layers=1, num_micro_batches=2, key=jax.random.key(0))
    >>> ids = np.tile(np.arange(4, dtype=np.uint8), (6, 5, 1, 1))  # [B T L K]
    >>> batch = balancer.prepare(model, optimizer, RoutingReplay(ids, np.ones((6, 5), bool)))
    >>> batch.to_ranks(np.zeros((6, 5, 8))).shape, batch.parallel.capacities.rows
    ((2, 3, 5, 8), 80)
    """

    @checks_arguments
    def __init__(
        self,
        planner: Planner,
        parallel: ExpertParallel,
        *,
        num_layers: int,
        num_micro_batches: int,
        key: PRNGKeyArray,
        cost: CostModel | Literal["balance"] | None = None,
        assign: Assign | None = assign_samples,
        sequences: str = "padded",
        memory_kind: str = "device",
    ):
        if num_micro_batches < 1 or num_layers < 1:
            raise ValueError(
                f"num_micro_batches={num_micro_batches} and num_layers={num_layers} must be at least 1"
            )
        if sequences not in SEQUENCES:
            raise ValueError(f"sequences={sequences!r} must be one of {', '.join(SEQUENCES)}")
        if memory_kind not in MEMORY_KINDS:
            raise ValueError(f"memory_kind={memory_kind!r} must be one of {', '.join(MEMORY_KINDS)}")
        if isinstance(cost, str) and cost != "balance":
            raise ValueError(f"cost={cost!r} must be a CostModel, 'balance', or None to derive one")
        if isinstance(cost, CostModel):
            parallel = with_choices_of(cost, parallel)
        parallel = dataclasses.replace(parallel, split_sequences=sequences == "split")
        self.planner, self.assign, self.sequences = planner, assign, sequences
        self.num_layers, self.num_micro_batches = num_layers, num_micro_batches
        self.memory_kind = memory_kind
        announce_compilation()
        planner_key, key = jax.random.split(key)
        self._batch_planner = BatchPlanner(
            planner=planner, given=parallel, num_layers=num_layers, sequences=sequences, assign=assign
        )
        self._for_balance = cost == "balance"
        priced = resolve_cost(cost, parallel, sequences=sequences) if isinstance(cost, CostModel) else None
        state = planner.init(parallel.topology, num_layers, key=planner_key)
        self._carried = Carried(Chosen(parallel, priced, None), state, key)
        self._home = np.asarray(contiguous_homes(parallel.topology, num_layers))
        self._capacities: dict[str, Capacities] = {}
        self._batch_number = 0
        self._steps_before: int | None = None
        self.trains = False
        """Whether an optimizer's state is at the homes of the last batch. Then every batch needs the optimizer."""
        self._marks: np.ndarray | None = None  # of the experts when they last moved; None if none did
        self._warm_start: Placement | None = None

    @property
    def parallel(self) -> ExpertParallel:
        """The settings with which layers run. The first batch chooses what they leave open."""
        return self._carried.chosen.parallel

    @property
    def cost(self) -> CostModel | None:
        """The cost model for which batches are planned, with what layers run in place of every ``auto``.

        None if batches are planned for balance, and before the first batch if the cost model is derived. With
        ``balancer.cost.price(topology)``, `relibra_jax.plan_batch` finds the same plans, but for the first batch, which
        is searched before the way of running layers is chosen.
        """
        return self._carried.chosen.cost

    @property
    def live(self) -> ExpertParallel:
        """The settings for layers on live routing: experts at home, no residents or replicas, worst-case buffers.

        Layers run in chunks of ``chunk_tokens`` tokens of a rank, for which these buffers are.
        """
        return self.parallel.live

    @property
    def state(self) -> BalancerState:
        """The state that the next batch depends on. Set it to resume from a checkpoint.

        Of its choices, those that cannot run here are replaced: another exchange by the first that can.

        Raises:
            ValueError: on setting, if the state belongs to another planner or a different number of layers or experts.
        """
        planner, key = jax.tree.map(saved_leaf, (self._carried.state, self._carried.key))
        way = saved_way(self._carried.chosen.way)
        return BalancerState(planner, key, self._home, self._capacities, way)

    @state.setter
    def state(self, state: BalancerState) -> None:
        first = first_sizes(self.parallel)
        state = with_sizes_of_path(state, first)
        check_state(self.state, state, first)
        home = check_homes(state.home, self.parallel.topology.num_experts, "balancer state, home")
        live = (self._carried.state, self._carried.key)
        planner, key = jax.tree.map(restored_leaf, (state.planner, state.key), live)
        chosen = self._batch_planner.restored(restored_way(state.way), self.cost)
        self._carried = Carried(chosen, planner, key)
        self._home, self._capacities = home, state.capacities
        self._batch_number += 1
        self._marks = None
        self.discard()

    @checks_arguments
    def prepare(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None,
        replay: RoutingReplay | None,
        *,
        own: Int[Array, " b"] | None = None,
        counts: Batch | None = None,
        mask: Bool[Array, "B T"] | None = None,
        capacities: Capacities | None = None,
        copies: Sequence[nnx.Module] = (),
    ) -> PreparedBatch:
        """Plan a batch, size its buffers, and move the model's experts to the homes of the plan.

        If there are several processes, every process must call it, with the same replay or, with ``own``, with a part
        of it. Parameters and optimizer state that are not on the mesh yet are put there, according to their sharding
        metadata. Preparing a replay invalidates the batch that was prepared from the previous replay. Preparing live
        routing does not.

        Args:
            model: a module with L `MoELayer`. Its experts move in place.
            optimizer: the optimizer of the model, whose state moves too. None if the model is not trained.
            replay: the recorded routing of all samples of the batch, in memory or memory-mapped. None without
                ``counts`` prepares live routing: experts stay where they are, there are no replicas, and samples stay
                in order or, in packed sequences, are packed by length.
            own: the numbers in the batch of the samples that ``replay`` has, if it has only those of this process. Then
                no process needs the routes of the whole batch: each counts its own, and the routes go straight to the
                ranks that train on them. Every sample must be with one process. None if ``replay`` has all samples.
            counts: the counts of all samples, from `relibra_jax.sample_counts` in the rollout workers
                (`relibra_jax.join_batches`), from which the batch is planned without counting the replay. With a
                replay, its routes are read for buffer sizes and tables alone, and the devices check them. Without one,
                the plan and the buffer sizes come from counts alone, and visits are bounds; steps then prepare the
                layers of each micro-batch themselves. None counts the replay.
            mask: True on the tokens of each sample, for live routing only.
            capacities: buffer sizes, for live routing only. None takes the worst case, for
                ``ExpertParallel.chunk_tokens`` tokens of a rank at a time.
            copies: modules whose experts are at the same homes and move with the model's, such as a moving average of
                its weights.

        Returns:
            The prepared batch, an argument of its training steps.

        Raises:
            ValueError: if the cost model has other sizes than the model's layers, the replay has a different number of
                layers or experts than the model, the optimizer has made no step since the previous batch was prepared
                or is None after it was given for an earlier batch, the homes of the model or a copy differ from the
                balancer's, experts are not at their homes, a parameter is not finite, the processes computed different
                plans, or the plan breaks a rule. Nothing has moved then. If a process finds its own part of a replay
                wrong, all raise.
            ValueError: also if the counts do not belong to their lengths, sampled routes or replay, or if layers that
                are striped or run in pieces, or split sequences, are to be planned from counts alone.
            relibra_jax.execution.migration.MoveError: if experts cannot be moved, for example because memory runs out
                (`relibra_jax.nnx.reorder_experts`).
        """
        (batch,) = self.prepare_stages(
            model,
            optimizer,
            replay,
            [Stage(self.num_micro_batches)],
            own=own,
            counts=counts,
            mask=mask,
            capacities=capacities,
            copies=copies,
        )
        return batch

    @checks_arguments
    def prepare_stages(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None,
        replay: RoutingReplay | None,
        stages: Sequence[Stage],
        *,
        updates: Sequence[int] | None = None,
        own: Int[Array, " b"] | None = None,
        counts: Batch | None = None,
        mask: Bool[Array, "B T"] | None = None,
        capacities: Capacities | None = None,
        copies: Sequence[nnx.Module] = (),
    ) -> tuple[PreparedBatch, ...]:
        """Prepare a batch of several stages, such as a recompute of all samples and updates from parts of them.

        One search plans all stages (`relibra_jax.plan_batch`). Experts move once, to homes that all stages share, and
        all stages have the same residents. The caller may run the stages in any order and as often as it likes until it
        prepares the next batch, which requires one optimizer step from any stage: a loop may stop early. The weights of
        residents change with every optimizer step, so every update pushes them.

        Args:
            model: a module with L `MoELayer`, as for `prepare`.
            optimizer: the optimizer of the model, as for `prepare`.
            replay: the recorded routing of all samples of the batch, or None, as for `prepare`.
            stages: the stages in the order in which they run, with the micro-batches of one data-parallel group:
                ``[Stage(4), Stage(8, range(0, 16)), Stage(8, range(16, 32))]`` for a recompute of 32 samples and two
                updates.
            updates: the number of optimizer updates of each stage, for the price: 0 for a recompute, which has only a
                forward pass. By default 1 for each of several stages, and those of the cost model for a single stage.
            own: the numbers of the samples of ``replay``, as for `prepare`.
            counts: the counts of all samples, as for `prepare`.
            mask: True on the tokens of each sample, for live routing only, as for `prepare`.
            capacities: buffer sizes, for live routing only, as for `prepare`.
            copies: modules that move with the model, as for `prepare`.

        Returns:
            The prepared batch of each stage. `PreparedBatch.to_ranks` of each takes arrays of the whole batch. Stages
            with equal numbers of micro-batches and of places for samples have equal buffer sizes, and therefore share
            compiled steps.

        Raises:
            ValueError: under the conditions of `prepare`, if the samples of a stage are not consecutive, if a stage has
                fewer samples than micro-batches, or if ``updates`` does not have a number for each stage.
        """
        if own is not None and replay is None:
            raise ValueError("own names the samples of a replay, and there is none")
        is_live = replay is None and counts is None
        check_exchanges(self.live if is_live else self.parallel)
        self._set_cost(model)
        stages = self._over_groups(stages)
        if is_live:
            live = self._live_stages(stages, mask, capacities)
            put_on_mesh(model, optimizer, self.parallel.mesh)
            return live
        if mask is not None or capacities is not None:
            raise ValueError(
                "mask and capacities are for live routing: remove them, the replay or its counts determine both"
            )
        routes = None
        if replay is not None:
            numbers = None if own is None else np.asarray(own)
            routes = BatchRoutes(RoutingReplay(*map(np.asarray, replay)), numbers)
        return self._prepare_replay(model, optimizer, routes, counts, stages, updates, copies)

    @checks_arguments
    def plan_stages(
        self, replay: RoutingReplay, stages: Sequence[Stage], *, updates: Sequence[int] | None = None
    ) -> PlannedStages:
        """Plan the stages of a batch as `prepare_stages` does, and do nothing else: it needs no model and no devices.

        A first batch is planned for the way of running layers that the rules give, because a choice takes further
        searches. The balancer stays as it is.

        Args:
            replay: the recorded routing of all samples of the batch.
            stages: the stages in the order in which they run, as for `prepare_stages`.
            updates: the number of optimizer updates of each stage, as for `prepare_stages`.

        Returns:
            The plans, with the prices and settings for which they are.

        Raises:
            ValueError: if the replay has other layers or experts, or the plan breaks a rule.
        """
        chosen = self._carried.chosen
        if chosen.way is None and chosen.cost is not None:
            chosen = self._batch_planner.by_rule(chosen.cost)
        routes = BatchRoutes(RoutingReplay(*map(np.asarray, replay)))
        before, stages = self._carried._replace(chosen=chosen), self._over_groups(stages)
        return self._batch_planner.plan(before, routes, None, stages, updates=updates, start=self._warm_start)

    def discard(self) -> None:
        """Discard the last prepared batch and the result of `plan_ahead`.

        The next batch may then be prepared without an optimizer step in between.
        """
        self._steps_before = None
        self._warm_start = None

    @checks_arguments
    def plan_ahead(
        self,
        batch: Batch,
        finished: Bool[Array, " B"],
        *,
        stages: Sequence[Stage] | None = None,
        updates: Sequence[int] | None = None,
    ) -> None:
        """Search homes for the next batch while its rollout still runs, from the counts of the finished samples.

        The next `prepare` starts its search from the result and runs half as many rounds. A caller that runs this
        method in a thread must wait for the thread before it calls `prepare`, which otherwise starts without the result
        and discards it. Call the method again when more samples have finished; it then searches from the beginning.
        It moves no experts, and checkpoints do not save its result: a restored run plans its next batch without a warm
        start. If there are several processes, every process must call it with the same counts.

        Args:
            batch: the counts of the finished samples, from `relibra_jax.sample_counts` in the rollout workers or from
                `relibra_jax.sample_load`. Entries of unfinished samples are not read.
            finished: True for samples that have finished. An unfinished sample counts like the nearest finished one
                (`relibra_jax.fill_unfinished`).
            stages: the stages, as for `prepare_stages`. None takes the one stage of `prepare`.
            updates: the number of optimizer updates of each stage, as for `prepare_stages`. A cost model that is
                derived is not known before the first batch, so the search is then for balance.

        Raises:
            ValueError: if the planner cannot start from given homes, no sample has finished, or the counts have another
                number of layers or experts than the model.
        """
        batch_number = self._batch_number
        with jax.profiler.TraceAnnotation("plan_ahead"):
            start = self._batch_planner.plan_finished(
                self._carried,
                batch,
                finished,
                self._over_groups(stages or [Stage(self.num_micro_batches)]),
                updates=updates,
            )
        if self._batch_number == batch_number:
            self._warm_start = start

    def _set_cost(self, model: nnx.Module) -> None:
        """Derive the cost model from the first model, or check that it has the model's sizes."""
        if self._for_balance:
            return
        cost = self.cost
        if cost is None:
            derived = derive_cost(model, num_layers=self.num_layers, mesh=self.parallel.mesh)
            cost = resolve_cost(derived, self.parallel, sequences=self.sequences)
        check_cost(cost, model, num_layers=self.num_layers)
        chosen = self._carried.chosen._replace(cost=with_dtype_of(cost, model))
        self._carried = self._carried._replace(chosen=chosen)

    def _check(self, model: nnx.Module, optimizer: nnx.Optimizer | None) -> Float[np.ndarray, "L E m"]:
        """Raise ValueError unless a batch may be prepared now; return the marks of the experts."""
        check_model_homes(model, self._home)
        if optimizer is None and self.trains:
            raise ValueError(
                "the state of an optimizer must move with the experts of this balancer: pass it, and call"
                " Balancer.discard() before the next batch if it makes no step in this one"
            )
        steps = 0 if optimizer is None else int(optimizer.step[...])
        if steps and self._marks is not None and not self.trains:
            raise ValueError(
                f"the optimizer has made {steps} steps, but an earlier batch moved the experts without its state:"
                " prepare every batch with the optimizer, or restore model, optimizer and balancer together"
            )
        if optimizer is not None and self._steps_before == steps:
            raise ValueError(
                f"the optimizer has made no step since the previous batch was prepared (it is still at step"
                f" {self._steps_before}): prepare all samples of an update in one batch, or call Balancer.discard()"
                " to discard the previous batch"
            )
        check_finite(model)
        marks = expert_marks(model)
        if self._marks is not None:
            check_experts_in_place(self._marks, marks)
        return marks

    def _check_current(self, number: int) -> None:
        """Raise ValueError unless batch ``number`` is the current one."""
        if number != self._batch_number:
            raise ValueError(
                f"this is batch {number} of its balancer, which has already moved the experts for batch"
                f" {self._batch_number}: run all steps of a batch before you prepare the next one"
            )

    def _over_groups(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return the stages with the micro-batches of all data-parallel groups."""
        groups = self.parallel.num_groups
        return tuple(
            dataclasses.replace(stage, num_micro_batches=groups * stage.num_micro_batches) for stage in stages
        )

    def _prepare_replay(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None,
        routes: BatchRoutes | None,
        counts: Batch | None,
        stages: Sequence[Stage],
        updates: Sequence[int] | None,
        copies: Sequence[nnx.Module],
    ) -> tuple[PreparedBatch, ...]:
        """Plan the stages of a batch, and move the experts. Signals wait while anything changes."""
        marks = self._check(model, optimizer)
        with jax.profiler.TraceAnnotation("plan"):
            planned = self._batch_planner.plan(
                self._carried, routes, counts, stages, updates=updates, start=self._warm_start
            )
        with jax.profiler.TraceAnnotation("size"):
            sizes = count_sizes(
                planned.routes,
                planned.plans,
                self._capacities,
                planned.parallel,
                top_k=planned.top_k,
                lengths=planned.batch.lengths,
                layouts=planned.layouts,
            )
        with jax.profiler.TraceAnnotation("migrate"):
            prepared = tuple(self._prepare_stage(number, planned, sizes) for number in range(len(stages)))
            topology, mesh = planned.parallel.topology, planned.parallel.mesh
            put_on_mesh(model, optimizer, mesh)
            for other in copies:
                put_on_mesh(other, None, mesh)
            home = np.asarray(planned.plans[0].plan.home)
            step = None if optimizer is None else int(optimizer.step[...])
            with signals_deferred():
                reorder_experts(model, optimizer, home, mesh=mesh, topology=topology, copies=copies)
                # The number first: a search of `plan_ahead` that ends from here on is for the batch before.
                self._batch_number, self._marks = self._batch_number + 1, marks
                self._carried, self._warm_start = planned.after, None
                self._home, self._capacities = home, sizes.capacities
                self.trains = optimizer is not None
                if step is not None:
                    self._steps_before = step
        return prepared

    def _prepare_stage(self, number: int, planned: PlannedStages, sizes: BufferSizes) -> PreparedBatch:
        """Prepare one stage: its sequences, and its layers on the devices."""
        plan, parallel = planned.plans[number], planned.parallel
        shape = stage_shape(plan, parallel)
        lengths, num_samples = np.asarray(planned.batch.lengths), len(planned.batch.lengths)
        length = planned.batch.sequence_length
        num_tokens = int(lengths.max(initial=0) if length is None else length)
        if planned.routes is not None:
            num_tokens = planned.routes.num_tokens
        layout = planned.layouts[number] if planned.layouts else None
        model_times = None
        sequences = batch_sequences(
            plan.assignment,
            layout,
            parallel,
            num_samples=num_samples,
            num_tokens=num_tokens,
            memory_kind=self.memory_kind,
        )
        if not self._for_balance:
            model_times = functools.partial(
                model_stage,
                plan,
                planned.batch,
                planned.stages[number],
                planned.prices[number],
                parallel.topology,
                previous_home=self._home,
                moves=number == 0,
            )
        host = HostBatch(
            sequences=sequences,
            check_current=functools.partial(self._check_current, self._batch_number + 1),
            plan_seconds=planned.seconds,
            size_seconds=sizes.seconds,
            visits=sizes.visits[number],
            model_times=model_times,
        )
        parallel = dataclasses.replace(
            parallel, capacities=sizes.capacities[shape], num_sequences=sequences.samples.shape[1]
        )
        plan = jax.tree.map(functools.partial(replicate, mesh=parallel.mesh), plan)
        layers = None
        if planned.routes is not None:
            layers = prepare_replayed(plan, parallel, sequences, planned.routes)
        return PreparedBatch(plan, parallel, layers, host)

    def _live_stages(
        self, stages: Sequence[Stage], mask: Bool[Array, "B T"] | None, capacities: Capacities | None
    ) -> tuple[PreparedBatch, ...]:
        """Prepare stages for live routing: samples in order or packed, experts at home, no replicas."""
        if mask is None:
            raise ValueError("live routing (replay=None) needs mask, the tokens of each sample")
        parallel = dataclasses.replace(self.live, capacities=capacities)
        return live_stages(stages, mask, parallel, sequences=self.sequences, memory_kind=self.memory_kind)
