"""ForeMoE as a planner: a base placement for the batch, and whole experts moved in every micro-batch.

Source: arXiv 2606.11867; its planner's code is not public, so this is our reading of what is written about it.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.limits import check_not_negative
from relibra_jax.plan import contiguous_homes, expert_totals, inverse_permutation
from relibra_jax.plan_check import check_load
from relibra_jax.planning.baselines.kept_homes import summed_tops
from relibra_jax.planning.baselines.whole_moves import Spread, at_home_only, move_whole
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.types import EMPTY, Plan, Planner, Topology

OVERSHOOT: Final = 1.5
"""How many times its rank's excess over the mean an expert may be to be moved in a micro-batch; the source's."""
TOLERANCE: Final = 0.02
"""How far from the mean a rank has to be to give or take a base replica. The source's is not published."""
ROUNDS: Final = 4
"""How often the base placement goes over all experts. Of 1, 2 and 4, four was best in modelled time."""

type _Shared = tuple[jax.Array, jax.Array, jax.Array]  # replicas, rank loads, ranks seen
_MAX = np.int32(np.iinfo(np.int32).max)


class ForemoeState(NamedTuple):
    """What one batch leaves to the next."""

    home: Int[jax.Array, "L E"]
    """The homes of this batch, from which the next base placement starts."""


def foremoe(*, across_nodes: bool = True, least_gain: float = 0.1) -> Planner:
    """ForeMoE as a planner with homes that are fixed for a batch.

    Source: arXiv 2606.11867. A base placement is made once a batch from its mean loads, starting from the one before:
    experts of the ranks that are farthest from the mean move first, to the least loaded rank, where that is better;
    then each rank that is still too full shares its heaviest expert with a rank that has room, half to each. In each
    micro-batch experts move whole from the fullest rank to the emptiest. What differs here, and why:

    - A rank owns exactly H experts, so that a move of a home is an exchange: the expert of the least loaded rank comes
      back whose size leaves the fuller of the two ranks emptiest.
    - The base placement goes over all experts four times, by their ranks' distances from the mean before each time; the
      source's text goes over them once, which leaves much to be had where every move is an exchange.
    - Homes change in a layer only if its largest rank loads, summed over micro-batches, fall by ``least_gain``. The
      source moves whatever is better; here optimizer state moves with homes, and that takes time.
    - A home that moves for one micro-batch is a replica with the whole load; its optimizer state stays where it is.
    - Base replicas and moves share the replica slots. So moves are tried from the base with its replicas and without,
      and whatever leaves the fullest rank emptiest is taken: the base itself where moves do not help, as in the source,
      and homes alone where replicas do not.
    - Where the source gives a base replica to the first rank with room, it goes to the emptiest.

    Args:
        across_nodes: whether replicas may be on other nodes than homes. The source's transfers go through host memory
            and between devices of any nodes, beside compute. On recorded loads of 2 nodes, modelled time is about 1%
            less than if they stay inside, although the slow network delays some.
        least_gain: by which share of the summed largest rank loads of homes alone a layer's homes have to improve to
            change. 0.1 was best in modelled time on recorded loads, of 0, 0.05, 0.1, 0.15 and 0.2.

    Returns:
        A Planner whose state is a ForemoeState. It starts from Megatron-LM's contiguous placement.

    Raises:
        ValueError: if ``least_gain`` is negative.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[[[60, 50, 6, 4], [0, 0, 0, 0]]]], [[[[20, 10, 6, 70], [0, 0, 0, 0]]]]])
    >>> planner = foremoe()
    >>> plan, state = planner.update(load, planner.init(topology, 1), topology)
    >>> state.home.tolist(), plan.quota.sum(-1).tolist()
    ([[3, 1, 2, 0]], [[[[60, 60]]], [[[55, 51]]]])
    """
    check_not_negative("least_gain", least_gain)

    def init(topology: Topology, num_layers: int, *, key: jax.Array | None = None) -> ForemoeState:
        del key
        return ForemoeState(contiguous_homes(topology, num_layers))

    def update(load, state: ForemoeState, topology: Topology) -> tuple[Plan, ForemoeState]:
        check_load(load, topology)
        load = expert_totals(load)
        mean = _mean_load(load)
        exchanged = jax.vmap(functools.partial(_exchange_homes, num_ranks=topology.num_ranks))(
            mean, state.home
        )
        before, after = (summed_tops(load, home, topology) for home in (state.home, exchanged))
        gains = after < (1 - least_gain) * before
        home = jnp.where(gains[:, None], exchanged, state.home)
        rule = functools.partial(_adjust, replica_slots=topology.replica_slots)
        plan = plan_per_node(rule, load, mean[None], home, topology, across_nodes=across_nodes)
        return plan, ForemoeState(home)

    return Planner(init, update)


def _mean_load(load: Int[jax.Array, "M L E"]) -> Int[jax.Array, "L E"]:
    """The mean over micro-batches, rounded down; no sum on the way exceeds int32."""
    count = load.shape[0]
    return (load // count).sum(0, dtype=jnp.int32) + (load % count).sum(0, dtype=jnp.int32) // count


def _exchange_homes(
    mean: Int[jax.Array, " E"], home: Int[jax.Array, " E"], *, num_ranks: int
) -> Int[jax.Array, " E"]:
    """The base placement's homes: every expert in turn may change places with one of the least loaded rank."""
    room = mean.size // num_ranks
    slot_rank = jnp.arange(mean.size, dtype=jnp.int32) // room

    def by_slot(home: jax.Array) -> tuple[jax.Array, jax.Array]:
        slot_load = mean[inverse_permutation(home)]
        return slot_load, slot_load.reshape(num_ranks, room).sum(1, dtype=jnp.int32)

    def step(home: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        slot_load, load = by_slot(home)
        own = home[expert]
        rank, target = own // room, jnp.argmin(load).astype(jnp.int32)
        change = mean[expert] - slot_load
        helps = (slot_rank == target) & (change > 0) & (change < load[rank] - load[target])
        fuller = jnp.maximum(load[rank] - change, load[target] + change)
        partner = jnp.argmin(jnp.where(helps, fuller, _MAX)).astype(jnp.int32)
        exchanged = jnp.where(home == partner, own, jnp.where(home == own, partner, home))
        return jnp.where(helps.any(), exchanged, home), None

    def one_round(home: jax.Array, _: None) -> tuple[jax.Array, None]:
        load = by_slot(home)[1]
        from_mean = jnp.abs(load - load.sum(dtype=jnp.int32) // num_ranks)[home // room]
        return jax.lax.scan(step, home, jnp.argsort(-from_mean, stable=True))

    return jax.lax.scan(one_round, home, length=ROUNDS)[0]


def _adjust(
    load: Int[jax.Array, "P H"], mean: Int[jax.Array, "P H"], *, replica_slots: int
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """What one domain adds to its homes in one micro-batch."""
    alone = at_home_only(load, replica_slots)
    base = _halve(load, _base_replicas(mean, replica_slots)) if replica_slots else alone
    best = alone
    for start in (alone, base):
        moved = move_whole(start, jnp.ones(load.shape, bool), overshoot=OVERSHOOT)
        for option in (start, moved):
            better = option.rank_load().max() < best.rank_load().max()
            best = jax.tree.map(functools.partial(jnp.where, better), option, best)
    return merge_copies(best.replica, jnp.concatenate([best.at_home, best.tokens], 1))


def _base_replicas(mean: Int[jax.Array, "P H"], replica_slots: int) -> Int[jax.Array, "P R"]:
    """Replicas for the whole batch: ranks above the mean, heaviest first, share their heaviest expert."""
    ranks, homes = mean.shape
    rank, slot = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(replica_slots, dtype=jnp.int32)
    heaviest = jnp.argmax(mean, 1).astype(jnp.int32)
    ideal = (mean.sum(dtype=jnp.int32) // ranks).astype(jnp.float32)

    def share(carry: _Shared, _: None) -> tuple[_Shared, None]:
        replica, load, seen = carry
        used = (replica != EMPTY).sum(1, dtype=jnp.int32)
        giver = jnp.argmax(jnp.where(seen, -1, load))
        takes = (used < replica_slots) & (load.astype(jnp.float32) < (1 - TOLERANCE) * ideal)
        taker = jnp.argmin(jnp.where(takes, load, _MAX))
        half = mean[giver, heaviest[giver]] // 2
        gives = takes[taker] & (load[giver].astype(jnp.float32) > (1 + TOLERANCE) * ideal) & (half > 0)
        here = gives & (rank == taker)[:, None] & (slot[None] == used[:, None])
        replica = jnp.where(here, giver.astype(jnp.int32) * homes + heaviest[giver], replica)
        moved = jnp.where(gives, half, 0)
        load = load + jnp.where(rank == taker, moved, 0) - jnp.where(rank == giver, moved, 0)
        return (replica, load, seen | (rank == giver)), None

    empty = jnp.full((ranks, replica_slots), EMPTY, jnp.int32)
    start = (empty, mean.sum(1, dtype=jnp.int32), jnp.zeros(ranks, bool))
    return jax.lax.scan(share, start, length=ranks)[0][0]


def _halve(load: Int[jax.Array, "P H"], replica: Int[jax.Array, "P R"]) -> Spread:
    """Half of each replicated expert's tokens to its replica; no expert has two."""
    source = jnp.maximum(replica, 0)
    tokens = jnp.where(replica == EMPTY, 0, load.ravel()[source] // 2)
    given = jnp.zeros(load.size, jnp.int32).at[source].add(tokens)
    return Spread(load - given.reshape(load.shape), replica, tokens)
