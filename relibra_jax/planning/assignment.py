"""Which samples go to which micro-batch and which rank.

The gradient of a batch does not depend on which sample is in which micro-batch, if the loss is a sum over tokens
divided by a count of the whole batch (sample packing, arXiv 2608.12146); the time of a step does. With homes
given, a sample is a vector of node loads ``v[l, n]``, as shares of its layer's mean, and we

    minimise  mean_l sum_m max_n sum_{samples of m} v[l, n]  +  attention_cost * sum_m max_rank tokens / mean
              +  crossing_cost * mean_l sum_m max_rank (tokens that it sends or receives) / mean tokens,

the node imbalance over the batch, that of attention, and what crosses between nodes, while no micro-batch and no
rank exceeds its budget of tokens. What of a sample crosses follows from the node where it lies, so it is a table; where
layers and ranks are many, neighbouring layers are one number of it. Packing (`relibra_jax.planning.sample_packing`)
makes a start that is even in tokens, and simulated annealing does the rest (`relibra_jax.planning.sample_search`).
Last, ranks are exchanged inside each micro-batch where less then crosses in all; the load of nodes stays.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from relibra_jax.planning.packing import lightest_pack
from relibra_jax.planning.sample_crossings import crossings_by_node
from relibra_jax.planning.sample_packing import check_micro_batches, check_room, pack_samples
from relibra_jax.planning.sample_search import HOTTEST, REFINING, SampleProblem, search_samples
from relibra_jax.planning.token_sample import Routes
from relibra_jax.types import EMPTY, Array, Assignment, Topology, UnitTimes, check_shape

COUNTS: Final = 512
"""Counts of tokens that a micro-batch keeps of what is sent, a rank and a group of layers each; and as many of what is
received."""


def assign_in_order(num_samples: int, topology: Topology, *, num_micro_batches: int) -> Assignment:
    """Samples in their given order: contiguous runs to micro-batches, and inside each to flat ranks.

    Args:
        num_samples: B; runs differ by one sample at most.
        topology: the expert-parallel group, which gives N and G.
        num_micro_batches: M.

    Returns:
        An Assignment of int32; shorter runs end in EMPTY.

    Raises:
        ValueError: if there is no micro-batch, or there are fewer samples than micro-batches.

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


@functools.partial(
    jax.jit,
    static_argnames=(
        "topology",
        "num_micro_batches",
        "token_budget",
        "samples_per_rank",
        "steps",
        "attention_cost",
        "crossing_cost",
    ),
)
def assign_samples(
    sample_load: Int[Array, "B L E"],
    tokens: Int[Array, " B"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    num_micro_batches: int,
    key: PRNGKeyArray,
    token_budget: float = 1.05,
    samples_per_rank: int | None = None,
    steps: int | None = None,
    attention_cost: float = 0.1,
    crossing_cost: float = 0.03,
    routes: Routes | None = None,
    resident: Int[Array, "L N G resident_slots"] | None = None,
    cost: UnitTimes | None = None,
    refine: Assignment | None = None,
) -> Assignment:
    """Choose a micro-batch and a rank for every sample, so that nodes and ranks carry even load.

    Source: sample packing (arXiv 2608.12146) and ReLibra's sample locality; the file's docstring has the objective.

    The budget of tokens is ``token_budget`` times the mean, of micro-batches and of ranks; or the largest single
    sample, or what the start needs, if those are more. It is never exceeded. Packing needs more than the first two only
    where samples are few or long for their ranks: two equal ranks cannot share three equal samples evenly.

    Args:
        sample_load: token copies of each sample for each expert.
        tokens: the length of each sample, which attention and memory feel.
        home: flat home slot of each expert.
        topology: the expert-parallel group.
        num_micro_batches: M.
        key: random key; the same key gives the same assignment.
        token_budget: at least 1.
        samples_per_rank: b; by default the fewest that hold all samples. More leave room to even out tokens.
        steps: the steps of annealing; 100,000 is thorough. None is one for four pairs of samples, at most 8,000, and a
            quarter of that where assignment and placement take turns (``refine``).
        attention_cost: the node imbalance worth accepting for one unit of attention imbalance.
        crossing_cost: the node imbalance worth accepting to have no copy of a token cross nodes.
        routes: some tokens of the batch, from `relibra_jax.planning.token_sample.sample_routes`. With them crossings
            are distinct tokens for each node, where ``cost`` is of hierarchical dispatch; else they are copies.
        resident: the expert in each resident slot, which its node's tokens do not cross for; None for none.
        cost: the unit times of the cluster and the model, in place of ``attention_cost`` and ``crossing_cost``.
        refine: an assignment of all samples to start from instead of packing, and to stay close to: found for homes
            much like these. EMPTY throughout packs, as None does, and says that turns follow: fewer steps are taken.

    Returns:
        An Assignment of int32; samples of a rank ascend, EMPTY comes last.

    Raises:
        ValueError: if shapes disagree, there are fewer samples than micro-batches or too few positions for the samples,
            the budget is below the mean, or there are no steps or a negative cost.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> load = jnp.array([[[8, 0]], [[8, 0]], [[0, 8]], [[0, 8]]])
    >>> home, tokens = jnp.array([[0, 1]]), jnp.array([8, 8, 8, 8])
    >>> knobs = dict(num_micro_batches=2, key=jax.random.key(0), steps=50)
    >>> sample = assign_samples(load, tokens, home, topology, **knobs).sample
    >>> (sample // 2).tolist()  # one sample of each kind in each micro-batch, in the node of its expert
    [[[[0]], [[1]]], [[[0]], [[1]]]]
    """
    samples, layers, experts = sample_load.shape
    nodes, ranks = topology.num_nodes, topology.num_ranks
    if samples_per_rank is None:
        samples_per_rank = -(-samples // max(num_micro_batches * ranks, 1))
    if tokens.shape != (samples,) or home.shape != (layers, experts) or experts != topology.num_experts:
        raise ValueError(
            f"sample_load{list(sample_load.shape)}, tokens{list(tokens.shape)} and home{list(home.shape)} must agree"
            f" on samples, layers and {topology.num_experts} experts"
        )
    check_micro_batches(samples, num_micro_batches)
    check_room(samples, topology, num_micro_batches, samples_per_rank)
    if refine is not None:
        check_shape(
            "refine",
            refine.sample.shape,
            (num_micro_batches, nodes, topology.ranks_per_node, samples_per_rank),
        )
    if steps is None:
        steps = min(max(samples**2 // 4, 100), 8_000)
        steps = steps if refine is None else max(steps // 4, 100)
    for name, value, least in (
        ("token_budget", token_budget, 1),
        ("steps", steps, 1),
        ("attention_cost", attention_cost, 0),
        ("crossing_cost", crossing_cost, 0),
    ):
        if not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")

    total = jnp.maximum(jnp.asarray(tokens).sum(dtype=jnp.float32), 1)
    attention, price = jnp.float32(attention_cost), jnp.float32(crossing_cost)
    if cost is not None:
        compute = jnp.float32(cost.copy) * sample_load.sum(dtype=jnp.float32) / (layers * total)  # of a token
        attention, price = jnp.float32(cost.token) / compute, jnp.float32(cost.crossing) / compute
    groups = min(layers, max(1, COUNTS // ranks))
    crossing = crossings_by_node(
        sample_load, tokens, home, topology, routes=routes, resident=resident, cost=cost, groups=groups
    )
    length = jnp.append(jnp.asarray(tokens, jnp.int32), 0)
    sample = _packed(length[:-1], topology, num_micro_batches, samples_per_rank)
    hottest = jnp.float32(HOTTEST)
    if refine is not None:
        given = jnp.asarray(refine.sample, jnp.int32).reshape(sample.shape)
        refining = (given != EMPTY).any()
        sample = jnp.where(refining, jnp.where(given == EMPTY, samples, given), sample)
        hottest = jnp.where(refining, jnp.float32(REFINING), hottest)
    problem = SampleProblem(
        jnp.pad(_node_share(sample_load, home, nodes), ((0, 1), (0, 0))),
        length,
        jnp.pad(crossing, ((0, 1), *[(0, 0)] * 3)) * (price * ranks / total),
        attention * ranks / total,
        _budgets(length, sample, ranks, token_budget),
    )
    hierarchical = cost is not None and cost.hierarchical
    sample = search_samples(
        problem, sample, key, topology, hierarchical=hierarchical, steps=steps, hottest=hottest
    )
    sample = sample.reshape(num_micro_batches, ranks, samples_per_rank)
    sample = _exchange_ranks(sample, problem.crossing.sum((2, 3)), topology)
    sample = jnp.where(sample == samples, EMPTY, sample).astype(jnp.int32)
    return Assignment(sample.reshape(num_micro_batches, nodes, topology.ranks_per_node, samples_per_rank))


def _packed(tokens, topology: Topology, num_micro_batches: int, room: int):
    """[M positions], samples even in tokens; the number of samples where there is none."""
    samples, ranks = len(tokens), topology.num_ranks
    if room > 1:
        knobs = {"num_micro_batches": num_micro_batches, "samples_per_rank": room}
        sample = jnp.asarray(pack_samples(tokens, topology, **knobs).sample)
        sample = sample.reshape(num_micro_batches, ranks * room)
        return jnp.where(sample == EMPTY, samples, sample)
    # Packed by ranks alone, the longest samples would all be in the first micro-batch.
    which, rank = lightest_pack(tokens, jnp.zeros(num_micro_batches, jnp.float32), room=ranks)
    nowhere = jnp.full((num_micro_batches, ranks), samples, jnp.int32)
    return nowhere.at[which, rank].set(jnp.arange(samples, dtype=jnp.int32))


def _node_share(sample_load, home, nodes):
    """[B N*L], load of each sample in each node, so that a layer's mean node load over the batch sums to 1 / L."""
    samples, layers, experts = sample_load.shape
    lives = jnp.asarray(home)[:, None] // (experts // nodes) == jnp.arange(nodes)[None, :, None]
    load = jnp.asarray(sample_load, jnp.float32)
    # A product of matrices takes a fifth of the time of gathering each node's experts.
    load = jnp.einsum("ble,lne->bnl", load, lives.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    load *= nodes / layers / jnp.maximum(load.sum((0, 1), keepdims=True), 1)
    return load.reshape(samples, -1)


def _budgets(length, sample, ranks: int, token_budget: float):
    """Most tokens of a micro-batch and of a rank, int32: of the mean, the longest sample, or what the start needs."""
    held = length[sample].reshape(len(sample), ranks, -1).sum(-1, dtype=jnp.int32)
    mean = length.sum(dtype=jnp.float32) / jnp.array([len(sample), held.size])
    needed = jnp.stack([held.sum(1).max(), held.max(), length.max()])
    return jnp.maximum(jnp.floor(token_budget * mean).astype(jnp.int32), jnp.maximum(needed[:2], needed[2]))


def _exchange_ranks(sample, crossing, topology: Topology):
    """Exchange the ranks of every micro-batch, where less then crosses nodes; samples of a rank ascend."""
    room = topology.ranks_per_node
    by_rank = crossing[sample].sum(2)  # [M, rank, node where it might be]
    node = jax.vmap(_nearest_node, (0, None))(-by_rank, room)
    there = jnp.take_along_axis(by_rank, node[..., None], axis=-1).sum((1, 2))
    here = (jnp.arange(topology.num_ranks) // room)[None]
    now = jnp.take_along_axis(by_rank, jnp.broadcast_to(here, node.shape)[..., None], axis=-1).sum((1, 2))
    rank = jnp.argsort(jnp.where((there < now)[:, None], node, here), axis=-1, stable=True)
    return jnp.sort(jnp.take_along_axis(sample, rank[..., None], axis=1), axis=-1)


def _nearest_node(affinity, room):
    """The node of each rank of one micro-batch: who loses most by not having its first choice chooses first."""
    first, second = jax.lax.top_k(jnp.pad(affinity, ((0, 0), (0, 1)), constant_values=-jnp.inf), 2)[0].T

    def choose(free, rank):
        node = jnp.argmax(jnp.where(free > 0, affinity[rank], -jnp.inf))
        return free.at[node].add(-1), node

    order = jnp.argsort(second - first)
    _, node = jax.lax.scan(choose, jnp.full(affinity.shape[1], room), order)
    return jnp.zeros_like(node).at[order].set(node)
