"""Planners that choose between plans by modelled time rather than by balance.

`cheapest` chooses among planners, layer by layer. `replicate_while_hidden` sends replicas over the slow network if
attention hides the transfer. Both use the times of `relibra_jax.cost.step_time` and `relibra_jax.cost.copies`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.cost.copies import RESIDENT_BYTES, push_time, resident_traffic
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.cost.traffic import transfer_time
from relibra_jax.planning.extra_args import with_extra_args
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.types import Array, Plan, Planner, Topology, layer_plans


def cheapest(
    planners: Sequence[Planner], *, cluster: Cluster, model: Model, context: float, scale: float = 1.0
) -> Planner:
    """Build a planner that runs several planners and keeps, for each layer, the plan with the least modelled time.

    In modelled time it is never slower than any of the planners. The modelled time leaves out the reorder, and counts
    the transfers of residents as if each layer's were sent separately. Ties go to the earlier planner.

    Args:
        planners: the planners to choose from. Each keeps its own state, as if it ran alone.
        cluster, model, context, scale: as in `relibra_jax.cost.step_time.rank_time`.

    Returns:
        A Planner whose state is the tuple of the planners' states.

    Raises:
        ValueError: if ``planners`` is empty.
    """
    if not planners:
        raise ValueError("cheapest needs at least one planner")

    def init(topology: Topology, num_layers: int, *, key: jax.Array) -> tuple:
        return tuple(planner.init(topology, num_layers, key=key) for planner in planners)

    def update(
        load: Int[Array, "M L N G E"], state: tuple, topology: Topology, **extra: Any
    ) -> tuple[Plan, tuple]:
        each = zip(map(with_extra_args, planners), state, strict=True)
        plans, states = zip(*(p.update(load, own, topology, **extra) for p, own in each), strict=True)
        best, least = plans[0], None
        resident_bytes = float(RESIDENT_BYTES * model.expert_params)
        for plan in plans:
            ranks = rank_time(
                layer_plans(plan, load), topology, cluster=cluster, model=model, context=context, scale=scale
            )
            pushes = transfer_time(resident_traffic(plan, topology), resident_bytes, cluster)
            time = layer_time(ranks).total.sum(0) + pushes.max((-2, -1))
            if least is not None:
                wins = time < least
                best = _choose(jnp.broadcast_to(wins[None], plan.quota.shape[:2]), plan, best, wins)
                time = jnp.minimum(time, least)
            least = time
        return best, states

    return Planner(init, update)


def replicate_while_hidden(
    load: Int[Array, "M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
    context: float,
    scale: float = 1.0,
    **options,
) -> Plan:
    """Add replicas on any node if attention hides their transfer in modelled time, else only inside the expert's node.

    Args:
        load: token copies of each expert, from all ranks together.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        cluster, model, context, scale: as in `relibra_jax.cost.step_time.rank_time`. The time of attention is that of
            the mean rank, which is at most that of the slowest one, so the choice is conservative.
        **options: additional keyword arguments of `relibra_jax.planning.replication.replicate_experts`.

    Returns:
        A Plan.
    """
    inside_nodes = replicate_experts(load, home, topology, **options)
    on_any_node = replicate_experts(load, home, topology, across_nodes=True, **options)
    tokens = scale * jnp.asarray(load).sum(-1) / (model.top_k * topology.num_ranks)
    attention = tokens * model.token_flops(context) / (cluster.matmul_flops * cluster.matmul_efficiency)
    hidden = (
        push_time(layer_plans(on_any_node, None), topology, cluster=cluster, model=model).max((-2, -1))
        <= attention
    )
    return _choose(hidden, on_any_node, inside_nodes, jnp.ones(home.shape[0], bool))


def _choose(rows: Bool[Array, "M L"], first: Plan, second: Plan, layers: Bool[Array, " L"]) -> Plan:
    """Merge two plans: slots and quotas of ``first`` where ``rows`` is True, its homes where ``layers`` is True."""
    pick = rows[:, :, None, None, None]
    return Plan(
        jnp.where(pick, first.slot_expert, second.slot_expert),
        jnp.where(layers[:, None], first.home, second.home),
        jnp.where(pick, first.quota, second.quota),
    )
