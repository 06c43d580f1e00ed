"""Simulated annealing that assigns samples to micro-batches and ranks.

The time of a batch, in units of a micro-batch's balanced compute, is

    mean_l sum_m max_n load[l, m, n]  +  sum_m max_rank attention  +  (N - 1) * mean_l sum_m lane[l, m],

where ``load`` is the load of nodes, ``attention`` is the time of samples in attention, and ``lane`` is the mean of
`relibra_jax.planning.lane_mean` over the tokens that each sender sends to each other node, times their price. A sender
is a rank, or a node whose ranks dispatch like mixtures of its tokens. The homes of experts are fixed, so loads and
lanes are sums over samples of table entries.

Each annealing step pairs micro-batches at random. Every pair draws one swap of a position of the first with one of a
few positions of the second, or no swap, with probability proportional to ``exp(-objective / temperature)``. Positions
belong to ranks and may be empty, so a swap can also be a move, and the budgets hold at every step.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.types import Topology
from relibra_jax.planning.annealing import anneal, cooling, draw_bits, integers, scaled_noise
from relibra_jax.planning.lane_mean import fourth_power, waited_rows

HOTTEST: Final = 1e-3
COLDEST: Final = 1e-4
"""The initial and final temperature, in units of a micro-batch's imbalance. Higher ones lose the given assignment, and
on recorded loads they lose balance."""
CANDIDATES: Final = 8
"""The number of swaps from which a pair of micro-batches chooses. 16 and 32 gained 0.1% of balance in 1.6 and 2.9 times
the time."""


class SampleProblem(NamedTuple):
    """The inputs of the sample search. The last row of tables over samples is an empty position, with zeros."""

    share: Float[jax.Array, "B+1 N*L"]
    """The load of each sample on each node; a layer's mean node load over the batch sums to 1 / L."""
    length: Int[jax.Array, " B+1"]
    """The number of tokens of each sample."""
    crossing: Float[jax.Array, "B+1 N N groups"]
    """The crossings of each sample times their price, by the node that holds it, the target node and layer group."""
    attention: Float[jax.Array, " B+1"]
    """The time of each sample in attention, on the rank that has it."""
    budget: Int[jax.Array, "2"]
    """The most tokens of a micro-batch and of a rank."""


class _Packing(NamedTuple):
    """The state of the search: rank r holds positions ``r * b .. (r + 1) * b - 1`` of its micro-batch."""

    sample: jax.Array
    """[M positions], the sample at each position; the number of samples if there is none."""
    load: jax.Array
    """[M N*L], the load of each node, as a share of the batch's mean."""
    tokens: jax.Array
    """[M ranks], the number of tokens of each rank."""
    attention: jax.Array
    """[M ranks], the time of each rank in attention."""
    lanes: jax.Array
    """[M senders N groups], the crossings that each sender sends to each node, by layer group, times their price."""


def search_samples(
    problem: SampleProblem,
    sample: Int[jax.Array, "M positions"],
    key: PRNGKeyArray,
    topology: Topology,
    *,
    senders: int,
    steps: int,
) -> Int[jax.Array, "M positions"]:
    """Search for the assignment of samples to positions that minimises the time of a batch.

    Source: sample packing (arXiv 2608.12146) searches for balance; the module docstring states our objective.

    Args:
        problem: the inputs of the search.
        sample: the sample at each position from which the search starts, within the budgets; B for none. Rank r holds
            the r-th run of positions.
        key: random key, consumed; the same key gives the same result.
        topology: the expert-parallel group.
        senders: the number of ranks, each of which has lanes of its own, or of nodes if the ranks of a node have equal
            lanes.
        steps: the number of annealing steps.

    Returns:
        The sample at each position, int32; micro-batches are in arbitrary order.
    """
    if len(sample) == 1:
        return sample  # samples are exchanged between micro-batches only
    return _anneal(problem, _packing(problem, sample, topology, senders), key, topology, steps).sample


def _packing(problem: SampleProblem, sample, topology: Topology, senders: int) -> _Packing:
    micro_batches, positions = sample.shape
    node = jnp.arange(positions) // (positions // topology.num_nodes)
    sends = problem.crossing[sample, node[None]]  # [M positions N groups]
    tokens = problem.length[sample].reshape(micro_batches, topology.num_ranks, -1)
    return _Packing(
        sample,
        problem.share[sample].sum(1),
        tokens.sum(-1, dtype=jnp.int32),
        problem.attention[sample].reshape(micro_batches, topology.num_ranks, -1).sum(-1),
        sends.reshape(micro_batches, senders, -1, *sends.shape[2:]).sum(2),
    )


def _anneal(problem: SampleProblem, packing: _Packing, key, topology: Topology, steps: int) -> _Packing:
    (micro_batches, positions), pairs = packing.sample.shape, len(packing.sample) // 2
    options = min(CANDIDATES, positions)
    bits = draw_bits(key, (steps, micro_batches), (2, steps), (steps, pairs, options + 1))
    order = jnp.argsort(bits[0], axis=-1)
    first_position = integers(bits[1][0], positions)
    second_position = integers(bits[1][1], positions - options + 1)
    # The objective is of all micro-batches together, and the temperature of one.
    noise = scaled_noise(bits[2].swapaxes(1, 2), cooling(HOTTEST, COLDEST, steps) / micro_batches)
    return anneal(
        packing,
        (order, first_position, second_position),
        noise,
        propose=functools.partial(_propose, problem, topology),
        apply=_apply,
    )


class _Swaps(NamedTuple):
    """The swaps of a sample of each pair's first micro-batch with samples of its second, and the changes they make."""

    pairing: _Packing
    """The micro-batches in pairs: every field has the leading axes ``[2 pairs]``."""
    rest: _Packing
    """The micro-batch without a partner, if their number is odd."""
    give: Int[jax.Array, "pairs 1"]
    take: Int[jax.Array, "pairs options"]
    rank: Int[jax.Array, "2 options"]
    load: Float[jax.Array, "2 pairs options N*L"]
    tokens: Int[jax.Array, "2 pairs options ranks"]
    attention: Float[jax.Array, "2 pairs options ranks"]
    crossing: Float[jax.Array, "2 pairs options N groups"]


def _propose(problem: SampleProblem, topology: Topology, packing: _Packing, draw):
    swaps = _draw_swaps(problem, topology, packing, draw)
    pairing = swaps.pairing

    def objective(load, attention, lanes):
        top = _largest(load.reshape(*load.shape[:-1], topology.num_nodes, -1), -2)
        # The barrier keeps the sum out of the fusion, in which XLA:CPU would not vectorise it.
        waits = jax.lax.optimization_barrier(jnp.concatenate([top, lanes], axis=-1))
        return (waits @ jnp.ones(waits.shape[-1], jnp.float32) + attention.max(-1)).sum(0)

    lanes, lanes_after = _lane_waits(pairing, swaps.rank, swaps.crossing)
    tokens_after = pairing.tokens[:, :, None] + swaps.tokens
    attention_after = pairing.attention[:, :, None] + swaps.attention
    swap_times = objective(pairing.load[:, :, None] + swaps.load, attention_after, lanes_after)
    budget = problem.budget
    within = (tokens_after.sum(-1) <= budget[0]) & (tokens_after.max(-1) <= budget[1])
    swap_times = jnp.where(within.all(0), swap_times, jnp.inf)
    stay_time = objective(pairing.load, pairing.attention, lanes)
    return jnp.concatenate([stay_time[:, None], swap_times], axis=1).T, swaps


def _draw_swaps(problem: SampleProblem, topology: Topology, packing: _Packing, draw) -> _Swaps:
    share, length, crossing, attention, _ = problem
    order, i, j = draw
    (micro_batches, positions), ranks = packing.sample.shape, packing.tokens.shape[1]
    samples_per_rank, pairs, options = positions // ranks, micro_batches // 2, min(CANDIDATES, positions)
    # The order of micro-batches does not matter, so they are shuffled, and the first half is paired with the second.
    packing = _Packing(*(x[order] for x in packing))
    pairing = _Packing(*(x[: 2 * pairs].reshape(2, pairs, *x.shape[1:]) for x in packing))
    give = jax.lax.dynamic_slice_in_dim(pairing.sample[0], i, 1, axis=1)
    take = jax.lax.dynamic_slice_in_dim(pairing.sample[1], j, options, axis=1)
    rank = jnp.stack([jnp.full(options, i), j + jnp.arange(options)]) // samples_per_rank
    gets = jnp.stack([take, jnp.broadcast_to(give, take.shape)])
    node = (rank // topology.ranks_per_node)[:, None]
    sign = jnp.array([1, -1], jnp.int32)
    on_rank = jax.nn.one_hot(rank, ranks, dtype=jnp.int32)[:, None]
    length_change = (length[take] - length[give])[None] * sign[:, None, None]
    time_change = (attention[take] - attention[give])[None] * sign[:, None, None].astype(jnp.float32)
    return _Swaps(
        pairing,
        _Packing(*(x[2 * pairs :] for x in packing)),
        give,
        take,
        rank,
        (share[take] - share[give])[None] * sign[:, None, None, None].astype(jnp.float32),
        length_change[..., None] * on_rank,
        time_change[..., None] * on_rank.astype(jnp.float32),
        crossing[gets, node] - crossing[gets[::-1], node],
    )


def _apply(packing: _Packing, draw, swaps: _Swaps, choice: Int[jax.Array, " pairs"]) -> _Packing:
    del packing
    _, i, j = draw
    pairing, give, take = swaps.pairing, swaps.give, swaps.take
    pairs, options = take.shape
    side, pair, option = jnp.arange(2)[:, None], jnp.arange(pairs), jnp.maximum(choice, 0)

    def select(change):
        """Return the change by the drawn option, ``[2 pairs ...]``; zeros if no swap was drawn."""
        return jnp.where((choice >= 0).reshape(-1, *[1] * (change.ndim - 3)), change[:, pair, option], 0)

    swapped = choice[:, None] == jnp.arange(options)[None]
    new_sample = give + jnp.where(swapped, take - give, 0).sum(1, keepdims=True, dtype=give.dtype)
    left = jnp.where(swapped, give, take)
    sample = jnp.stack(
        [
            jax.lax.dynamic_update_slice_in_dim(pairing.sample[0], new_sample, i, axis=1),
            jax.lax.dynamic_update_slice_in_dim(pairing.sample[1], left, j, axis=1),
        ]
    )
    crossing_change, rank = select(swaps.crossing), swaps.rank[:, option]
    new_pairs = _Packing(
        sample,
        pairing.load + select(swaps.load),
        pairing.tokens + select(swaps.tokens),
        pairing.attention + select(swaps.attention),
        pairing.lanes.at[side, pair[None], _sender(rank, pairing)].add(crossing_change),
    )
    pairs_and_rest = zip(new_pairs, swaps.rest, strict=True)
    return _Packing(*(jnp.concatenate([x.reshape(-1, *x.shape[2:]), rest]) for x, rest in pairs_and_rest))


def _lane_waits(pairing, rank, crossing_change):
    """Return the rows for which the exchanges of each layer group wait, before the swap and after each option."""
    senders, nodes = pairing.lanes.shape[2:4]
    old = jnp.take_along_axis(pairing.lanes, _sender(rank, pairing)[:, None, :, None, None], axis=2)

    def total(lanes):
        return _total(fourth_power(lanes), -2)

    before = total(pairing.lanes).sum(2)
    after = before[:, :, None] + total(old + crossing_change) - total(old)
    after = jnp.maximum(after, 0)  # where little is left, rounding may be more
    return (waited_rows(each, senders=senders, nodes=nodes) for each in (before, after))


def _sender(rank, packing):
    """Return the sender to which a rank belongs."""
    return rank // (packing.tokens.shape[-1] // packing.lanes.shape[-3])


def _largest(values, axis):
    """Return the maximum along a short axis, elementwise, because XLA:CPU's reduction takes many times as long."""
    return functools.reduce(jnp.maximum, jnp.unstack(values, axis=axis))


def _total(values, axis):
    """Return the sum along a short axis, elementwise for the same reason as `_largest`."""
    return functools.reduce(jnp.add, jnp.unstack(values, axis=axis))
