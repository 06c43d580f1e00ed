"""Replicas chosen by modelled time: inside nodes or on others, and no more than their transfer is worth.

A padded fetch takes as long as the rank that exports the most experts in any layer and micro-batch, and its buffers
hold an even number of them. So where attention does not hide the fetch, replicas are planned with at most `FEW_EXPORTS`
exports from every rank too, unless the request limits them itself. On other nodes, every number of slots for visitors
(`relibra_jax.planning.visiting_replicas`) is planned, and each layer takes the one with the least modelled time in each
micro-batch.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Float

from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import Plan, Topology, layer_plans
from relibra_jax.cost.copies import fetch_time
from relibra_jax.cost.step_time import layer_time, rank_time
from relibra_jax.planning.even_pairs import even_pairs
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.visit_estimates import estimate_visits
from relibra_jax.planning.visiting_replicas import replicate_with_visitors
from relibra_jax.support.argument_types import checks_arguments

FEW_EXPORTS: Final = 2
"""The exports of a rank in a short fetch: the least even number."""


@checks_arguments
def replicate_for_time(
    request: PlanRequest,
    placement: Placement,
    topology: Topology,
    *,
    min_tokens: int = 1,
    tile: int = 1,
    exact: bool = False,
) -> Plan:
    """Add replicas where they take the least modelled time. Works under jit and scan.

    Inside nodes they are those of `relibra_jax.planning.replication.replicate_experts`. They are on other nodes only
    if the price says that they may be there (`relibra_jax.contract.types.Price.across_nodes`).

    This function is a `relibra_jax.contract.planner.Replicate`. If the tokens of ranks are unknown, they are taken from
    the load and the number of experts in the routes of a token; without routes, every copy counts as a token.

    Args:
        request: the load, tokens, routes and price.
        placement: the homes and residents.
        topology: the expert-parallel group.
        min_tokens, tile, exact: the options of `relibra_jax.planning.replication.replicate_experts`, for replicas
            inside nodes.

    Returns:
        A Plan; unused replica slots are EMPTY.

    Raises:
        ValueError: under the conditions of `relibra_jax.planning.replication.replicate_experts`.
    """
    options: dict[str, Any] = {"min_tokens": min_tokens, "tile": tile, "exact": exact}
    plan = _inside(request, placement, topology, **options)
    if topology.num_nodes == 1 or not topology.replica_slots or not request.price.across_nodes:
        return plan
    others = [
        replicate_with_visitors(request, placement, topology, visitors=number, **options)
        for number in range(1, topology.replica_slots + 1)
    ]
    return _fastest(request, [plan, *others], topology)


@functools.partial(jax.jit, static_argnames=("topology", "min_tokens", "tile", "exact"))
def _inside(request: PlanRequest, placement: Placement, topology: Topology, **options: Any) -> Plan:
    """Add replicas inside nodes, with few exports if that shortens a padded fetch by more than it lengthens compute."""
    replicate = functools.partial(replicate_experts, request, placement, topology, **options)
    if request.price.fetches != "padded" or not topology.replica_slots:
        return replicate()
    given = jnp.int32(0) if request.exports is None else jnp.asarray(request.exports, jnp.int32)
    attention = request.price.token * _tokens(request).max()

    def seconds(plan: Plan) -> tuple[jax.Array, jax.Array]:
        """Return the seconds of compute and of the fetch that attention does not hide."""
        fetch = fetch_time(layer_plans(plan, request.load), topology, request.price).max((2, 3))
        compute = request.price.copy * rank_load(plan).max((2, 3)).sum()
        exposed = jnp.maximum(fetch - attention, 0).sum()
        return jnp.asarray(compute, jnp.float32), exposed.astype(jnp.float32)

    def attempt(carry: tuple[Plan, jax.Array, jax.Array, jax.Array]):
        best, least, number, _ = carry
        most = jnp.where(given > 0, given, topology.held_slots)
        plan = replicate(exports=jnp.where(number == 0, most, FEW_EXPORTS))
        compute, exposed = seconds(plan)
        better = (number == 0) | (compute + exposed < least)
        best = jax.tree.map(functools.partial(jnp.where, better), plan, best)
        return best, jnp.minimum(least, compute + exposed), number + 1, exposed

    def remains(carry: tuple[Plan, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, _, number, exposed = carry
        return (number == 0) | ((number == 1) & (given == 0) & (exposed > 0))

    # One loop compiles replication once.
    no_plan = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: replicate(exports=jnp.int32(0))))
    start = (no_plan, jnp.float32(jnp.inf), jnp.int32(0), jnp.zeros((), jnp.float32))
    return jax.lax.while_loop(remains, attempt, start)[0]


@functools.partial(jax.jit, static_argnames="topology")
def _fastest(request: PlanRequest, plans: Sequence[Plan], topology: Topology) -> Plan:
    """Take the fastest of several plans with the same homes and residents in each layer and micro-batch.

    Args:
        request: the request.
        plans: the plans. The first one stays if their mixture is not faster.
        topology: the expert-parallel group.
    """
    first, count = plans[0], len(plans)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plans)

    def take(number, carry: tuple[Plan, jax.Array, jax.Array]) -> tuple[Plan, jax.Array, jax.Array]:
        mixed, least, total = carry
        # The buffers of a padded fetch are as long as the longest of all layers, so the mixture is priced as a whole.
        plan = jax.tree.map(
            lambda leaf, mix: jnp.where(number < count, leaf[jnp.minimum(number, count - 1)], mix),
            stacked,
            mixed,
        )
        seconds = _seconds(plan, request, topology).astype(jnp.float32)
        wins = (seconds < least) & (number < count)
        slots, quota = (
            jnp.where(wins[:, :, None, None, None], *each)
            for each in ((plan.slot_expert, mixed.slot_expert), (plan.quota, mixed.quota))
        )
        least = jnp.where(wins, seconds, least)
        return Plan(slots, first.home, quota), least, total.at[number].set(seconds.sum())

    nothing = (
        first,
        jnp.full(first.quota.shape[:2], jnp.inf, jnp.float32),
        jnp.zeros(count + 1, jnp.float32),
    )
    mixed, _, total = jax.lax.fori_loop(0, count + 1, take, nothing)
    return jax.tree.map(functools.partial(jnp.where, total[count] < total[0]), mixed, first)


def _seconds(plan: Plan, request: PlanRequest, topology: Topology) -> Float[jax.Array, "M L"]:
    """Estimate the seconds of every layer and micro-batch."""
    price, plans = request.price, layer_plans(plan, request.load)
    tokens = _tokens(request)
    visits = None
    if price.hierarchical:
        visits = estimate_visits(plan, request.load, tokens, request.routes, topology, even=price.even_ranks)
    # The time of attention between the tokens of a sample comes on top; the choice is on the safe side.
    attention = jnp.broadcast_to(price.token * tokens.max(), tokens.shape)
    ranks = rank_time(plans, attention, topology, price, visits=visits, pairs=even_pairs(plans, topology))
    return jnp.asarray(layer_time(ranks, price).total)


def _tokens(request: PlanRequest) -> Float[jax.Array, "M N G"]:
    if request.tokens is not None:
        return jnp.asarray(request.tokens, jnp.float32)
    top_k = 1 if request.routes is None else request.routes.expert_ids.shape[-1]
    return jnp.asarray(request.load, jnp.float32)[:, 0].sum(-1) / top_k
