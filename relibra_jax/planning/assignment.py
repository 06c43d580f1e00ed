"""Assign the samples of a batch to micro-batches and ranks.

If the loss is a sum over tokens divided by a count of the whole batch, the gradient does not depend on which sample is
in which micro-batch (sample packing, arXiv 2608.12146). The time of a step does depend on it. For given homes, a sample
is a vector of node loads ``v[l, n]``, as shares of its layer's mean, and we

    minimise  mean_l sum_m max_n sum_{samples of m} v[l, n]  +  sum_m max_rank (attention of its samples)
              +  crossing * (N - 1) * mean_l sum_m (lane between nodes),

the imbalance of the nodes over the batch, the time of attention, and that of crossings between nodes, all in units of
balanced compute. A lane is a mean of the tokens that each rank sends to each other node
(`relibra_jax.planning.lane_mean`), or that each node sends, if its ranks have equal lanes. No micro-batch and no rank
exceeds its budget of tokens. The number of crossings of a sample depends only on its node, so it is computed once, as a
table over nodes; with many layers and ranks, one table entry sums neighbouring layers. Simulated annealing improves a
given assignment (`relibra_jax.planning.sample_search`). Finally the ranks of each micro-batch are exchanged if that
lowers the total number of crossings, and micro-batches are ordered so that data-parallel groups take equally long in
attention.
"""

import functools
from typing import Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.planner import Placement
from relibra_jax.contract.types import BALANCE, EMPTY, Array, Assignment, Price, Topology, check_shape
from relibra_jax.cost.step_time import sample_attention
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.packing import pack_evenly
from relibra_jax.planning.sample_crossings import crossings_by_node
from relibra_jax.planning.sample_packing import check_micro_batches
from relibra_jax.planning.sample_search import SampleProblem, search_samples
from relibra_jax.support.argument_types import checks_arguments

MAX_COUNTERS: Final = 1024
"""The most lanes that the search counts per micro-batch, one for each sender, node and group of layers."""


@checks_arguments
def assign_in_order(num_samples: int, topology: Topology, *, num_micro_batches: int) -> Assignment:
    """Assign samples in their given order: contiguous runs to micro-batches, and within each of them to flat ranks.

    Args:
        num_samples: B, the number of samples in the batch. The runs differ by at most one sample.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.

    Returns:
        An Assignment of int32; shorter runs end in EMPTY.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1 or above the number of samples.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> assign_in_order(5, topology, num_micro_batches=2).sample.tolist()
    [[[[0, 1], [2, -1]]], [[[3, -1], [4, -1]]]]
    """
    check_micro_batches(num_samples, num_micro_batches)
    ranks = topology.num_ranks
    per_rank = -(-num_samples // (num_micro_batches * ranks))
    sample = np.full((num_micro_batches, ranks, per_rank), EMPTY, np.int32)
    for micro_batch, samples in enumerate(np.array_split(np.arange(num_samples), num_micro_batches)):
        for rank, run in enumerate(np.array_split(samples, ranks)):
            sample[micro_batch, rank, : run.size] = run
    return Assignment(
        sample.reshape(num_micro_batches, topology.num_nodes, topology.ranks_per_node, per_rank)
    )


def with_positions(assignment: Assignment, positions: int) -> Assignment:
    """Return an assignment with empty positions added to every rank, as an array of the same kind.

    Args:
        assignment: the assignment.
        positions: b, the number of positions of a rank, at least as many as there are.

    >>> with_positions(Assignment(np.array([[[[0], [1]]]])), 2).sample.tolist()
    [[[[0, -1], [1, -1]]]]
    """
    sample = assignment.sample
    pad = jnp.pad if isinstance(sample, jax.Array) else np.pad
    missing = ((0, 0),) * 3 + ((0, positions - sample.shape[-1]),)
    return Assignment(pad(sample, missing, constant_values=EMPTY))


def order_for_groups(seconds: Float[Array, " M"], groups: int) -> Int[jax.Array, " M"]:
    """Order micro-batches so that data-parallel groups, which have equally many in turn, take equally long.

    Args:
        seconds: the time of each micro-batch that depends on its samples.
        groups: the number of data-parallel groups.

    Returns:
        The index of each micro-batch in the old order. The old order if that is within 0.1% of the new one, or if
        micro-batches do not divide over the groups.

    >>> order_for_groups(jnp.array([9.0, 8.0, 2.0, 1.0]), 2).tolist()
    [0, 3, 1, 2]
    """
    seconds, micro_batches = jnp.asarray(seconds, jnp.float32), len(seconds)
    order = jnp.arange(micro_batches)
    if groups == 1 or micro_batches % groups:
        return order
    group, position = pack_evenly(seconds, groups)
    new_order = jnp.argsort(group * (micro_batches // groups) + position)
    before, after = (seconds[each].reshape(groups, -1).sum(1).max() for each in (order, new_order))
    return jnp.where(after < 0.999 * before, new_order, order)


def nodes_as_ranks(
    placement: Placement, topology: Topology, assignment: Assignment
) -> tuple[Placement, Topology, Assignment]:
    """Return a placement, topology and assignment in which every node is a single rank.

    Samples are assigned to them if the local ranks share the samples of their node
    (`relibra_jax.routing.node_streams`). Replicas are left out, which do not matter to the assignment.

    Args:
        placement: the homes and residents.
        topology: the expert-parallel group.
        assignment: the samples of each rank.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> placement = Placement.without_residents(jnp.array([[0, 1]]), topology)
    >>> nodes_as_ranks(placement, topology, Assignment(jnp.array([[[[0], [1]]]])))[2].sample.tolist()
    [[[[0, 1]]]]
    """
    nodes, local = topology.num_nodes, topology.ranks_per_node
    merged = Topology(
        num_nodes=nodes,
        ranks_per_node=1,
        num_experts=topology.num_experts,
        replica_slots=0,
        resident_slots=local * topology.resident_slots,
    )
    resident = jnp.asarray(placement.resident)
    placement = placement._replace(resident=resident.reshape(len(resident), nodes, 1, -1))
    sample = jnp.asarray(assignment.sample)
    return placement, merged, Assignment(sample.reshape(len(sample), nodes, 1, -1))


@runtime_checkable
class Assign(Protocol):
    """Assign the samples of a batch, or of one stage of it, to the positions of ``start``.

    ``start`` has all samples, and is the result of the round before. The function must be hashable, and the same object
    from batch to batch, or every batch compiles again. ``key`` is None if the caller of `plan_batch` gave none. If
    sequences are split, each node is a single rank of the topology (`nodes_as_ranks`).
    """

    def __call__(
        self,
        batch: Batch,
        placement: Placement,
        topology: Topology,
        *,
        start: Assignment,
        price: Price,
        key: PRNGKeyArray | None,
    ) -> Assignment: ...


@checks_arguments
@functools.partial(jax.jit, static_argnames=("topology", "token_budget", "steps"))
def assign_samples(
    batch: Batch,
    placement: Placement,
    topology: Topology,
    *,
    start: Assignment,
    price: Price = BALANCE,
    key: PRNGKeyArray | None,
    token_budget: float | None = None,
    steps: int | None = None,
) -> Assignment:
    """Choose a micro-batch and a rank for every sample so that the batch takes the least time.

    Source: sample packing (arXiv 2608.12146) and ReLibra's sample locality; the module docstring states the objective.

    The token budget of a micro-batch or a rank is ``token_budget`` times the mean, but at least the longest sample and
    at least what ``start`` needs. It is never exceeded.

    Args:
        batch: the samples. With routes and a price of hierarchical dispatch, crossings are distinct tokens per node;
            otherwise they are token copies.
        placement: the homes of experts, and the residents; tokens of a resident's node do not cross for it.
        topology: the expert-parallel group.
        start: the assignment of all samples from which the search starts, for example from `pack_samples`. More
            positions than samples give the search more freedom to even out tokens.
        price: the price of attention and of crossings, relative to that of a token copy.
        key: random key, required; the same key gives the same assignment.
        token_budget: the most tokens of a micro-batch or a rank, as a multiple of the mean; at least 1. None takes 1.05
            for micro-batches and 1 for ranks: all sequences are as long as that of the fullest rank, and with 1.05 for
            ranks, too, and four samples on each, a modelled batch took 0.3 to 0.5% longer.
        steps: the number of annealing steps; 100,000 is thorough. None takes one step per sixteen pairs of samples, at
            least 100 and at most 2,000, because placement and assignment alternate.

    Returns:
        An Assignment of int32; the samples of a rank are in ascending order, EMPTY comes last.

    Raises:
        ValueError: if the shapes disagree, if there are fewer positions than samples, if there is no key, or if
            ``token_budget`` or ``steps`` is below 1.

    >>> from relibra_jax import pack_samples
    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> batch = Batch(jnp.array([[[8, 0]], [[8, 0]], [[0, 8]], [[0, 8]]]), jnp.array([8, 8, 8, 8]))
    >>> placement = Placement.without_residents(jnp.array([[0, 1]]), topology)
    >>> start = pack_samples(batch.lengths, topology, num_micro_batches=2)
    >>> sample = assign_samples(batch, placement, topology, start=start, key=jax.random.key(0), steps=50).sample
    >>> (sample // 2)[..., 0].tolist()  # one sample of each kind in each micro-batch
    [[[0], [1]], [[0], [1]]]
    """
    samples, layers = batch.sample_load.shape[:2]
    nodes, ranks = topology.num_nodes, topology.num_ranks
    _check(batch, placement, topology, start, token_budget=token_budget, steps=steps)
    if key is None:
        raise ValueError("assign_samples needs a random key: plan_batch(..., key=jax.random.key(0))")
    if steps is None:
        steps = max(min(max(samples**2 // 4, 100), 8_000) // 4, 100)

    lengths = jnp.asarray(batch.lengths)
    total = jnp.maximum(lengths.sum(dtype=jnp.float32), 1)
    load = batch.sample_load.sum(dtype=jnp.float32)
    compute = jnp.float32(price.copy) * load / (layers * total)  # of a token
    attention = sample_attention(jnp.asarray(lengths, jnp.float32), price) / compute
    crossing_price = jnp.float32(price.crossing) / compute
    senders = nodes if price.even_ranks else ranks
    groups = min(layers, max(1, MAX_COUNTERS // (senders * nodes)))
    crossing = crossings_by_node(batch, placement, topology, hierarchical=price.hierarchical, groups=groups)
    length = jnp.append(jnp.asarray(lengths, jnp.int32), 0)
    micro_batches, *_, samples_per_rank = start.sample.shape
    sample = jnp.asarray(start.sample, jnp.int32).reshape(micro_batches, -1)
    sample = jnp.where(sample == EMPTY, samples, sample)
    problem = SampleProblem(
        jnp.pad(_node_share(batch.sample_load, placement.home, nodes), ((0, 1), (0, 0))),
        length,
        jnp.pad(crossing, ((0, 1), *[(0, 0)] * 3)) * (crossing_price * senders / total),
        jnp.append(attention, 0) * (ranks / total),
        _budgets(length, sample, ranks, token_budget),
    )
    sample = search_samples(problem, sample, key, topology, senders=senders, steps=steps)
    sample = sample.reshape(micro_batches, ranks, samples_per_rank)
    sample = _exchange_ranks(sample, problem.crossing.sum((2, 3)), topology)
    waits = problem.attention[sample].sum(-1).max(1)
    sample = sample[order_for_groups(waits, price.data_parallel)]
    sample = jnp.where(sample == samples, EMPTY, sample).astype(jnp.int32)
    return Assignment(sample.reshape(start.sample.shape))


def _check(
    batch: Batch,
    placement: Placement,
    topology: Topology,
    start: Assignment,
    *,
    token_budget: float | None,
    steps: int | None,
) -> None:
    samples, layers, experts = batch.sample_load.shape
    home, lengths = placement.home.shape, batch.lengths.shape
    if lengths != (samples,) or home != (layers, experts) or experts != topology.num_experts:
        raise ValueError(
            f"sample_load{[samples, layers, experts]}, lengths{list(lengths)} and home{list(home)} must agree on"
            f" samples, layers and {topology.num_experts} experts"
        )
    grid = (topology.num_nodes, topology.ranks_per_node)
    check_shape("nodes and ranks of start", start.sample.shape[1:3], grid)
    if start.sample.size < samples:
        raise ValueError(f"start has {start.sample.size} positions, too few for {samples} samples")
    for name, value in (("token_budget", token_budget), ("steps", steps)):
        if value is not None and not value >= 1:
            raise ValueError(f"{name}={value} must be at least 1")


def _node_share(sample_load, home, nodes):
    """Return the load of each sample on each node, ``[B N*L]``; a layer's mean over nodes, summed over B, is 1 / L."""
    samples, layers, experts = sample_load.shape
    on_node = jnp.asarray(home)[:, None] // (experts // nodes) == jnp.arange(nodes)[None, :, None]
    load = jnp.asarray(sample_load, jnp.float32)
    # A matrix product takes a fifth of the time of gathering each node's experts.
    load = jnp.einsum("ble,lne->bnl", load, on_node.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    load *= nodes / layers / jnp.maximum(load.sum((0, 1), keepdims=True), 1)
    return load.reshape(samples, -1)


def _budgets(length, sample, ranks: int, token_budget: float | None):
    """Return the token budgets of a micro-batch and of a rank, int32, which `assign_samples` describes."""
    rank_tokens = length[sample].reshape(len(sample), ranks, -1).sum(-1, dtype=jnp.int32)
    mean = length.sum(dtype=jnp.float32) / jnp.array([len(sample), rank_tokens.size])
    minimum = jnp.stack([rank_tokens.sum(1).max(), rank_tokens.max(), length.max()])
    mean *= jnp.array([1.05, 1.0] if token_budget is None else [token_budget, token_budget])
    return jnp.maximum(jnp.floor(mean).astype(jnp.int32), jnp.maximum(minimum[:2], minimum[2]))


def _exchange_ranks(sample, crossing, topology: Topology):
    """Exchange the ranks of a micro-batch if that lowers its crossings, and sort the samples of each rank."""
    local = topology.ranks_per_node
    by_rank = crossing[sample].sum(2)  # [M, rank, node to which it could move]
    node = jax.vmap(_nearest_node, (0, None))(-by_rank, local)
    crossing_after = jnp.take_along_axis(by_rank, node[..., None], axis=-1).sum((1, 2))
    current_node = (jnp.arange(topology.num_ranks) // local)[None]
    crossing_before = jnp.take_along_axis(
        by_rank, jnp.broadcast_to(current_node, node.shape)[..., None], axis=-1
    ).sum((1, 2))
    rank = jnp.argsort(
        jnp.where((crossing_after < crossing_before)[:, None], node, current_node), axis=-1, stable=True
    )
    return jnp.sort(jnp.take_along_axis(sample, rank[..., None], axis=1), axis=-1)


def _nearest_node(affinity, local):
    """Choose the node of each rank of one micro-batch; ranks that lose most without their first choice go first."""
    first, second = jax.lax.top_k(jnp.pad(affinity, ((0, 0), (0, 1)), constant_values=-jnp.inf), 2)[0].T

    def choose(free, rank):
        node = jnp.argmax(jnp.where(free > 0, affinity[rank], -jnp.inf))
        return free.at[node].add(-1), node

    order = jnp.argsort(second - first)
    _, node = jax.lax.scan(choose, jnp.full(affinity.shape[1], local), order)
    return jnp.zeros_like(node).at[order].set(node)
