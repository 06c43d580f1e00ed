"""The front door for Flax: everything between a rollout and the steps that learn from it, in one call.

A batch is everything between two placements. `Balancer.prepare` begins one: samples are assigned to micro-batches and
ranks, experts placed and replicated, the plan checked, experts moved with their optimizer state, buffers sized. What
follows is the caller's own loop. The pure functions that it is made of are public:
`relibra_jax.planning.plan_stages.plan_stages`, `relibra_jax.plan_check.check_plan`,
`relibra_jax.capacity.count_capacities`, `relibra_jax.nnx.homes.reorder_experts`.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Int, Integer, PRNGKeyArray

from relibra_jax.capacity import Capacities
from relibra_jax.execution.parallel import AUTO, ExpertParallel
from relibra_jax.nnx.balancer_state import BalancerState, check_state, from_host, no_capacities, to_host
from relibra_jax.nnx.batch_checks import check_aligned_left, check_model_homes, check_replay_layers
from relibra_jax.nnx.batch_order import BatchOrder
from relibra_jax.nnx.finite import check_finite
from relibra_jax.nnx.homes import reorder_experts
from relibra_jax.nnx.prepare_batch import live_stages, replayed_batch
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.nnx.put_on_mesh import put_on_mesh, replicate
from relibra_jax.nnx.stage_plans import Search, plan_checked, plan_unfinished
from relibra_jax.nnx.stage_sizes import count_visits, grow_sizes, stage_shape
from relibra_jax.plan import contiguous_homes
from relibra_jax.plan_check import check_homes
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.extra_args import takes
from relibra_jax.planning.placement import Placement
from relibra_jax.planning.plan_stages import stage_samples
from relibra_jax.planning.turns import Assign
from relibra_jax.row_packing import pack_rows as lay_out_rows
from relibra_jax.types import Array, BatchPlan, Planner, RoutingReplay, Topology, check_shape


class Balancer:
    """Prepares batches for a Flax model whose mixture-of-experts layers are `relibra_jax.nnx.MoELayer`.

    Args:
        planner: any planner, `relibra_jax.relibra` for instance.
        topology: the expert-parallel group.
        mesh: the device mesh, from `relibra_jax.execution.expert_mesh` or another one with its axes. Over its further
            axes (data, FSDP) the group is copied, and tokens are split; see ``data_axes`` of `ExpertParallel`.
        num_layers: L, the model's MoE layers.
        num_micro_batches: M, forward and backward passes of each copy of the group for one gradient, for `prepare`.
        key: random key of planner and assignment. All processes need the same.
        assign: how samples are assigned to micro-batches and ranks, with a ``key``; None keeps them in order.
        across_nodes: whether the planner's replicas may be on other nodes than their experts' homes.
        capacities: buffer sizes to begin with, so that the first batches compile no step of their own; stages of every
            shape begin with them.
        pack_rows: whether a row holds several samples, one behind the other, so that at most 5% of what layers compute
            is padding, where samples allow it (`relibra_jax.row_packing`). Samples are aligned to the left then, are
            assigned by their lengths to begin with, and models are given `PreparedBatch.packing`.
        data_axes: the mesh's further axes over which tokens are split; all of them when None.
        path: ``flat``, one exchange over all ranks, ``hierarchical``, or ``auto``.
        exchange: the kind of token exchange.
        fetch: the kind of replica fetch.
        implementation: the implementation of `pallas_kernels.grouped_mlp`.
        check_rows: whether layers count the rows that reach their slots. These six are fields of `ExpertParallel`.

    Raises:
        ValueError: if mesh and topology disagree, a name is unknown, or a number is below 1.

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
        self._first_capacities = capacities or no_capacities(counts_visits=path != "flat")
        self._capacities: dict[str, Capacities] = {}
        self._pack_rows = pack_rows
        self._row_shapes: dict[str, tuple[int, int]] = {}
        self._order = BatchOrder()
        self._warm_start: Placement | None = None

    @property
    def live(self) -> ExpertParallel:
        """How live routing is run: experts at home, no residents nor replicas, buffers for the worst case."""
        topology = dataclasses.replace(self.topology, replica_slots=0, resident_slots=0)
        return dataclasses.replace(self._parallel, topology=topology, capacities=None)

    @property
    def state(self) -> BalancerState:
        """What the next batch depends on; set it to go on from a checkpoint.

        Raises:
            ValueError: on setting, if it is the state of another planner, or of another number of layers or experts.
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
        """Plan a batch, move the model's experts to where the plan wants them, and size its buffers.

        On several processes, all call it with the same replay. Parameters and optimizer state that do not lie on the
        mesh yet are put there, by their sharding metadata. A batch that was prepared from a replay before is not in
        force any more; preparing live routing leaves it in force.

        Args:
            model: a module with L `MoELayer`; its experts move, in place.
            optimizer: the optimizer of the model, whose state moves too; None if the model is not trained.
            replay: the recorded routing of all samples of the batch. None prepares live routing: samples in order,
                experts where they are, no replicas.
            num_samples: B, for live routing.
            capacities: buffer sizes for live routing; None takes the worst case.

        Returns:
            What the steps of the batch need.

        Raises:
            ValueError: if the replay is not one of the model's layers and experts, the batch that was prepared before
                has not been learned from, the model's homes are not the balancer's, the processes differ, or the
                planner's plan breaks a rule. Nothing has moved then.
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
        num_samples: int | None = None,
        capacities: Capacities | None = None,
    ) -> tuple[PreparedBatch, ...]:
        """`prepare` for a batch of several stages, such as a recompute and updates from parts of its samples.

        One search plans all stages (`relibra_jax.planning.plan_stages.plan_stages`): experts move once, to homes that
        all stages share, and residents are the same in all. All stages stay in force until the next batch is
        prepared, in any order and as often as wanted. That one of them was learned from is enough for that: a loop may
        stop early. Residents' weights change with every optimizer step and are pushed for each update.

        Args:
            model: a module with L `MoELayer`, as for `prepare`.
            optimizer: the optimizer of the model, as for `prepare`.
            replay: the recorded routing of all samples of the batch, or None, as for `prepare`.
            num_micro_batches: M of each stage in each copy of the group, in the order in which stages run.
            samples: the samples of each stage, neighbours in the batch: ``(None, range(0, 16), range(16, 32))`` for a
                recompute of 32 samples, which None stands for, and two updates. All of them in all stages by default.
            num_samples: B, for live routing.
            capacities: buffer sizes for live routing, as for `prepare`.

        Returns:
            What the steps of each stage need. `PreparedBatch.to_ranks` of each takes arrays of the whole batch. Stages
            of as many micro-batches and rows have the same buffer sizes, and so the same compiled steps.

        Raises:
            ValueError: as `prepare`, or if the samples of a stage are no neighbours in the batch or fewer than its
                micro-batches.
        """
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
            raise ValueError("num_samples and capacities are for live routing: the replay tells both")
        check_model_homes(model, self._home)
        self._order.check_learned(optimizer)
        check_finite(model)
        with jax.profiler.TraceAnnotation("plan"):
            start = time.perf_counter()
            replay = RoutingReplay(np.asarray(replay.expert_ids), np.asarray(replay.mask))
            check_replay_layers(replay, num_experts=self.topology.num_experts, num_layers=self.num_layers)
            if self._pack_rows:
                check_aligned_left(np.asarray(replay.mask))
            key, now = jax.random.split(self._key)
            plans, planner_state = plan_checked(
                *(replay, self._planner_state, now),
                self._search(len(replay.mask), num_micro_batches, samples),
                across_nodes=self._parallel.across_nodes,
                warm_start=self._warm_start,
            )
            plan_seconds = time.perf_counter() - start
        with jax.profiler.TraceAnnotation("size"):
            start = time.perf_counter()
            visits = [count_visits(replay, plan, self._parallel) for plan in plans]
            sizes = grow_sizes(self._capacities, self._first_capacities, plans, visits, self._parallel)
            seconds = (plan_seconds, time.perf_counter() - start)
        with jax.profiler.TraceAnnotation("migrate"):
            stages = tuple(
                self._replayed(plan, sizes[stage_shape(plan, self._parallel)], replay, seconds, visited)
                for plan, visited in zip(plans, visits, strict=True)
            )
            put_on_mesh(model, optimizer, self.mesh)
            home = np.asarray(plans[0].plan.home)
            reorder_experts(model, optimizer, home, mesh=self.mesh, topology=self.topology)
        self._planner_state, self._key = planner_state, key
        self._home, self._capacities, self._warm_start = home, sizes, None
        check_in_force = self._order.begin(optimizer)
        for stage in stages:
            stage.check_in_force = check_in_force
        return stages

    def discard(self) -> None:
        """Give up the batch that was prepared last, so that another one may be prepared without an update, and what
        `plan_ahead` has found for the next one."""
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
    ) -> None:
        """Search homes for the next batch while its rollout still runs, from the counts of the finished samples.

        The next `prepare` begins its search there, and takes half as many turns. Called in a thread of its own, it has
        to be waited for before `prepare`: a search that ends behind it is dropped. Called again with more samples, it
        searches anew. Nothing moves, and nothing of it is saved: a run that is restored plans its next batch from
        nothing. On several processes, all call it with the same counts.

        Args:
            sample_load: token copies of each finished sample for each expert, from `relibra_jax.sample_counts` in
                rollout workers or `relibra_jax.sample_load`; what samples have that still run is not read.
            tokens: the length of each finished sample, in real tokens.
            finished: the samples that have finished; the others count as their nearest neighbours that have
                (`relibra_jax.planning.unfinished.fill_unfinished`).
            num_micro_batches: M of each stage, for `prepare_stages`; that of `prepare` by default.
            samples: the samples of each stage, as `prepare_stages` takes them.

        Raises:
            ValueError: if the planner has no search that could begin elsewhere, no sample has finished, or counts are
                not of the model's layers and experts.
        """
        if not takes(self.planner.update, "refine"):
            raise ValueError("plan_ahead: the planner takes no ``refine``, its search cannot begin elsewhere")
        shape = (len(tokens), self.num_layers, self.topology.num_experts)
        check_shape("sample_load", sample_load.shape, shape)
        if not np.asarray(finished).any():
            raise ValueError(f"plan_ahead: none of {len(tokens)} samples has finished")
        search = self._search(len(tokens), num_micro_batches or (self.num_micro_batches,), samples)
        key = jax.random.split(self._key, 3)[2]
        before = self._order.number
        with jax.profiler.TraceAnnotation("plan_ahead"):
            placed = plan_unfinished(*(sample_load, tokens, finished), self._planner_state, key, search)
        if self._order.number == before:
            self._warm_start = placed

    def _search(
        self, num_samples: int, num_micro_batches: Sequence[int], samples: Sequence[range | None] | None
    ) -> Search:
        """How stages are searched for, the same for the same stages."""
        copies = math.prod(self._parallel.copies)
        return Search(
            planner=self.planner,
            topology=self.topology,
            num_micro_batches=tuple(copies * number for number in num_micro_batches),
            samples=tuple(stage_samples(num_samples, len(num_micro_batches), samples)),
            assign=self.assign,
            by_length=self._pack_rows,
        )

    def _replayed(
        self,
        plan: BatchPlan,
        sizes: Capacities,
        replay: RoutingReplay,
        seconds: tuple[float, float],
        visits: Int[np.ndarray, "M L P N"] | None,
    ) -> PreparedBatch:
        on_mesh = jax.tree.map(functools.partial(replicate, mesh=self.mesh), plan)
        layout, rows = None, plan.assignment.sample[0].size
        if self._pack_rows:
            shape = stage_shape(plan, self._parallel)
            layout = lay_out_rows(plan.assignment, replay.mask.sum(1), shape=self._row_shapes.get(shape))
            self._row_shapes[shape] = layout.shape
            rows = self.topology.num_ranks * layout.shape[0]
        rows *= math.prod(self._parallel.copies)
        parallel = dataclasses.replace(self._parallel, capacities=sizes, rows=rows)
        return replayed_batch(
            *(on_mesh, parallel, replay),
            assignment=plan.assignment,
            rows=layout,
            seconds=seconds,
            visits=visits,
        )
