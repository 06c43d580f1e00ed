"""PopFetcher (Zhang et al., USENIX ATC 2025) as a planner: a layer's hot experts are fetched before it is routed.

Every rank fetches experts for its own tokens alone, which then need not travel: tokens are pushed, or experts pulled.
No code is public. As published, in sections 4.2 and 5.1 to 5.3:

- *Popularity* (equations 1 to 3). The shares of a layer's experts follow from those of the layer below, over the last
  10 iterations, and from the probabilities that one expert follows another.
- *Price* (4 to 7). A rank that fetches an expert no longer sends its tokens for it, in four exchanges, but computes
  them, in three passes, and returns a gradient. Weights arrive beside attention and cost nothing. With B tokens, a
  width D, P parameters, and links and matrix products that take w and c seconds for a number or an operation:
  ``gain = 4 D B w - P w - 6 P B c``.
- *Pruning* (8 to 13). Experts without a gain are left out: all of them where links are fast, ``4 D w <= 6 P c``, and
  otherwise those with too few tokens (13). The most popular ones are fetched until memory is full (8), or until the
  time of attention is (9). This leaves at most top-k x ranks candidates, as the paper says; it gives no rule for that.

The choices of this implementation:

- An iteration is a micro-batch. Transitions are counted over the previous batch, not over 10 iterations.
- The price is that of the planner's request, where an exchanged row, a computed copy and a fetch have theirs. A
  gradient is the part of a fetch that sends no weights. If nothing is paid for links, popularity alone decides.
- In (6) a rank computes what it fetches on top of what it received before, although others fetch from it as well. So
  every rank decides for itself, and balance is no reason to fetch. The paper's rule (13) follows from this form.
- The cache of a machine (section 5.3.2), from which its ranks share an expert, is not built, nor are priorities of
  exchanges over sums of gradients (section 6): XLA orders them.

Homes do not move: they are contiguous, or packed once.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.plan import assemble_plan, contiguous_homes
from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Plan, Price, Topology
from relibra_jax.planning.baselines.eplb import pack_homes
from relibra_jax.planning.baselines.forecasts import plan_expected


@functools.cache
def popfetcher(*, packed: bool = False) -> Planner:
    """Make a planner from PopFetcher, in which ranks fetch the experts whose tokens would cost more to send.

    Source: PopFetcher (USENIX ATC 2025), a baseline of ReLibra (arXiv 2605.08639). Replicas of a layer are chosen from
    the true loads of the layer below, without those of the layer itself; see ``popularity`` in
    `relibra_jax.planning.baselines.forecasts.FORECASTS`. They may be on other nodes than their experts.

    Args:
        packed: whether to pack homes once, from the loads of the first batch, as a checkpoint could store them.
            Otherwise homes are contiguous.

    Returns:
        A Planner whose state is a PlacedState. Without ``transitions`` it expects the mean of the previous batch.

    >>> from relibra_jax import PlanRequest
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load, planner = jnp.array([[[[[80, 10, 6, 4], [70, 0, 0, 0]]]]]), popfetcher()
    >>> first, state = planner.update(PlanRequest(load), planner.init(topology, 1, key=jax.random.key(0)), topology)
    >>> second, state = planner.update(PlanRequest(load), state, topology)
    >>> first.quota.sum(-1).tolist(), second.quota.sum(-1).tolist()  # there is no forecast for the first batch
    ([[[[160, 10]]]], [[[[96, 74]]]])
    """

    def pack(for_homes, topology: Topology) -> Array:
        if packed:
            return pack_homes(
                for_homes, topology, num_groups=topology.num_experts, num_nodes=topology.num_nodes
            )
        return contiguous_homes(topology, len(for_homes))

    def fill(request: PlanRequest, expected, home, topology: Topology) -> Plan:
        own = jnp.asarray(request.load, jnp.int32)
        own = own.reshape(*own.shape[:2], topology.num_ranks, -1)  # [M L P E]
        seconds = jnp.full((len(own), topology.num_ranks), jnp.inf)
        if request.tokens is not None:
            tokens = jnp.asarray(request.tokens, jnp.float32).reshape(len(own), -1)
            seconds = jnp.asarray(request.price.token * tokens)
        rule = functools.partial(_prefetch, price=request.price, topology=topology)
        of_layers = jax.vmap(rule, (0, 0, 0, None))  # over layers, for the attention of a micro-batch
        replica, quota = jax.vmap(of_layers, (0, 0, None, 0))(own, expected, home, seconds)
        lead = (*own.shape[:2], topology.num_nodes, topology.ranks_per_node)
        return assemble_plan(home, replica.reshape(*lead, -1), quota.reshape(*lead, -1), topology)

    return plan_expected(pack, fill, loads="popularity", scope="micro_batch", keep_homes=True)


def _prefetch(
    own: Int[jax.Array, "P E"],
    expected: Float[jax.Array, " E"],
    home: Int[jax.Array, " E"],
    attention: Float[jax.Array, " P"],
    *,
    price: Price,
    topology: Topology,
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Choose the experts that every rank fetches in one layer of one micro-batch, and split the tokens.

    Args:
        own: the token copies of each expert, on the rank that dispatches their token.
        expected: the expected loads, of which only the proportions count.
        home: flat home slot of each expert.
        attention: the seconds of every rank that hide fetches.
        price: the price.
        topology: the expert-parallel group.
    """
    rank = jnp.arange(topology.num_ranks, dtype=jnp.int32)[:, None]
    home_rank = (home // topology.home_slots)[None]
    away = rank // topology.ranks_per_node != home_rank // topology.ranks_per_node
    row = jnp.where(away, price.crossing, price.spread)
    expert = jnp.where(away, price.fetch_across, price.fetch)
    popularity = expected / jnp.maximum(expected.sum(), 1)
    tokens = own.sum(1, keepdims=True, dtype=jnp.int32) * popularity[None]
    gain = tokens * (row - price.copy) - expert * (1 - price.weights_share)
    links_are_free = jnp.asarray(price.crossing + price.spread) == 0
    pays = (rank != home_rank) & jnp.where(links_are_free, tokens > 0, gain > 0)
    slots = min(topology.replica_slots, topology.num_experts)
    _, chosen = jax.lax.top_k(jnp.where(pays, popularity[None], -1.0), slots)
    fetched = jnp.take_along_axis(pays, chosen, 1)
    fetched &= jnp.cumsum(jnp.take_along_axis(expert, chosen, 1), 1) <= attention[:, None]
    copies = jnp.where(fetched, jnp.take_along_axis(own, chosen, 1), 0)
    taken = jnp.zeros(topology.num_experts, jnp.int32).at[chosen].add(copies)
    at_home = jnp.zeros(topology.num_experts, jnp.int32).at[home].set(own.sum(0, dtype=jnp.int32) - taken)
    quota = jnp.concatenate([at_home.reshape(topology.num_ranks, -1), copies], 1)
    return jnp.where(fetched, home[chosen], EMPTY), quota
