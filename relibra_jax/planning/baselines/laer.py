"""LAER-MoE's planner of expert layouts (ASPLOS'26, arXiv 2602.11686) as a planner with homes.

In every micro-batch several vectors of copy counts are tried. For each of them copies are placed, heaviest first, and
tokens are routed, to copies of their own node where it has any. The layout of the least modelled time is taken:

    sum over ranks of the time to send their token copies  +  time to compute the token copies of the fullest rank

in all passes: dispatch and combine forward and backward, compute three times, or four with a recompute.

Source: github.com/PKU-DAIR/Hetu-Galvatron, branch laer-moe, ``csrc/greedy_balancer.cpp``.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from relibra_jax.limits import check_integer
from relibra_jax.plan import assemble_plan, expert_totals, home_layout
from relibra_jax.plan_check import check_load
from relibra_jax.planning.baselines.kept_homes import KeptHomes, init_homes, kept_homes
from relibra_jax.planning.per_node import merge_copies
from relibra_jax.types import EMPTY, Array, Plan, Planner, Topology, UnitTimes

DEFAULT_COST: Final = UnitTimes(
    token=0.0, copy=4 * 1.484e-6, crossing=4 * 8192 / 88.95e9, spread=4 * 8192 / 216.27e9, move=0.0, push=0.0
)
"""The source's defaults: 1.484 us to compute a token copy in one pass, of four, and 88.95 and 216.27 GB/s between nodes
and inside them; for the width of 4096 in bfloat16 of the models that it was measured on."""

_MAX = np.int32(np.iinfo(np.int32).max)


def laer(*, perturbations: int = 32) -> Planner:
    """LAER-MoE as a planner with fixed homes; its replicas go to any node.

    Source: ASPLOS'26, arXiv 2602.11686, and its code. The candidates are: as many copies of every expert, if slots
    allow; one more copy for the largest load per copy, again and again (`copy_counts`); and both with a copy shifted
    from one expert to another. What differs here, and why:

    - The source shards every expert over all ranks (FSEP), so that each rank restores any experts in each micro-batch.
      Here homes are fixed: the first copy of an expert is at home, and only replica slots are laid out anew. Homes are
      packed once, from the first batch's loads, and kept, because FSEP moves none.
    - Loads are the true ones; the source lays out the next iteration from the loads of the last.
    - A rank holds an expert once. The source may put two copies on a rank, where one would do.
    - A layout whose fullest rank is fuller than with homes alone is not taken. The source's objective may take it for
      less communication.
    - Token copies are whole, and those of nodes without a copy are dealt out together.
    - The source can shift copies, but its training script asks for 0 shifts. 32 are better in modelled time by 0.4 to
      0.7% on recorded loads of 2 nodes with two slots and one.

    The time of bringing replicas is no part of the source's objective, for FSEP always restores as many.

    Args:
        perturbations: how many shifts of each vector of copy counts are tried, drawn once for all.

    Returns:
        A Planner whose state is a KeptHomes. Its update takes ``cost``, of which it weighs ``copy``, ``crossing`` and
        ``spread``; `DEFAULT_COST` where there is none.

    Raises:
        ValueError: if ``perturbations`` is not an integer of at least 0.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = laer().update(load, laer().init(topology, 1), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[49, 51]]]]
    """
    check_integer("perturbations", perturbations, least=0)

    def update(
        load, state: KeptHomes, topology: Topology, *, cost: UnitTimes | None = None
    ) -> tuple[Plan, KeptHomes]:
        check_load(load, topology)
        home = kept_homes(expert_totals(load), state, topology)
        experts = home_layout(home, topology).reshape(home.shape[0], -1)
        by_rank = jnp.asarray(load, jnp.int32).reshape(*load.shape[:2], topology.num_ranks, -1)
        by_slot = jax.vmap(lambda load, order: load[..., order], (1, 0), 1)(by_rank, experts)
        choose = functools.partial(
            _best_layout,
            cost=DEFAULT_COST if cost is None else cost,
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
    """How many copies each expert gets: again and again one more for the expert with the largest load per copy.

    Source: ``allocate_expert_replicas_precise``. If all experts fit on every node, each starts with a copy a node. An
    expert with a copy for every node gets one more for every node at once, or is done if so many are not left.

    Args:
        load: token copies of each expert; loads per copy are compared in float32, ties go to the lower index.
        topology: the expert-parallel group: E + P * R copies, at most one of an expert on each of its P ranks.

    Returns:
        Copies of each expert, at least 1; int32.

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
        count, left, growing = carry
        expert = index == jnp.argmax(jnp.where(growing, load / count, -1))
        more = jnp.where(count >= nodes, nodes, 1).astype(jnp.int32)
        grows = expert & (more <= left) & (count + more <= ranks)
        added = jnp.where(grows, more, 0)
        return count + added, left - added.sum(dtype=jnp.int32), growing & (grows | ~expert)

    count = jnp.full(experts, nodes if on_every_node else 1, jnp.int32)
    left = jnp.int32(free - on_every_node * (nodes - 1) * experts)
    start = (count, left, jnp.ones(experts, bool))
    return jax.lax.while_loop(lambda carry: (carry[1] > 0) & carry[2].any(), add, start)[0]


class _Layout(NamedTuple):
    """Where the copies of a layer are in a micro-batch, what they compute, and what that takes."""

    replica: Int[jax.Array, "P R"]
    quota: Int[jax.Array, "P S"]
    top: Int[jax.Array, ""]
    time: Float[jax.Array, ""]


def _best_layout(
    load: Int[jax.Array, "P E"], *, cost: UnitTimes, topology: Topology, perturbations: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """The layout of least time; experts are counted by home slot, ``load`` says where their tokens lie."""
    lay_out = functools.partial(_lay_out, load, cost=cost, topology=topology)
    layouts = jax.vmap(lay_out)(_candidates(load.sum(0, dtype=jnp.int32), topology, perturbations))
    chosen = jnp.argmin(jnp.where(layouts.top <= layouts.top[0], layouts.time, jnp.inf))
    return merge_copies(layouts.replica[chosen], layouts.quota[chosen])


def _candidates(load: Int[jax.Array, " E"], topology: Topology, perturbations: int) -> Int[jax.Array, "C E"]:
    """Vectors of copy counts, the first of homes alone."""
    experts, ranks, nodes = topology.num_experts, topology.num_ranks, topology.num_nodes
    alone = jnp.ones((1, experts), jnp.int32)
    free = ranks * topology.replica_slots
    if not free or ranks == 1:  # nothing to copy, or nowhere
        return alone
    counts = [copy_counts(load, topology)]
    if free % experts == 0:
        counts.append(jnp.full(experts, min(1 + free // experts, ranks), jnp.int32))
    rng = np.random.default_rng(0)
    drawn = [rng.choice(experts, 2, replace=False) for _ in range(perturbations)]
    pairs = jnp.asarray(np.reshape(drawn, (perturbations, 2)), jnp.int32)

    def shift(count: jax.Array, pair: jax.Array) -> jax.Array:
        giver, taker = pair
        whole = (count[giver] % nodes == 0) & (count[taker] % nodes == 0)
        amount = jnp.where(whole, nodes, 1).astype(jnp.int32)
        allowed = (count[giver] > amount) & (count[taker] + amount <= ranks)
        amount = jnp.where(allowed, amount, 0)
        return count.at[giver].add(-amount).at[taker].add(amount)

    shifted = [jax.vmap(shift, (None, 0))(count, pairs) for count in counts]
    return jnp.concatenate([alone, jnp.stack(counts), *shifted])


def _lay_out(
    load: Int[jax.Array, "P E"], count: Int[jax.Array, " E"], *, cost: UnitTimes, topology: Topology
) -> _Layout:
    replica, held = _place(load.sum(0, dtype=jnp.int32), count, topology)
    tokens = _route(load, held, topology)
    top = tokens.sum(1, dtype=jnp.int32).max()
    homes = jnp.arange(topology.num_experts, dtype=jnp.int32).reshape(topology.num_ranks, -1)
    slots = jnp.concatenate([homes, replica], 1)
    quota = jnp.where(slots == EMPTY, 0, jnp.take_along_axis(tokens, jnp.maximum(slots, 0), 1))

    near = jnp.repeat(_by_node(held, topology), topology.ranks_per_node, 0)
    crossing = jnp.where(near == 0, load, 0).sum(dtype=jnp.int32)
    own = jnp.where(held, load // jnp.maximum(near, 1), 0).sum(dtype=jnp.int32)
    inside = load.sum(dtype=jnp.int32) - crossing - own
    seconds = jnp.stack([jnp.asarray(unit, jnp.float32) for unit in (cost.crossing, cost.spread, cost.copy)])
    time = (seconds * jnp.stack([crossing, inside, top]).astype(jnp.float32)).sum()
    return _Layout(replica, quota, top, time)


def _by_node(values: Num[jax.Array, "P E"] | Bool[jax.Array, "P E"], topology: Topology) -> jax.Array:
    """Summed over the ranks of each node, int32 ``[N, E]``."""
    return values.reshape(topology.num_nodes, -1, values.shape[1]).sum(1, dtype=jnp.int32)


def _place(
    load: Int[jax.Array, " E"], count: Int[jax.Array, " E"], topology: Topology
) -> tuple[Int[jax.Array, "P R"], Bool[jax.Array, "P E"]]:
    """Copies beside the homes, heaviest first, to the nodes with fewest copies and there to the lightest rank."""
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
    wanted = jnp.arange(ranks * slots) < extra.sum()

    def put(carry: tuple[jax.Array, ...], item: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        replica, held, rank_load = carry
        chosen, wanted = item
        used = (replica != EMPTY).sum(1, dtype=jnp.int32)
        free = (used < slots) & ~held[:, chosen]
        copies = held[:, chosen].reshape(topology.num_nodes, -1).sum(1)
        fewest = free & jnp.repeat(copies == copies.min(), topology.ranks_per_node)
        open_ = jnp.where(fewest.any(), fewest, free)
        here = wanted & open_ & (rank == jnp.argmin(jnp.where(open_, rank_load, _MAX)))
        replica = jnp.where(here[:, None] & (jnp.arange(slots)[None] == used[:, None]), chosen, replica)
        held |= here[:, None] & (expert == chosen)[None]
        return (replica, held, rank_load + jnp.where(here, share[chosen], 0)), None

    start = (empty, at_home, share.reshape(ranks, -1).sum(1, dtype=jnp.int32))
    return jax.lax.scan(put, start, (items, wanted))[0][:2]


def _route(
    load: Int[jax.Array, "P E"], held: Bool[jax.Array, "P E"], topology: Topology
) -> Int[jax.Array, "P E"]:
    """Token copies that each rank computes of each expert: a node's evenly on its own copies, else on all copies."""
    by_node, copies = _by_node(load, topology), _by_node(held, topology)
    near = jax.vmap(_deal)(by_node, held.reshape(topology.num_nodes, -1, load.shape[1]))
    far = jnp.where(copies == 0, by_node, 0).sum(0, dtype=jnp.int32)
    return near.reshape(load.shape) + _deal(far, held)


def _deal(tokens: Int[jax.Array, " E"], held: Bool[jax.Array, "P E"]) -> Int[jax.Array, "P E"]:
    """Each expert's tokens evenly on the ranks that hold it, the first ones taking what is left over."""
    copies = held.sum(0, dtype=jnp.int32)
    each, rest = jnp.divmod(tokens, jnp.maximum(copies, 1))
    place = jnp.cumsum(held, 0, dtype=jnp.int32) - held
    return jnp.where(held, each[None] + (place < rest[None]), 0)
