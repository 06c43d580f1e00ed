"""Baselines on loads drawn as in their publications, beside their published figures, with ReLibra on the same loads."""

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load, replica_count
from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import Plan, Topology
from relibra_jax.planning.baselines.feplb import feplb
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.moonep import moonep
from relibra_jax.planning.baselines.ultraep import ultraep
from relibra_jax.planning.relibra import keep_homes, relibra
from relibra_jax.planning.replication import replicate_experts

DRAWS: Final = 16
"""The number of loads that are drawn if the source draws loads. The worst counts, as in the source's bounds."""


_REPLICATING: Final = relibra(place=keep_homes)


class OwnLoad(NamedTuple):
    """The results of one baseline on one kind of load, as strings that the report prints."""

    planner: str
    """The name of the baseline's planner."""
    load: str
    """The load and the ranks."""
    published: str
    """The published figure."""
    reached: str
    """The figure that the baseline's planner in this library reaches."""
    relibra: str
    """The figure that ReLibra reaches with the same slots. It moves homes only if the baseline does so too."""
    source: str
    """The publication of the figure."""


def run_own_loads() -> list[OwnLoad]:
    """Run every baseline whose published figures of balance are on loads that can be drawn."""
    return [*_ultraep(), _moonep(), *_lplb(), *_feplb()]


def skewed_ranks(
    ratio: float, *, ranks: int = 64, homes: int = 4, tokens: int = 8192, top_k: int = 8
) -> Int[np.ndarray, " E"]:
    """Draw loads as UltraEP does: Zipf over ranks, steeper over the experts of a rank, top-k without replacement.

    Source: the benchmark of github.com/Dots-Infra/UltraEP, implemented independently.

    Args:
        ratio: the target of the largest rank load over the mean rank load.
        ranks: the number of ranks, P.
        homes: the number of experts on a rank, H.
        tokens: the number of tokens of a rank.
        top_k: the number of experts of a token.

    Returns:
        The token copies of each expert, in the order of home slots.
    """

    def chances(power: float) -> np.ndarray:
        weights = np.outer(np.arange(1, ranks + 1.0) ** -power, np.arange(1, homes + 1.0) ** -4).ravel()
        weights /= weights.sum()
        low, high = 0.0, 1e9
        for _ in range(200):
            scale = (low + high) / 2
            low, high = (scale, high) if -np.expm1(-scale * weights).sum() < top_k else (low, scale)
        return -np.expm1(-high * weights)

    low, high = 0.0, 8.0
    for _ in range(40):
        power = (low + high) / 2
        per_rank = chances(power).reshape(ranks, homes).sum(1)
        low, high = (power, high) if per_rank.max() < ratio * per_rank.mean() else (low, power)
    return np.random.default_rng(33).binomial(ranks * tokens, chances(high))


def normal_loads() -> Int[np.ndarray, "draws E"]:
    """Draw loads as LPLB does: 256 experts from the normal distribution N(1, 0.3)."""
    draws = np.random.default_rng(0).normal(1, 0.3, (DRAWS, 256)).clip(0)
    return (draws * 2**12).astype(np.int32)


def plan_loads(planner: Planner, experts: Int[np.ndarray, "L E"], topology: Topology) -> Plan:
    """Plan one micro-batch with a layer for each row of expert loads, after a batch of even loads, and check the plan.

    Planners that keep homes keep those of the even batch, which are contiguous.

    Args:
        planner: any planner.
        experts: the token copies of each expert. All of them are on the first rank.
        topology: the expert-parallel group.
    """
    shape = (1, len(experts), topology.num_nodes, topology.ranks_per_node, topology.num_experts)
    load = jnp.zeros(shape, jnp.int32).at[0, :, 0, 0].set(jnp.asarray(experts, jnp.int32))
    update = jax.jit(planner.update, static_argnames="topology")
    _, state = update(
        PlanRequest(jnp.full_like(load, 64)),
        planner.init(topology, len(experts), key=jax.random.key(0)),
        topology=topology,
    )
    plan, _ = update(PlanRequest(load), state, topology=topology)
    check_plan(plan, load, topology)
    return plan


def _compare(
    name: str,
    planner: Planner,
    experts: np.ndarray,
    topology: Topology,
    describe: Callable[[Plan, Topology], str],
    *,
    load: str,
    published: str,
    source: str,
    relibra_planner: Planner = _REPLICATING,
) -> OwnLoad:
    """Run a baseline's planner and ReLibra on the same loads."""
    baseline_result, relibra_result = (
        describe(plan_loads(each, experts, topology), topology) for each in (planner, relibra_planner)
    )
    return OwnLoad(name, load, published, baseline_result, relibra_result, source)


def _largest_imbalance(plan: Plan, topology: Topology) -> str:
    """Describe the largest imbalance over all loads, and the mean number of replicas of a layer."""
    load = np.asarray(rank_load(plan), float)
    replicas = float(np.mean(np.asarray(replica_count(plan, topology))))
    return f"{(load.max((2, 3)) / load.mean((2, 3))).max():.3f}, {replicas:.0f} replicas"


def _straggler(experts: np.ndarray) -> Callable[[Plan, Topology], str]:
    """Make a function that describes by how much replicas shrink the distance of the fullest rank from the mean."""

    def describe(plan: Plan, topology: Topology) -> str:
        def above(load: np.ndarray) -> float:
            return float((load.max(-1) - load.mean(-1)).mean())

        before = experts.reshape(len(experts), topology.num_ranks, -1).sum(-1)
        after = np.asarray(rank_load(plan), float).reshape(len(experts), -1)
        return f"{above(after) / above(before) - 1:.0%}"

    return describe


def _largest_minus_smallest(plan: Plan, topology: Topology) -> str:
    """Describe how many more token copies the fullest rank computes than the emptiest."""
    del topology
    load = np.asarray(rank_load(plan))
    return f"largest and smallest rank load at most {(load.max((2, 3)) - load.min((2, 3))).max()} apart"


def _one_node(slots: int) -> Topology:
    return Topology(num_nodes=1, ranks_per_node=64, num_experts=256, replica_slots=slots)


def _ultraep() -> list[OwnLoad]:
    return [
        _compare(
            "ultraep",
            ultraep(),
            skewed_ranks(ratio)[None],
            _one_node(2),
            _largest_imbalance,
            load=f"imbalance {ratio} on 64 ranks, 256 experts, R=2",
            published=f"1.01, {replicas} replicas",
            source="README of UltraEP (arXiv 2606.04101)",
        )
        for ratio, replicas in ((1.51, 38), (2.01, 46), (3.03, 51))
    ]


def _moonep() -> OwnLoad:
    loads = np.stack([skewed_ranks(ratio) for ratio in (1.51, 2.01, 3.03)])
    return _compare(
        "moonep",
        moonep(),
        loads,
        _one_node(4),
        _largest_minus_smallest,
        load="the same three loads, R=4 (as many replica slots as experts per rank)",
        published="equal loads on all ranks",
        source="documentation of MoonEP",
        relibra_planner=relibra(place=keep_homes, replicate=functools.partial(replicate_experts, exact=True)),
    )


def _lplb() -> list[OwnLoad]:
    compare = functools.partial(
        _compare, "lplb", relibra_planner=relibra(), source="tests of github.com/deepseek-ai/LPLB"
    )
    results = []
    for graph, nodes, local, slots, bound in (
        ("cube", 4, 8, 2, 1.07),
        ("cube", 8, 8, 2, 1.10),
        ("ring", 4, 8, 1, 1.07),
        ("hypercube", 1, 16, 2, 1.03),
        ("torus", 1, 32, 2, 1.01),
    ):
        topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=256, replica_slots=slots)
        load = f"256 experts from N(1, 0.3) on {nodes}x{local} ranks, {graph}, R={slots}"
        results.append(
            compare(
                lplb(graph=graph),
                normal_loads(),
                topology,
                _largest_imbalance,
                load=load,
                published=f"at most {bound}",
            )
        )
    return results


def _feplb() -> list[OwnLoad]:
    loads = (np.random.default_rng(0).lognormal(0, 0.8, (DRAWS, 128)) * 2**10).astype(np.int32)
    return [
        _compare(
            "feplb",
            feplb(dynamic=dynamic),
            loads,
            Topology(num_nodes=1, ranks_per_node=8, num_experts=128, replica_slots=dynamic),
            _straggler(loads),
            load=f"128 experts, log-normal loads, 8 ranks, {dynamic} dynamic experts: change of max - mean",
            published=published,
            source="FEPLB (arXiv 2604.19654), on its own loads",
        )
        for dynamic, published in ((2, "-65%"), (4, "-68%"), (8, "-70%"))
    ]
