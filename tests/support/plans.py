"""Random routing, random plans, and plans of planners, for the whole suite.

Random values come from seeded NumPy, without compiled programs. Planners are compiled once for each topology and shape
of load.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Plan, RoutingReplay, Topology
from relibra_jax.planning.planners import PLANNERS


def random_routing(
    rng: np.random.Generator,
    *,
    samples: int,
    tokens: int,
    layers: int,
    experts: int,
    top_k: int,
    skew: float = 1.2,
) -> RoutingReplay:
    """Make a replay that `relibra_jax.contract.replay.check_replay` accepts; every layer has different popular experts.

    Args:
        rng: the random generator.
        samples, tokens, layers, experts, top_k: B, T, L, E and K. Samples have T / 4 to T tokens, followed by padding
            with zeros.
        skew: the exponent of Zipf's law, by which the popularity of experts falls; 0 makes all experts alike.
    """
    length = rng.integers(max(1, tokens // 4), tokens + 1, samples)
    mask = np.arange(tokens) < length[:, None]
    ids = _distinct(rng, (samples, tokens), layers, experts, top_k, skew)
    # The check would reject a layer, or a token with several experts, that has only zeros.
    ids[(ids == 0).all((2, 3))] = experts - 1
    ids[~mask] = 0
    smallest = np.uint8 if experts <= 1 << 8 else np.uint16
    return RoutingReplay(ids.astype(smallest), mask)


def random_ids(
    rng: np.random.Generator, shape: tuple[int, ...], experts: int, top_k: int, padding: float = 0.2
) -> np.ndarray:
    """Draw K different experts for every token, some more popular than others; some tokens are padding.

    Args:
        rng: the random generator.
        shape: the shape of the tokens, for example ``(M, L, ranks, tokens)``. All have the same popular experts.
        experts: E, the number of experts.
        top_k: K, the number of experts of a token.
        padding: the share of tokens that are padding, with EMPTY ids.

    Returns:
        int32 ``[*shape, K]``.
    """
    ids = _distinct(rng, shape, 1, experts, top_k, 1.2)[..., 0, :]
    ids[rng.random(shape) < padding] = EMPTY
    return ids.astype(np.int32)


def _distinct(rng, shape, layers, experts, top_k, skew):
    """``[*shape, layers, K]``: the experts with the largest perturbed log popularity (Gumbel top-k)."""
    popular = np.stack([rng.permutation(-skew * np.log(np.arange(1, experts + 1))) for _ in range(layers)])
    return np.argsort(-(popular + rng.gumbel(size=(*shape, layers, experts))), -1)[..., :top_k]


def load_of(ids: np.ndarray, topology: Topology) -> np.ndarray:
    """Token copies by the rank that holds them.

    Args:
        ids: expert ids ``[*stack, ranks, tokens, K]``, for example with ``*stack`` = ``M, L``; EMPTY counts nothing.
        topology: gives N, G and E.

    Returns:
        int32 ``[*stack, N, G, E]``.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> load_of(np.array([[[0, 1], [0, 2]], [[3, 0], [-1, -1]]]), topology).tolist()
    [[[2, 1, 1, 0]], [[1, 0, 0, 1]]]
    """
    ids = np.asarray(ids, np.int64)
    stack, experts = ids.shape[:-3], topology.num_experts
    rows = ids.reshape(-1, ids.shape[-2] * ids.shape[-1])
    at = np.where(rows == EMPTY, experts, rows) + np.arange(len(rows))[:, None] * (experts + 1)
    load = np.bincount(at.ravel(), minlength=len(rows) * (experts + 1)).reshape(len(rows), -1)[:, :-1]
    return load.reshape(*stack, topology.num_nodes, topology.ranks_per_node, experts).astype(np.int32)


def request_of(load: np.ndarray, topology: Topology, **fields: Any) -> PlanRequest:
    """Make the request of a batch whose token copies lie on the first rank, or on the first rank of every node.

    Args:
        load: token copies ``[M, L, E]``, or ``[M, L, N, E]`` by node.
        topology: gives N and G.
        **fields: the other fields of the request.

    >>> topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> request_of(np.array([[[4, 3, 2, 1]]]), topology).load[0, 0].sum(-1).tolist()
    [[10, 0], [0, 0]]
    """
    load = np.asarray(load)
    by_node = load if load.ndim == 4 else load[:, :, None]
    by_rank = np.zeros(
        (*load.shape[:2], topology.num_nodes, topology.ranks_per_node, load.shape[-1]), np.int32
    )
    by_rank[:, :, : by_node.shape[2], 0] = by_node
    return PlanRequest(by_rank, **fields)


def random_plan(
    rng: np.random.Generator,
    load: np.ndarray,
    topology: Topology,
    *,
    across_nodes: bool = False,
    fill: float = 0.7,
) -> Plan:
    """Make a random valid plan of a load, with homes, residents, replicas and splits that no planner would choose.

    Args:
        rng: the random generator.
        load: token copies ``[M, L, N, G, E]``.
        topology: the expert-parallel group.
        across_nodes: whether replicas may be in nodes that hold their expert neither at home nor as a resident.
        fill: the probability that a resident or replica slot holds an expert; 1 fills all slots if there are enough
            experts.

    Returns:
        A Plan of int32 NumPy arrays, with copies in the canonical order. Some copies have no tokens.
    """
    load = np.asarray(load)
    micro_batches, layers, nodes, local, experts = load.shape
    homes, held_slots = topology.home_slots, topology.held_slots
    home = np.stack([rng.permutation(experts) for _ in range(layers)])
    layout = np.argsort(home, -1).reshape(layers, nodes, local, homes)
    slot_expert = np.full((micro_batches, layers, nodes, local, topology.slots), EMPTY)
    slot_expert[..., :homes] = layout
    if topology.resident_slots:
        for row, n, g in np.ndindex(layers, nodes, local):
            candidates = np.setdiff1d(np.arange(experts), layout[row, n, g])
            some = _some(rng, candidates, topology.resident_slots, fill, home[row])
            slot_expert[:, row, n, g, homes : homes + len(some)] = some
    quota = np.zeros_like(slot_expert)
    for m, row in np.ndindex(micro_batches, layers):
        for n, g in np.ndindex(nodes, local):
            near = (
                slot_expert[m, row, :, :, :held_slots]
                if across_nodes
                else slot_expert[m, row, n, :, :held_slots]
            )
            candidates = np.setdiff1d(near, [EMPTY, *slot_expert[m, row, n, g]])
            some = _some(rng, candidates, topology.replica_slots, fill, home[row])
            slot_expert[m, row, n, g, held_slots : held_slots + len(some)] = some
        for expert, count in enumerate(load[m, row].sum((0, 1))):
            slots = np.nonzero(slot_expert[m, row] == expert)
            shares = rng.dirichlet(np.full(len(slots[0]), 0.5))
            quota[m, row][slots] = rng.multinomial(count, shares)
    return Plan(*(leaf.astype(np.int32) for leaf in (slot_expert, home, quota)))


def random_planner() -> Planner:
    """Make a planner of random plans, whose homes, residents, replicas and splits no other planner would choose."""

    def init(topology, num_layers, *, key):
        return jnp.zeros((), jnp.int32)

    def update(request, state, topology):
        load = request.load
        shapes = (*load.shape[:-1], topology.slots)
        plan = jax.pure_callback(
            lambda load, state: random_plan(np.random.default_rng(int(state)), np.asarray(load), topology),
            Plan(
                jax.ShapeDtypeStruct(shapes, jnp.int32),
                jax.ShapeDtypeStruct((load.shape[1], topology.num_experts), jnp.int32),
                jax.ShapeDtypeStruct(shapes, jnp.int32),
            ),
            load,
            state,
        )
        return plan, state + 1

    return Planner(init, update)


def _some(rng, candidates, slots, fill, home):
    """Draw different experts for a rank's slots of one kind, in the canonical order."""
    count = rng.binomial(slots, fill)
    some = rng.permutation(candidates)[:count]
    return some[np.argsort(home[some])]


@functools.cache
def compiled_planner(name: str, topology: Topology) -> Callable:
    """Return ``(load, state) -> (Plan, state)`` of the planner ``name`` of PLANNERS, compiled once per topology."""
    update = PLANNERS[name].planner.update
    return jax.jit(lambda load, state: update(PlanRequest(load), state, topology))


def planned(name: str, topology: Topology, load: np.ndarray) -> Plan:
    """Return the plan of a first batch by the planner ``name`` of PLANNERS, with random key 0, as NumPy arrays.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> planned("static", topology, np.ones((1, 1, 1, 2, 2), int)).quota.tolist()
    [[[[[2, 0], [2, 0]]]]]
    """
    load = jnp.asarray(load, jnp.int32)
    state = PLANNERS[name].planner.init(topology, load.shape[1], key=jax.random.key(0))
    plan, _ = compiled_planner(name, topology)(load, state)
    return jax.tree.map(np.asarray, plan)
