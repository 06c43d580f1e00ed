"""Planners that choose between plans by modelled time rather than by balance.

`cheapest` chooses among planners, layer by layer. `replicate_while_hidden` sends replicas over the slow network if
attention hides the transfer. Both are alternatives in the ablation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from relibra_jax.contract.types import Array, Plan, Planner, Price, TokenSample, Topology, layer_plans
from relibra_jax.cost.copies import fetch_time, push_time
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.planning.extra_args import with_extra_args
from relibra_jax.planning.replication import replicate_experts


def cheapest(planners: Sequence[Planner]) -> Planner:
    """Build a planner that runs several planners and keeps, for each layer, the plan with the least modelled time.

    The modelled time is that of flat dispatch, because planners do not see which tokens share a node, and of ragged
    exchanges, because padded ones have the lanes of the fullest layer. It leaves out buffers, attention between tokens
    and the reorder, and counts the transfers of residents as if each layer's were sent separately. Ties go to the
    earlier planner.

    Args:
        planners: the planners to choose from. Each keeps its own state, as if it ran alone.

    Returns:
        A Planner whose state is the tuple of the planners' states. Its ``update`` needs ``cost`` and ``tokens``.

    Raises:
        ValueError: if ``planners`` is empty; from ``update``, if it gets no ``cost`` or ``tokens``.
    """
    if not planners:
        raise ValueError("cheapest needs at least one planner")

    def init(topology: Topology, num_layers: int, *, key: jax.Array) -> tuple:
        return tuple(planner.init(topology, num_layers, key=key) for planner in planners)

    def update(
        load: Int[Array, "M L N G E"],
        state: tuple,
        topology: Topology,
        *,
        cost: Price | None = None,
        tokens: TokenSample | None = None,
        **extra: Any,
    ) -> tuple[Plan, tuple]:
        if cost is None or tokens is None:
            raise ValueError("cheapest compares modelled times, so it needs cost and tokens")
        extra |= {"cost": cost, "tokens": tokens}
        each = zip(map(with_extra_args, planners), state, strict=True)
        plans, states = zip(*(p.update(load, own, topology, **extra) for p, own in each), strict=True)
        flat = dataclasses.replace(cost, hierarchical=False, between="ragged", fetches="ragged", gather=0.0)
        attention = cost.token * jnp.asarray(load[:, 0]).sum(-1) / tokens.expert_ids.shape[-1]
        best, least = plans[0], None
        for plan in plans:
            ranks = rank_time(layer_plans(plan, load), attention, topology, flat)
            pushes = jax.vmap(
                lambda slots, home: push_time(Plan(slots[:, None], home[None], slots), topology, cost), (1, 0)
            )(plan.slot_expert, plan.home)
            time = layer_time(ranks).total.sum(0) + pushes
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
    cost: Price,
    tokens: TokenSample,
    **options,
) -> Plan:
    """Add replicas on any node if attention hides their transfer in modelled time, else only inside the expert's node.

    Args:
        load: token copies of each expert, from all ranks together.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        cost: the unit times. The time of attention is that of the mean rank without the part that grows with the
            square of a sample, which is at most that of the slowest rank, so the choice is conservative.
        tokens: sampled tokens, which tell the number of experts of a token.
        **options: additional keyword arguments of `relibra_jax.planning.replication.replicate_experts`.

    Returns:
        A Plan.
    """
    inside_nodes = replicate_experts(load, home, topology, **options)
    on_any_node = replicate_experts(load, home, topology, across_nodes=True, **options)
    positions = jnp.asarray(load).sum(-1) / (tokens.expert_ids.shape[-1] * topology.num_ranks)
    transfers = fetch_time(layer_plans(on_any_node, None), topology, cost).max((-2, -1))
    hidden = transfers <= cost.token * positions
    return _choose(hidden, on_any_node, inside_nodes, jnp.ones(home.shape[0], bool))


def _choose(rows: Bool[Array, "M L"], first: Plan, second: Plan, layers: Bool[Array, " L"]) -> Plan:
    """Merge two plans: slots and quotas of ``first`` where ``rows`` is True, its homes where ``layers`` is True."""
    pick = rows[:, :, None, None, None]
    return Plan(
        jnp.where(pick, first.slot_expert, second.slot_expert),
        jnp.where(layers[:, None], first.home, second.home),
        jnp.where(pick, first.quota, second.quota),
    )
