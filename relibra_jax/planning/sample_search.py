"""Samples to micro-batches and ranks: the search.

What a batch costs, in units of a micro-batch's balanced compute, is

    mean_l sum_m max_n load[l, m, n]  +  attention * sum_m max_rank tokens
        +  mean_l sum_m max_rank max(sent, received)[l, m, rank],

where ``load`` is the load of nodes, and ``sent`` and ``received`` are what ranks exchange with other nodes, times its
price. The homes of experts are given, so all of it is a sum over samples, read from tables. In each step of a simulated
annealing micro-batches are paired at random, and every pair draws one swap of a position of the one with one of a few
positions of the other, or none, with probability proportional to ``exp(-objective / temperature)``. Positions belong to
ranks and may be empty, so budgets are exact at every step, and a swap may also be a move.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.planning.annealing import cooling
from relibra_jax.planning.draws import draw_bits, gumbel, integers
from relibra_jax.types import Topology

HOTTEST: Final = 3e-3
COLDEST: Final = 1e-4
"""Temperatures, in units of a micro-batch's imbalance. On recorded loads hotter or less cold ends lose balance, and
a start at 1e-3, though its nodes can be as even, leaves attention more uneven than the given order."""
REFINING: Final = 1e-3
"""Where annealing starts to refine an assignment."""
CANDIDATES: Final = 8
"""Swaps that a pair of micro-batches chooses from. 16 and 32 gained 0.1% of balance in 1.6 and 2.9 times the time."""


class SampleProblem(NamedTuple):
    """What the search weighs. The last row of tables of samples is an empty position: no load, no tokens."""

    share: Float[jax.Array, "B+1 N*L"]
    """The load of each sample in each node, so that a layer's mean node load over the batch sums to 1 / L."""
    length: Int[jax.Array, " B+1"]
    """Tokens."""
    crossing: Float[jax.Array, "B+1 N N groups"]
    """What each sample sends if it lies in a node, to each node, in groups of layers, times its price."""
    attention: Float[jax.Array, ""]
    """The price of a token of the rank that has most."""
    budget: Int[jax.Array, "2"]
    """The most tokens of a micro-batch and of a rank."""


class _Packing(NamedTuple):
    """Samples in position: rank r holds positions ``r * b .. (r + 1) * b - 1`` of its micro-batch."""

    sample: jax.Array
    """[M positions], the number of samples where there is none."""
    load: jax.Array
    """[M N*L], shares of the batch's mean."""
    tokens: jax.Array
    """[M ranks]"""
    sent: jax.Array
    """[M ranks groups], what each rank sends to other nodes, in groups of layers, times its price."""
    received: jax.Array
    """[M lanes N groups], what each node receives in each of its lanes, likewise."""


def search_samples(
    problem: SampleProblem,
    sample: Int[jax.Array, "M positions"],
    key: PRNGKeyArray,
    topology: Topology,
    *,
    hierarchical: bool,
    steps: int,
    hottest: Float[jax.Array, ""],
) -> Int[jax.Array, "M positions"]:
    """Search for the position of every sample in which a batch takes least time.

    Source: sample packing (arXiv 2608.12146) searches for balance; the file's docstring has our objective.

    Args:
        problem: what the search weighs.
        sample: the samples in position at the start, B for none; within the budgets. Rank r holds the r-th run of
            positions.
        key: random key, consumed; the same key gives the same result.
        topology: the expert-parallel group.
        hierarchical: whether tokens cross to the rank of the same index in the other node; else all ranks of a node
            receive as much.
        steps: annealing steps.
        hottest: the temperature of the first step.

    Returns:
        The samples in position, int32; micro-batches in any order.
    """
    if len(sample) == 1:
        return sample  # samples are exchanged between micro-batches only
    return _anneal(
        problem, _packing(problem, sample, topology, hierarchical), key, topology, steps, hottest
    ).sample


def _packing(problem: SampleProblem, sample, topology: Topology, hierarchical: bool) -> _Packing:
    micro_batches, positions = sample.shape
    nodes, local = topology.num_nodes, topology.ranks_per_node
    node = jnp.arange(positions) // (positions // nodes)
    sends = problem.crossing[sample, node[None]]  # [M positions N groups]
    sends = sends.reshape(micro_batches, nodes, local, -1, *sends.shape[2:]).sum(3)
    received = sends.sum(1)
    tokens = problem.length[sample].reshape(micro_batches, topology.num_ranks, -1)
    return _Packing(
        sample,
        problem.share[sample].sum(1),
        tokens.sum(-1, dtype=jnp.int32),
        sends.sum(3).reshape(micro_batches, topology.num_ranks, -1),
        received if hierarchical else received.mean(1, keepdims=True),
    )


def _anneal(
    problem: SampleProblem, packing: _Packing, key, topology: Topology, steps: int, hottest
) -> _Packing:
    share, length, crossing, attention, budget = problem
    (micro_batches, positions), ranks = packing.sample.shape, packing.tokens.shape[1]
    room, pairs, options = positions // ranks, micro_batches // 2, min(CANDIDATES, positions)
    bits = draw_bits(key, (steps, micro_batches), (2, steps), (steps, pairs, options + 1))
    order = jnp.argsort(bits[0], axis=-1)
    mine = integers(bits[1][0], positions)
    theirs = integers(bits[1][1], positions - options + 1)
    noise = gumbel(bits[2])
    side, pair = jnp.arange(2)[:, None], jnp.arange(pairs)
    sign = jnp.array([1, -1], jnp.int32)
    temperature = cooling(hottest, COLDEST, steps) / micro_batches

    def objective(load, tokens, busiest):
        top = _largest(load.reshape(*load.shape[:-1], topology.num_nodes, -1), -2)
        # The barrier keeps the sum out of the fusion, where XLA:CPU would not vectorise it.
        waits = jax.lax.optimization_barrier(jnp.concatenate([top, busiest], axis=-1))
        return (waits @ jnp.ones(waits.shape[-1], jnp.float32) + attention * tokens.max(-1)).sum(0)

    def step(packing, draw):
        order, i, j, temperature, noise = draw
        # Nothing depends on the order of micro-batches: shuffled, the first ones face those that follow.
        packing = _Packing(*(x[order] for x in packing))
        now = _Packing(*(x[: 2 * pairs].reshape(2, pairs, *x.shape[1:]) for x in packing))
        give = jax.lax.dynamic_slice_in_dim(now.sample[0], i, 1, axis=1)
        take = jax.lax.dynamic_slice_in_dim(now.sample[1], j, options, axis=1)
        rank = jnp.stack([jnp.full(options, i), j + jnp.arange(options)]) // room  # [sides options]
        gets = jnp.stack([take, jnp.broadcast_to(give, take.shape)])
        node = (rank // topology.ranks_per_node)[:, None]
        load = (share[take] - share[give])[None] * sign[:, None, None, None].astype(jnp.float32)
        longer = (length[take] - length[give])[None] * sign[:, None, None]
        tokens = longer[..., None] * jax.nn.one_hot(rank, ranks, dtype=jnp.int32)[:, None]
        more = crossing[gets, node] - crossing[gets[::-1], node]  # [sides pairs options N groups]
        busiest, busiest_after = _busiest(now, rank, more)

        tokens_after = now.tokens[:, :, None] + tokens
        after = objective(now.load[:, :, None] + load, tokens_after, busiest_after)
        within = (tokens_after.sum(-1) <= budget[0]) & (tokens_after.max(-1) <= budget[1])
        after = jnp.where(within.all(0), after, jnp.inf)
        before = objective(now.load, now.tokens, busiest)
        choice = jnp.argmin(jnp.concatenate([before[:, None], after], axis=1) - temperature * noise, axis=1)
        picked = jnp.maximum(choice - 1, 0)

        def chosen(change):
            """The change of the option that was drawn, ``[sides pairs ...]``; nothing where it is to stay."""
            return jnp.where((choice > 0).reshape(-1, *[1] * (change.ndim - 3)), change[:, pair, picked], 0)

        swapped = choice[:, None] == jnp.arange(1, options + 1)[None]
        got = give + jnp.where(swapped, take - give, 0).sum(1, keepdims=True, dtype=give.dtype)
        sample = jnp.stack(
            [
                jax.lax.dynamic_update_slice_in_dim(now.sample[0], got, i, axis=1),
                jax.lax.dynamic_update_slice_in_dim(now.sample[1], jnp.where(swapped, give, take), j, axis=1),
            ]
        )
        more = chosen(more)
        lane, shared = _lane(rank[:, picked], now)
        after = _Packing(
            sample,
            now.load + chosen(load),
            now.tokens + chosen(tokens),
            now.sent.at[side, pair[None], rank[:, picked]].add(_total(more, 2)),
            now.received.at[side, pair[None], lane].add(more / shared),
        )
        pairs_and_rest = zip(after, packing, strict=True)
        return _Packing(
            *(jnp.concatenate([x.reshape(-1, *x.shape[2:]), rest[2 * pairs :]]) for x, rest in pairs_and_rest)
        ), None

    return jax.lax.scan(step, packing, (order, mine, theirs, temperature, noise))[0]


def _busiest(now, rank, more):
    """What the busiest rank sends or receives, ``[sides pairs groups]``, and with ``more`` from ``rank``, by option."""
    lane, shared = _lane(rank, now)
    by_lane = _largest(now.received, 3)  # [sides pairs lanes groups]
    sent, received = (
        jnp.take_along_axis(x, y[:, None, :, None], axis=2) for x, y in ((now.sent, rank), (by_lane, lane))
    )
    at_nodes = jnp.take_along_axis(now.received, lane[:, None, :, None, None], axis=2)
    tops = _two_largest(now.sent), _two_largest(by_lane)
    before = jnp.maximum(tops[0][0], tops[1][0])
    others = jnp.maximum(_without(sent, *tops[0]), _without(received, *tops[1]))
    own = jnp.maximum(sent + _total(more, 3), _largest(at_nodes + more / shared, 3))
    return before, jnp.maximum(others, own)


def _without(own, first, second):
    """The largest of all but ``own``, which is one of those whose two largest are given."""
    return jnp.where(own == first[:, :, None], second[:, :, None], first[:, :, None])


def _lane(rank, packing):
    """The lane in which nodes receive what a rank sends, and how many ranks share a lane."""
    nodes, lanes = packing.received.shape[-2], packing.received.shape[-3]
    local = packing.tokens.shape[-1] // nodes
    return rank % local % lanes, local // lanes


def _largest(values, axis):
    """The largest along a short axis, elementwise, as XLA:CPU's reduction takes many times as long."""
    return functools.reduce(jnp.maximum, jnp.unstack(values, axis=axis))


def _total(values, axis):
    """The sum along a short axis, likewise."""
    return functools.reduce(jnp.add, jnp.unstack(values, axis=axis))


def _two_largest(values):
    """The largest and the second largest of ``[sides pairs ranks groups]`` over ranks, in one pass."""

    def larger(a, b):
        return jnp.maximum(a[0], b[0]), jnp.maximum(jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]))

    least = jnp.full_like(values, -jnp.inf)
    return jax.lax.reduce((values, least), (jnp.float32(-jnp.inf),) * 2, larger, (2,))
