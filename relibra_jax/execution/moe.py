"""The layer: dispatch, grouped expert compute, combine, as the plan of one layer of one micro-batch says.

`moe_layer` is called where a dense mixture of experts would be, on global arrays under jit; `fetch_replicas` at the
start of the transformer layer, before attention. Plans are data: a compiled step serves every plan of a mesh.

A plan never changes the mathematics, and nothing is dropped. Sizes and plans are checked on the host before the step
(`relibra_jax.capacity`); a step that runs all the same with buffers too small, with a plan that is not one of its
load, or with ids that are not the load's, returns NaN rather than a result that misses tokens, and NaN gradients.

Pipeline, context and expert-tensor parallelism are not built.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from pallas_kernels import grouped_mlp
from relibra_jax.capacity import Capacities, ExchangeSizes, export_count
from relibra_jax.execution.dispatch import dispatch, dispatch_by_node
from relibra_jax.execution.exchange import KINDS, Exchange
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS, check_mesh
from relibra_jax.execution.replicas import FETCHES, fetch, landing_order, replica_homes
from relibra_jax.token_split import refit_quota, source_quota
from relibra_jax.types import EMPTY, Array, Plan, Topology, check_shape

PATHS: Final = ("flat", "hierarchical")


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """How plans are run: everything that a compiled step depends on besides shapes. Hashable and static under jit.

    Raises:
        ValueError: a mesh without the topology's ranks, an unknown name, or sizes that the path needs and that were
            not counted.
    """

    mesh: Mesh
    """From `relibra_jax.execution.mesh.expert_mesh`, or one with its axes."""
    topology: Topology
    capacities: Capacities
    """From `relibra_jax.capacity.capacities`."""
    groups: tuple[str, ...] = ()
    """The mesh's other axes over which tokens are split (data, FSDP). Each place along them is an expert-parallel
    group with a plan of its own; homes and parameters are shared. They lead the shapes of tokens and plans."""
    path: str = "flat"
    """One exchange over all ranks, or ``hierarchical``: `relibra_jax.execution.dispatch`."""
    exchange: str = "padded"
    """`relibra_jax.execution.exchange`; ``ragged`` is for GPUs and unproven."""
    fetch: str = "reduce_scatter"
    """`relibra_jax.execution.replicas`; ``ragged`` is for GPUs and unproven."""
    across_nodes: bool = False
    """Whether replicas may come from other nodes, as planners that ignore nodes want it."""
    implementation: str | None = None
    """Of `pallas_kernels.grouped_mlp`."""

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.topology)
        for name, names in (("path", PATHS), ("exchange", KINDS), ("fetch", FETCHES)):
            if getattr(self, name) not in names:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(names)}")
        for axis in self.groups:
            if axis in RANKS or axis not in self.mesh.shape:
                raise ValueError(f"groups: {axis!r} is no further axis of the mesh {self.mesh.axis_names}")
        if self.path == "hierarchical" and self.capacities.node is None:
            raise ValueError("path='hierarchical' needs capacities counted with visits (node_visits)")

    @property
    def group_shape(self) -> tuple[int, ...]:
        """Sizes of the axes in ``groups``."""
        return tuple(self.mesh.shape[axis] for axis in self.groups)

    @property
    def domain(self) -> tuple[str, ...]:
        """The axes that replicas may cross."""
        return RANKS if self.across_nodes else (LOCAL,)

    def over(self, axes: tuple[str, ...], sizes: ExchangeSizes, kind: str) -> Exchange:
        """The exchange along ``axes``."""
        ranks = math.prod(self.mesh.shape[axis] for axis in axes)
        return Exchange(kind=kind, axes=axes, ranks=ranks, sizes=sizes)


class LayerExperts(NamedTuple):
    """The experts that the ranks hold while a layer runs, of one dtype: made by `fetch_replicas`."""

    home: Float[Array, "*ranks H three D F"]
    """``[*groups, N, G, H, 3, D, F]``: gate, up and down transposed."""
    replicas: Float[Array, "*ranks R three D F"] | None
    """``[*groups, N, G, R, 3, D, F]``, zeros in empty slots; None if there are no replica slots."""


def fetch_replicas(
    experts: Float[Array, "..."], plan: Plan, x: Float[Array, "..."], parallel: ExpertParallel
) -> tuple[LayerExperts, jax.Array]:
    """The layer's experts: those at home, and the replicas, packed now and pushed beside what follows.

    Under `jax.checkpoint` with ``nothing_saveable`` or ``save_only_these_names`` around the transformer layer, replicas
    are fetched again in the backward pass; without it, every layer's are kept for it.

    Args:
        experts: home weights of the layer, ``[N, G, H, 3, D, F]``.
        plan: of this layer and micro-batch: ``slot_expert[*groups N G S]``, ``home[E]``, ``quota[*groups N G S]``.
        x: the transformer layer's input, ``[*groups, N, G, ...]``.
        parallel: how.

    Returns:
        The experts, for `moe_layer`; and ``x``, which stands for the input from here on: the push starts no earlier
        than ``x`` is there. NaN if the exports do not fit, or replicas have homes on other nodes and ``across_nodes``
        is not set.

    Raises:
        ValueError: a plan or weights of another topology.
    """
    _check_plan(plan, parallel)
    _check_experts(experts, parallel.topology)
    groups = len(parallel.groups)
    check_shape("x", x.shape, (*parallel.group_shape, *_ranks(parallel), *x.shape[groups + 2 :]))
    _, rank, of_plan = _specs(parallel)
    replica_slots = parallel.topology.replica_slots

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(PartitionSpec(*RANKS), of_plan, rank),
        out_specs=(LayerExperts(rank, rank if replica_slots else None), rank),  # type: ignore[arg-type]
    )
    def on_rank(experts, plan, x):
        lead = (1,) * (groups + 2)
        # Groups share the homes, so their gradients are summed over the groups.
        home = jax.lax.pcast(experts[0, 0], parallel.groups, to="varying") if groups else experts[0, 0]
        if not replica_slots:
            return LayerExperts(home.reshape(*lead, *home.shape), None), x
        plan = Plan(plan.slot_expert[(0,) * groups], plan.home, plan.quota[(0,) * groups])
        plan = landing_order(plan, parallel.topology)
        wanted, axes = replica_homes(plan, parallel.topology), parallel.domain
        # A replica that is lost anywhere is missed by tokens from everywhere.
        most = export_count(plan, parallel.topology).max()
        fits = (most <= parallel.capacities.exports) | (parallel.fetch == "reduce_scatter")
        if not parallel.across_nodes:
            node = jax.lax.axis_index(NODE)
            homes = parallel.topology.ranks_per_node * parallel.topology.home_slots
            nodes = jnp.arange(parallel.topology.num_nodes)[:, None, None]
            fits &= ((wanted == EMPTY) | (wanted // homes == nodes)).all()
            wanted = jnp.where(wanted[node] == EMPTY, EMPTY, wanted[node] - node * homes)
        exports = max(parallel.capacities.exports, 1)
        sizes = ExchangeSizes(pair=replica_slots, send=exports, receive=replica_slots)
        kind = "padded" if parallel.fetch == "reduce_scatter" else parallel.fetch
        exchange = parallel.over(axes, sizes, kind)
        wanted = wanted.reshape(-1, replica_slots)
        home, replicas, tied = fetch(home, wanted, x, parallel.fetch, exchange)
        both = LayerExperts(home.reshape(*lead, *home.shape), replicas.reshape(*lead, *replicas.shape))
        return both, tied * _one_or_nan(fits, tied)

    return on_rank(experts, plan, x)


def moe_layer(
    x: Float[Array, "..."],
    expert_ids: Int[Array, "..."],
    gates: Float[Array, "..."],
    experts: LayerExperts,
    plan: Plan,
    load: Int[Array, "..."] | None,
    parallel: ExpertParallel,
) -> Float[jax.Array, "..."]:
    """Every token's experts, wherever the plan put them, weighted by their gates and summed.

    Args:
        x: tokens of every rank, ``[*groups, N, G, t, D]``.
        expert_ids: logical experts of each token, ``[*groups, N, G, t, K]``; EMPTY on padding, which adds nothing.
        gates: of each token copy, of that shape, float32 (`relibra_jax.execution.gating`).
        experts: from `fetch_replicas`, which also saw ``plan``.
        plan: of this layer and micro-batch, as in `fetch_replicas`.
        load: ``[*groups, N, G, E]`` of this layer and micro-batch as the planner saw it. None for routing that it
            did not see: it is counted here (one small all-gather) and the quotas are refitted to it.
        parallel: how.

    Returns:
        Of the shape and dtype of ``x``. NaN for every token of the group where quotas do not add up to ``load``,
        for every token of a rank whose buffers are too small or whose ids are not those of ``load``.

    Raises:
        ValueError: shapes that do not belong together, with both; ids outside the model, where they are known.
    """
    _check_plan(plan, parallel)
    topology, groups = parallel.topology, len(parallel.groups)
    _check_ids(expert_ids, topology.num_experts)
    ranks = (*parallel.group_shape, *_ranks(parallel))
    check_shape("x", x.shape, (*ranks, *x.shape[-2:]))
    check_shape("expert_ids", expert_ids.shape, (*ranks, x.shape[-2], expert_ids.shape[-1]))
    check_shape("gates", gates.shape, expert_ids.shape)
    width = experts.home.shape[-1]
    check_shape("experts.home", experts.home.shape, (*ranks, topology.home_slots, 3, x.shape[-1], width))
    if experts.replicas is not None or topology.replica_slots:
        found = (*ranks, 0) if experts.replicas is None else experts.replicas.shape
        check_shape("experts.replicas", found, (*ranks, topology.replica_slots, 3, x.shape[-1], width))
    if load is not None:
        check_shape("load", load.shape, (*ranks, topology.num_experts))
    group, rank, of_plan = _specs(parallel)

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(
            *(rank, rank, rank, LayerExperts(rank, None if experts.replicas is None else rank)),  # type: ignore[arg-type]
            *(of_plan, None if load is None else group),
        ),
        out_specs=rank,
    )
    def on_rank(x, expert_ids, gates, experts, plan, load):
        one, lead = (0,) * groups, (0,) * (groups + 2)
        plan = Plan(plan.slot_expert[one], plan.home, plan.quota[one])
        load = None if load is None else load[one]
        home = experts.home[lead]
        replicas = home[:0] if experts.replicas is None else experts.replicas[lead]
        out = _on_rank(x[lead], expert_ids[lead], gates[lead], home, replicas, plan, load, parallel)
        return out.reshape(x.shape)

    return on_rank(x, expert_ids, gates, experts, plan, load)


def _on_rank(x, expert_ids, gates, home, replicas, plan, load, parallel: ExpertParallel):
    """The whole layer as one rank sees it."""
    topology, sizes = parallel.topology, parallel.capacities
    node, local = jax.lax.axis_index(NODE), jax.lax.axis_index(LOCAL)
    own = _histogram(expert_ids, topology.num_experts)
    if load is None:
        load = jax.lax.all_gather(own, RANKS).reshape(*_ranks(parallel), -1)
        plan = refit_quota(plan, load, topology)
    plan = landing_order(plan, topology)
    whole = Plan(plan.slot_expert[None, None], plan.home[None], plan.quota[None, None])
    sent = source_quota(whole, load[None, None], topology).reshape(*_ranks(parallel), *plan.quota.shape)
    if parallel.path == "flat":
        exchange = parallel.over(RANKS, sizes.flat, parallel.exchange)
        ranks = topology.num_ranks
        moved = dispatch(
            *(x, expert_ids, gates, plan.slot_expert.reshape(ranks, -1), sent.reshape(ranks, ranks, -1)),
            exchange,
            rows=sizes.rows,
        )
    else:
        assert sizes.node is not None, "ExpertParallel refuses this"
        between = parallel.over((NODE,), sizes.node, parallel.exchange)
        inside = parallel.over((LOCAL,), sizes.local, parallel.exchange)
        moved = dispatch_by_node(
            *(x, expert_ids, gates, plan.slot_expert, sent, between, inside), rows=sizes.rows
        )
    with jax.named_scope("experts"):
        computed = grouped_mlp(
            moved.rows,
            home,
            replicas,
            moved.group_sizes,
            moved.scale,
            implementation=parallel.implementation,
        )
    slot = jnp.where(plan.slot_expert == EMPTY, topology.num_experts, plan.slot_expert)
    planned = jnp.zeros(topology.num_experts, jnp.int32).at[slot].add(plan.quota, mode="drop")
    sound = moved.fits & (own == load[node, local]).all() & (planned == load.sum((0, 1))).all()
    sound &= ((expert_ids >= EMPTY) & (expert_ids < topology.num_experts)).all()
    out = moved.combine(computed)
    return out * _one_or_nan(sound, out)


def _one_or_nan(sound, like):
    """A factor: unlike a choice, it makes the gradients NaN too."""
    return jnp.where(sound, 1, jnp.nan).astype(like.dtype)


def _check_ids(expert_ids: Array, num_experts: int) -> None:
    """Raise for the first id outside the model; nothing is known of ids that are traced."""
    if isinstance(expert_ids, jax.core.Tracer) or getattr(expert_ids, "is_fully_addressable", True) is False:
        return
    ids = np.asarray(expert_ids)
    wrong = (ids < EMPTY) | (ids >= num_experts)
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(f"expert_ids{list(place)}: {ids[place]} is outside 0..{num_experts - 1}")


def _histogram(expert_ids, num_experts):
    """Copies of each expert, ``[E]``."""
    index = jnp.where(expert_ids < 0, num_experts, expert_ids).ravel()
    return jnp.zeros(num_experts, jnp.int32).at[index].add(1, mode="drop")


def _ranks(parallel: ExpertParallel) -> tuple[int, int]:
    return parallel.topology.num_nodes, parallel.topology.ranks_per_node


def _specs(parallel: ExpertParallel) -> tuple[PartitionSpec, PartitionSpec, Any]:
    """Specs of arrays of a group, of arrays of a rank, and of a plan."""
    group = PartitionSpec(*parallel.groups)
    of_plan = Plan(group, PartitionSpec(), group)  # type: ignore[arg-type]
    return group, PartitionSpec(*parallel.groups, *RANKS), of_plan


def _check_plan(plan: Plan, parallel: ExpertParallel) -> None:
    topology = parallel.topology
    slots = (*parallel.group_shape, *_ranks(parallel), topology.slots)
    check_shape("plan.slot_expert", plan.slot_expert.shape, slots)
    check_shape("plan.quota", plan.quota.shape, slots)
    check_shape("plan.home", plan.home.shape, (topology.num_experts,))


def _check_experts(experts, topology: Topology) -> None:
    layout = (topology.num_nodes, topology.ranks_per_node, topology.home_slots, 3)
    check_shape("experts", experts.shape, (*layout, *experts.shape[-2:]))
