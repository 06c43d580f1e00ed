"""An estimate of the tokens that each rank sends to each node under a plan, from sampled routes or from loads alone.

On a single node, every rank counts as a node (`relibra_jax.contract.types.Topology.visited`).

`relibra_jax.routing.visits.node_visits` counts them exactly, which takes much longer than a plan. Here every sampled
token sends its copies where the quotas of the nodes say: first to its own node as far as that serves the expert, then
to the others in proportion to what they serve beyond their own tokens. An expert that several nodes serve for a node is
divided over the tokens in `LEVELS` steps.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.plan import node_quota
from relibra_jax.contract.planner import PlacedRoutes
from relibra_jax.contract.types import EMPTY, Array, Assignment, LayerPlan, Plan, Topology, layer_plans

LEVELS: Final = 4
"""The number of steps in which the copies of an expert are divided over nodes."""
NODE_WEIGHT: Final = 16
"""The number of sampled tokens at which the mean of a rank counts as much as that of its node."""
MOST_TOKENS: Final = 8192
"""The most sampled tokens that are followed."""
MOST_EXPERTS: Final = 16
"""The most experts of a token without routes; tokens of more experts count as tokens of as many."""
MOST_CERTAIN: Final = 0.999
"""The probability to which that of choosing an expert is bounded, so that its odds are finite."""
CORRECTIONS: Final = 2
"""The number of times that odds are corrected so that experts are chosen as often as the loads say."""


def estimate_visits(
    plan: Plan,
    load: Int[Array, "M L N G E"],
    tokens: Float[Array, "M N G"],
    routes: PlacedRoutes | None,
    topology: Topology,
    *,
    even: bool,
) -> Float[jax.Array, "M L P V"]:
    """Estimate the tokens that each rank sends to each node. Works under jit.

    Args:
        plan: the plan.
        load: its load.
        tokens: the number of tokens on each rank.
        routes: the routes of sampled tokens. Without them, a token chooses as many experts as the mean, and any set of
            them with a probability in proportion to the product of their odds.
        topology: the expert-parallel group.
        even: whether the ranks of a node dispatch like mixtures of its tokens (`Price.even_ranks`).

    Returns:
        The tokens. The entry of a rank's own node counts all tokens of the rank.
    """
    plans = layer_plans(plan, jnp.asarray(load)).visited(topology)
    tokens = jnp.asarray(tokens, jnp.float32)
    if even:
        tokens = jnp.broadcast_to(tokens.mean(-1, keepdims=True), tokens.shape)
    single, topology = topology.num_nodes == 1, topology.visited
    nodes, local = topology.num_nodes, topology.ranks_per_node
    tokens = tokens.reshape(-1, nodes, local)
    supply, served = _served(plans)
    if routes is None:
        share = _share_of_loads(supply, served, tokens.sum(-1), topology)
    else:
        share = _share_of_routes(routes, supply, served, topology, even=even, single=single)
    if even and single:  # the ranks dispatch like mixtures of all tokens
        share = jnp.broadcast_to(share.mean(2, keepdims=True), share.shape)
    stays = np.repeat(np.eye(nodes, dtype=bool), local, 0)[None, None]
    return jnp.where(stays, 1.0, share) * tokens.reshape(len(tokens), 1, nodes * local, 1)


def tokens_of_ranks(assignment: Assignment, lengths: Int[Array, " B"]) -> Float[jax.Array, "M N G"]:
    """Return the number of tokens on each rank.

    Args:
        assignment: the samples of each rank.
        lengths: the number of tokens of each sample.
    """
    sample = jnp.asarray(assignment.sample)
    lengths = jnp.append(jnp.asarray(lengths, jnp.float32), 0)
    return lengths[jnp.where(sample == EMPTY, len(lengths) - 1, sample)].sum(-1)


def _served(plans: LayerPlan) -> tuple[Float[jax.Array, "M L N E"], Float[jax.Array, "M L N E"]]:
    """Return the copies that each node has, and those that it serves."""
    served = jax.vmap(jax.vmap(node_quota))(plans)
    return jnp.asarray(plans.load, jnp.float32).sum(3), served.astype(jnp.float32)


def _share_of_loads(
    supply: Float[jax.Array, "M L N E"],
    served: Float[jax.Array, "M L N E"],
    tokens: Float[jax.Array, "M N"],
    topology: Topology,
) -> Float[jax.Array, "M L P V"]:
    """Estimate the share of tokens that visit each node: one minus that of the tokens of which no copy goes there.

    The experts of a token are a conditional Poisson sample (Hajek, 1964): independent choices, given their number. That
    they are distinct makes tokens visit more nodes than copies that are independent would.
    """
    top_k = jnp.round(supply[:, :1].sum() / jnp.maximum(tokens.sum(), 1)).astype(jnp.int32)
    top_k = jnp.clip(top_k, 1, MOST_EXPERTS)

    def one_micro_batch(inputs: tuple[jax.Array, ...]) -> Float[jax.Array, "L N N"]:
        supply, served, tokens = inputs
        own = jnp.minimum(supply, served)
        left, free = supply - own, served - own
        to_node = free / jnp.maximum(free.sum(1, keepdims=True), 1e-9)
        chance = jnp.clip(supply / jnp.maximum(tokens, 1e-9)[None, :, None], 0, MOST_CERTAIN)[:, :, None]
        # The probability that a copy of an expert does not go to a node.
        stays = 1 - (left / jnp.maximum(supply, 1e-9))[:, :, None] * to_node[:, None]
        all_stay, odds = jnp.ones_like(chance), chance / (1 - chance)
        for _ in range(CORRECTIONS):
            # The derivative by how much an expert counts is the probability that a token chooses it.
            chosen = jax.grad(lambda counts, odds: _log_chance(odds, counts, top_k).sum())(all_stay, odds)
            odds = odds * chance / jnp.maximum(chosen, 1e-9)
        return 1 - jnp.exp(_log_chance(odds, stays, top_k) - _log_chance(odds, all_stay, top_k))

    share = jnp.clip(jax.lax.map(one_micro_batch, (supply, served, tokens)), 0, 1)
    return jnp.repeat(share, topology.ranks_per_node, axis=2)


def _log_chance(
    odds: Float[jax.Array, "L N 1 E"], stays: Float[jax.Array, "L N T E"], top_k: Int[jax.Array, ""]
) -> Float[jax.Array, "L N T"]:
    """Return the logarithm of the probability that ``top_k`` experts are chosen and that the copies of all stay."""
    chance = odds / (1 + odds)

    def choose(number: jax.Array, expert: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        chance, stays = expert
        fewer = jnp.concatenate([jnp.zeros_like(number[:1]), number[:-1]])
        return number * (1 - chance)[None] + fewer * (chance * stays)[None], None

    none = jnp.zeros((MOST_EXPERTS + 1, *stays.shape[:-1]), jnp.float32).at[0].set(1)
    number, _ = jax.lax.scan(choose, none, (jnp.moveaxis(chance, -1, 0), jnp.moveaxis(stays, -1, 0)))
    return jnp.log(jnp.maximum(number[top_k], 1e-30))


def _share_of_routes(
    routes: PlacedRoutes,
    supply: Float[jax.Array, "M L N E"],
    served: Float[jax.Array, "M L N E"],
    topology: Topology,
    *,
    even: bool,
    single: bool,
) -> Float[jax.Array, "M L P V"]:
    nodes, local = topology.num_nodes, topology.ranks_per_node
    step = -(-len(routes.rank) // MOST_TOKENS)
    placed = jax.tree.map(lambda leaf: jnp.asarray(leaf)[::step], routes)
    supply, served = (jnp.moveaxis(each, 1, 0) for each in (supply, served))
    micro_batches, count = supply.shape[1], len(placed.rank)
    known = placed.micro_batch != EMPTY
    micro_batch, rank = (jnp.where(known, each, 0) for each in (placed.micro_batch, placed.rank))
    # Drawn, because routing may be periodic in the positions of tokens.
    level = jnp.asarray(np.random.default_rng(0).integers(LEVELS, size=count))
    bins = jnp.where(known, micro_batch * nodes * local + rank, micro_batches * nodes * local)
    number = jnp.zeros(micro_batches * nodes * local, jnp.float32).at[bins].add(1, mode="drop")

    def one_layer(inputs: tuple[jax.Array, ...]) -> jax.Array:
        supply, served, ids = inputs
        target = _targets(supply, served)  # [M N E levels]
        place = (micro_batch[:, None], rank[:, None] // local, ids.astype(jnp.int32), level[:, None])
        goes_to = target[place]  # [Q K]
        visits = [(goes_to == node).any(1) for node in range(nodes)]
        hits = jnp.stack(visits, 1).astype(jnp.float32)
        return jnp.zeros((len(number), nodes), jnp.float32).at[bins].add(hits, mode="drop")

    hits = jax.lax.map(one_layer, (supply, served, jnp.moveaxis(jnp.asarray(placed.expert_ids), 1, 0)))
    hits = hits.reshape(-1, micro_batches, nodes, local, nodes)
    number = number.reshape(micro_batches, nodes, local, 1)
    on_node, all_tokens = hits.sum(3, keepdims=True), number.sum(2, keepdims=True)[None]
    if single:  # a rank is a node: the mean is that of all ranks which send to another one
        others = 1 - np.eye(nodes, dtype=np.float32)[None, None, :, None]
        on_node, all_tokens = ((each * others).sum(2, keepdims=True) for each in (on_node, all_tokens))
    in_batch = on_node.sum(1, keepdims=True) / jnp.maximum(all_tokens.sum(1, keepdims=True), 1)
    mean = (on_node + in_batch) / (all_tokens + 1)
    share = (hits + NODE_WEIGHT * mean) / (number[None] + NODE_WEIGHT)
    share = jnp.broadcast_to(mean, hits.shape) if even else share
    return jnp.moveaxis(share.reshape(*hits.shape[:2], nodes * local, nodes), 0, 1)


def _targets(
    supply: Float[jax.Array, "M N E"], served: Float[jax.Array, "M N E"]
) -> Int[jax.Array, "M N E levels"]:
    """Return the node that serves the tokens of each node for each expert, in each of `LEVELS` equal parts of them."""
    own = jnp.minimum(supply, served)
    free = served - own
    until = jnp.cumsum(free, axis=1)  # over the nodes that serve
    at = (np.arange(LEVELS, dtype=np.float32) + 0.5)[None, None, None] / LEVELS * supply[..., None]
    beyond = at - own[..., None]
    left = jnp.maximum(supply - own, 1e-9)
    point = beyond / left[..., None] * until[:, -1:, :, None]
    target = (point[:, :, None] >= until[:, None, :, :, None]).sum(2)
    home = jnp.minimum(target, supply.shape[1] - 1)
    return jnp.where(beyond < 0, jnp.arange(supply.shape[1])[None, :, None, None], home).astype(jnp.int32)
