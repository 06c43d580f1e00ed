"""LAER-MoE's expert layouts (ASPLOS'26, arXiv 2602.11686), as a planner with homes.

In every micro-batch the planner tries several vectors of copy counts. For each of them it places the copies, heaviest
first, and routes the tokens, to copies in their own node if it has any. It takes the layout with the least modelled
time:

    sum over ranks of the time to send their token copies  +  time to compute the token copies of the fullest rank

over all passes: dispatch and combine in the forward and backward pass, and compute three times, or four with a
recompute.

Source: github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe, ``csrc/greedy_balancer.cpp``.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from relibra_jax.contract.plan import assemble_plan, home_layout
from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Plan, Price, Topology
from relibra_jax.planning.baselines.kept_homes import KeptHomes, init_homes, kept_homes
from relibra_jax.planning.compiled_update import compiled_update
from relibra_jax.planning.per_node import merge_copies
from relibra_jax.support.limits import INT32_MAX, check_integer


@functools.cache
def laer(*, perturbations: int = 32) -> Planner:
    """Make a planner from LAER-MoE, with fixed homes and with replicas on any node.

    Source: ASPLOS'26, arXiv 2602.11686, and its code. The candidate vectors are: the same number of copies for every
    expert, if the slots allow; copies added one by one to the expert with the largest load per copy (`copy_counts`);
    and both with a copy shifted from one expert to another. Differences from the source, and the reasons:

    - The source shards every expert over all ranks (FSEP), so each rank can restore any experts in each micro-batch.
      Here homes are fixed: the first copy of an expert is at home, and only the contents of replica slots change. Homes
      are packed once, from the first batch's loads, and kept, because FSEP moves none.
    - Loads are the true ones. The source lays out the next iteration from the loads of the last one.
    - A rank holds an expert at most once. The source may put two copies on one rank, which is never useful.
    - A layout whose fullest rank has more load than with homes alone is rejected. The source's objective may accept it
      to save communication.
    - Token copies are integers, and those of all nodes without a copy are distributed together.
    - The source can shift copies, but its training script uses 0 shifts. With 32 the modelled time of recorded loads
      on 2 nodes, with two slots and with one, is 0.4 to 0.7% shorter.

    As in the source, the objective leaves out the time of fetching replicas, because FSEP always restores the same
    number.

    Args:
        perturbations: the number of shifts tried for each vector of copy counts. The shifts are drawn once and are the
            same in every layer and micro-batch.

    Returns:
        A Planner whose state is a KeptHomes. Of the price, its ``update`` uses ``copy``, ``crossing`` and ``spread``.

    Raises:
        ValueError: if ``perturbations`` is not an integer of at least 0.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = laer().update(PlanRequest(load), laer().init(topology, 1), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[49, 51]]]]
    """
    check_integer("perturbations", perturbations, least=0)

    @compiled_update
    def update(request: PlanRequest, state: KeptHomes, topology: Topology) -> tuple[Plan, KeptHomes]:
        load = request.load
        home = kept_homes(request.by_expert, state, topology)
        experts = home_layout(home, topology).reshape(home.shape[0], -1)
        by_rank = jnp.asarray(load, jnp.int32).reshape(*load.shape[:2], topology.num_ranks, -1)
        by_slot = jax.vmap(lambda load, order: load[..., order], (1, 0), 1)(by_rank, experts)
        choose = functools.partial(
            _best_layout,
            price=request.price,
            topology=topology,
            perturbations=perturbations,
        )
        replica, quota = jax.vmap(jax.vmap(choose))(by_slot)
        ranks = (*load.shape[:2], topology.num_nodes, topology.ranks_per_node)
        plan = assemble_plan(
            home, replica.reshape(*ranks, replica.shape[-1]), quota.reshape(*ranks, quota.shape[-1]), topology
        )
        return plan, KeptHomes(home)

    return Planner(init_homes, update)


def copy_counts(load: Num[Array, " E"], topology: Topology) -> Int[jax.Array, " E"]:
    """Choose the number of copies of each expert, adding copies to the expert with the largest load per copy.

    Source: ``allocate_expert_replicas_precise``. If all experts fit on every node, each starts with one copy per node.
    An expert that has a copy for every node gets one more for every node at once, or none if too few are left.

    Args:
        load: the number of token copies for each expert. Loads per copy are compared in float32; ties go to the lower
            index.
        topology: the expert-parallel group, which has room for E + P * R copies, at most one of an expert on each of
            its P ranks.

    Returns:
        The number of copies of each expert, at least 1; int32.

    >>> topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> copy_counts(jnp.array([90, 30, 10, 8]), topology).tolist()
    [2, 2, 2, 2]
    >>> copy_counts(jnp.array([90, 30, 10, 8, 0, 0, 0, 0]), Topology(**{**vars(topology), "num_experts": 8})).tolist()
    [4, 2, 1, 1, 1, 1, 1, 1]
    """
    experts, nodes, ranks = topology.num_experts, topology.num_nodes, topology.num_ranks
    load, index = jnp.asarray(load, jnp.float32), jnp.arange(experts, dtype=jnp.int32)
    free = ranks * topology.replica_slots
    on_every_node = (nodes - 1) * experts <= free

    def add(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        count, remaining, growing = carry
        expert = index == jnp.argmax(jnp.where(growing, load / count, -1))
        step = jnp.where(count >= nodes, nodes, 1).astype(jnp.int32)
        grows = expert & (step <= remaining) & (count + step <= ranks)
        added = jnp.where(grows, step, 0)
        return count + added, remaining - added.sum(dtype=jnp.int32), growing & (grows | ~expert)

    count = jnp.full(experts, nodes if on_every_node else 1, jnp.int32)
    remaining = jnp.int32(free - on_every_node * (nodes - 1) * experts)
    start = (count, remaining, jnp.ones(experts, bool))
    return jax.lax.while_loop(lambda carry: (carry[1] > 0) & carry[2].any(), add, start)[0]


class _Layout(NamedTuple):
    """The layout of one layer in one micro-batch."""

    replica: Int[jax.Array, "P R"]
    """The expert in each replica slot, by home slot; EMPTY for none."""
    quota: Int[jax.Array, "P S"]
    """Token copies that each slot computes."""
    top: Int[jax.Array, ""]
    """The largest rank load, in token copies."""
    time: Float[jax.Array, ""]
    """The modelled time, in seconds."""


def _best_layout(
    load: Int[jax.Array, "P E"], *, price: Price, topology: Topology, perturbations: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Choose the layout of least time; experts are numbered by home slot, ``load`` by the rank of the tokens."""
    lay_out = functools.partial(_lay_out, load, price=price, topology=topology)
    layouts = jax.vmap(lay_out)(_candidates(load.sum(0, dtype=jnp.int32), topology, perturbations))
    chosen = jnp.argmin(jnp.where(layouts.top <= layouts.top[0], layouts.time, jnp.inf))
    return merge_copies(layouts.replica[chosen], layouts.quota[chosen])


def _candidates(load: Int[jax.Array, " E"], topology: Topology, perturbations: int) -> Int[jax.Array, "C E"]:
    """Make the candidate vectors of copy counts; the first one has homes alone."""
    experts, ranks, nodes = topology.num_experts, topology.num_ranks, topology.num_nodes
    home_counts = jnp.ones((1, experts), jnp.int32)
    free = ranks * topology.replica_slots
    if not free or ranks == 1:  # no replica slots, or no other rank
        return home_counts
    counts = [copy_counts(load, topology)]
    if free % experts == 0:
        counts.append(jnp.full(experts, min(1 + free // experts, ranks), jnp.int32))
    rng = np.random.default_rng(0)
    draws = [rng.choice(experts, 2, replace=False) for _ in range(perturbations)]
    pairs = jnp.asarray(np.reshape(draws, (perturbations, 2)), jnp.int32)

    def shift(count: jax.Array, pair: jax.Array) -> jax.Array:
        giver, taker = pair
        whole = (count[giver] % nodes == 0) & (count[taker] % nodes == 0)
        amount = jnp.where(whole, nodes, 1).astype(jnp.int32)
        allowed = (count[giver] > amount) & (count[taker] + amount <= ranks)
        amount = jnp.where(allowed, amount, 0)
        return count.at[giver].add(-amount).at[taker].add(amount)

    perturbed = [jax.vmap(shift, (None, 0))(count, pairs) for count in counts]
    return jnp.concatenate([home_counts, jnp.stack(counts), *perturbed])


def _lay_out(
    load: Int[jax.Array, "P E"], count: Int[jax.Array, " E"], *, price: Price, topology: Topology
) -> _Layout:
    replica, holds = _place(load.sum(0, dtype=jnp.int32), count, topology)
    tokens = _route(load, holds, topology)
    top = tokens.sum(1, dtype=jnp.int32).max()
    homes = jnp.arange(topology.num_experts, dtype=jnp.int32).reshape(topology.num_ranks, -1)
    slots = jnp.concatenate([homes, replica], 1)
    quota = jnp.where(slots == EMPTY, 0, jnp.take_along_axis(tokens, jnp.maximum(slots, 0), 1))

    local_copies = jnp.repeat(_by_node(holds, topology), topology.ranks_per_node, 0)
    crossing = jnp.where(local_copies == 0, load, 0).sum(dtype=jnp.int32)
    local = jnp.where(holds, load // jnp.maximum(local_copies, 1), 0).sum(dtype=jnp.int32)
    inside = load.sum(dtype=jnp.int32) - crossing - local
    seconds = jnp.stack(
        [jnp.asarray(unit, jnp.float32) for unit in (price.crossing, price.spread, price.copy)]
    )
    time = (seconds * jnp.stack([crossing, inside, top]).astype(jnp.float32)).sum()
    return _Layout(replica, quota, top, time)


def _by_node(values: Num[jax.Array, "P E"] | Bool[jax.Array, "P E"], topology: Topology) -> jax.Array:
    """Sum over the ranks of each node, int32 ``[N, E]``."""
    return values.reshape(topology.num_nodes, -1, values.shape[1]).sum(1, dtype=jnp.int32)


def _place(
    load: Int[jax.Array, " E"], count: Int[jax.Array, " E"], topology: Topology
) -> tuple[Int[jax.Array, "P R"], Bool[jax.Array, "P E"]]:
    """Place copies, heaviest first, on the node with the fewest copies of the expert and there on the lightest rank."""
    ranks, slots, experts = topology.num_ranks, topology.replica_slots, topology.num_experts
    rank, expert = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(experts, dtype=jnp.int32)
    at_home = rank[:, None] == (expert // topology.home_slots)[None]
    empty = jnp.full((ranks, slots), EMPTY, jnp.int32)
    if not slots:
        return empty, at_home
    share = load // count
    heaviest = jnp.argsort(-share, stable=True).astype(jnp.int32)
    extra = count[heaviest] - 1
    items = jnp.repeat(heaviest, extra, total_repeat_length=ranks * slots)
    is_copy = jnp.arange(ranks * slots) < extra.sum()

    def put(carry: tuple[jax.Array, ...], item: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        replica, holds, rank_load = carry
        copied_expert, is_copy = item
        used_slots = (replica != EMPTY).sum(1, dtype=jnp.int32)
        free = (used_slots < slots) & ~holds[:, copied_expert]
        copies = holds[:, copied_expert].reshape(topology.num_nodes, -1).sum(1)
        fewest = free & jnp.repeat(copies == copies.min(), topology.ranks_per_node)
        candidates = jnp.where(fewest.any(), fewest, free)
        takes = is_copy & candidates & (rank == jnp.argmin(jnp.where(candidates, rank_load, INT32_MAX)))
        replica = jnp.where(
            takes[:, None] & (jnp.arange(slots)[None] == used_slots[:, None]), copied_expert, replica
        )
        holds |= takes[:, None] & (expert == copied_expert)[None]
        return (replica, holds, rank_load + jnp.where(takes, share[copied_expert], 0)), None

    start = (empty, at_home, share.reshape(ranks, -1).sum(1, dtype=jnp.int32))
    return jax.lax.scan(put, start, (items, is_copy))[0][:2]


def _route(
    load: Int[jax.Array, "P E"], holds: Bool[jax.Array, "P E"], topology: Topology
) -> Int[jax.Array, "P E"]:
    """Split the tokens of a node evenly over its own copies of their expert, or over all copies if it has none."""
    by_node, copies = _by_node(load, topology), _by_node(holds, topology)
    local_tokens = jax.vmap(_split_over_holders)(
        by_node, holds.reshape(topology.num_nodes, -1, load.shape[1])
    )
    remote_load = jnp.where(copies == 0, by_node, 0).sum(0, dtype=jnp.int32)
    return local_tokens.reshape(load.shape) + _split_over_holders(remote_load, holds)


def _split_over_holders(tokens: Int[jax.Array, " E"], holds: Bool[jax.Array, "P E"]) -> Int[jax.Array, "P E"]:
    """Split each expert's tokens evenly over the ranks that hold it; the first ranks take the remainder."""
    copies = holds.sum(0, dtype=jnp.int32)
    quotient, remainder = jnp.divmod(tokens, jnp.maximum(copies, 1))
    place = jnp.cumsum(holds, 0, dtype=jnp.int32) - holds
    return jnp.where(holds, quotient[None] + (place < remainder[None]), 0)
