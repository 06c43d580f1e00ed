"""A planner that chooses between the plans of other planners by modelled time, layer by layer, for the ablation."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Array, Plan, Topology, layer_plans
from relibra_jax.cost.copies import push_time
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.planning.compiled_update import compiled_update


def cheapest(planners: Sequence[Planner]) -> Planner:
    """Build a planner that runs several planners and keeps, for each layer, the plan with the least modelled time.

    The modelled time is that of flat dispatch, because planners do not see which tokens share a node, and of ragged
    exchanges, because padded ones have the lanes of the fullest layer. It leaves out buffers, attention between tokens
    and the reorder, and counts the transfers of residents as if each layer's were sent separately. Ties go to the
    earlier planner.

    Args:
        planners: the planners to choose from. Each keeps its own state, as if it ran alone.

    Returns:
        A Planner whose state is the tuple of the planners' states.

    Raises:
        ValueError: if ``planners`` is empty.
    """
    if not planners:
        raise ValueError("cheapest needs at least one planner")

    def init(topology: Topology, num_layers: int, *, key: jax.Array) -> tuple:
        return tuple(planner.init(topology, num_layers, key=key) for planner in planners)

    @compiled_update
    def update(request: PlanRequest, state: tuple, topology: Topology) -> tuple[Plan, tuple]:
        each = zip(planners, state, strict=True)
        plans, states = zip(*(p.update(request, own, topology) for p, own in each), strict=True)
        price = request.price
        flat = dataclasses.replace(price, hierarchical=False, exchange="needed", fetches="ragged", gather=0.0)
        attention = price.token * _positions(request)
        best, least = plans[0], None
        for plan in plans:
            ranks = rank_time(layer_plans(plan, request.load), attention, topology, flat)
            pushes = jax.vmap(
                lambda slots, home: push_time(Plan(slots[:, None], home[None], slots), topology, price),
                (1, 0),
            )(plan.slot_expert, plan.home)
            time = layer_time(ranks, flat).total.sum(0) + pushes
            if least is not None:
                wins = time < least
                best = _choose(jnp.broadcast_to(wins[None], plan.quota.shape[:2]), plan, best, wins)
                time = jnp.minimum(time, least)
            least = time
        return best, states

    uses_transitions = any(planner.uses_transitions for planner in planners)
    return Planner(init, update, uses_transitions=uses_transitions)


def _positions(request: PlanRequest) -> Float[jax.Array, "M N G"]:
    """Return the tokens of each rank. The routes tell the number of experts of a token; without routes it is 1."""
    top_k = 1 if request.routes is None else request.routes.expert_ids.shape[-1]
    return jnp.asarray(request.load)[:, 0].sum(-1) / top_k


def _choose(rows: Bool[Array, "M L"], first: Plan, second: Plan, layers: Bool[Array, " L"]) -> Plan:
    """Merge two plans: slots and quotas of ``first`` where ``rows`` is True, its homes where ``layers`` is True."""
    pick = rows[:, :, None, None, None]
    return Plan(
        jnp.where(pick, first.slot_expert, second.slot_expert),
        jnp.where(layers[:, None], first.home, second.home),
        jnp.where(pick, first.quota, second.quota),
    )
