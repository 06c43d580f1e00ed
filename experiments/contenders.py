"""The contenders that execution is measured with: the same packed samples of a trace under the plan of each planner."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.capacity import Capacities, count_capacities
from relibra_jax.node_visits import node_visits
from relibra_jax.plan import rank_load
from relibra_jax.planning.plan_batch import plan_loads
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.token_sample import sample_routes
from relibra_jax.replay import sample_load
from relibra_jax.traces.trace import Trace
from relibra_jax.types import EMPTY, Array, Assignment, BatchPlan, RoutingReplay, Topology, UnitTimes

_plan = jax.jit(plan_loads, static_argnames=("planner", "num_micro_batches"))

CONTENDERS = ("static", "eplb", "relibra", "balanced")
"""`balanced` is no planner: routing forced to be even, under static placement. The bound that reports compare with."""


class Samples(NamedTuple):
    """The samples of one batch and where they are packed."""

    expert_ids: Int[np.ndarray, "B T L K"]
    """The experts of every token, EMPTY on padding."""
    mask: Bool[np.ndarray, "B T"]
    """True where there is a token."""
    assignment: Assignment
    """The rank and the micro-batch of each sample."""


class ContenderBatch(NamedTuple):
    """A batch as one contender runs it."""

    expert_ids: Int[np.ndarray, "M L ranks t K"]
    """The experts of every rank's tokens, EMPTY on padding; ranks count flat."""
    batch_plan: BatchPlan
    """The contender's plan of the batch."""
    visits: Int[Array, "M L P N"]
    """Distinct tokens that each rank sends to each node."""
    capacities: Capacities
    """The buffer sizes that it needs, on both paths."""

    @property
    def rank_load(self) -> Int[np.ndarray, "M L N G"]:
        """Token copies that each rank computes."""
        return np.asarray(rank_load(self.batch_plan.plan))


def contenders(
    trace: Trace, topology: Topology, *, micro_batches: int, samples_per_rank: int, layers: int, seed: int = 0
) -> dict[str, ContenderBatch]:
    """The same samples, drawn from the trace by ``seed``, under every contender of `CONTENDERS`.

    Args:
        trace: the routing, of which the first ``layers`` layers are used.
        topology: the expert-parallel group, over whose ranks samples are packed by their tokens.
        micro_batches: M.
        samples_per_rank: samples of a rank in one micro-batch, on average.
        layers: L.
        seed: the seed of the order of samples.

    Raises:
        ValueError: if the trace is too short.
    """
    samples = draw_samples(
        trace,
        topology,
        micro_batches=micro_batches,
        samples_per_rank=samples_per_rank,
        layers=layers,
        seed=seed,
    )
    even = route_evenly(samples, topology.num_experts)
    return {
        name: plan_contender(even, "static", topology)
        if name == "balanced"
        else plan_contender(samples, name, topology)
        for name in CONTENDERS
    }


def draw_samples(
    trace: Trace, topology: Topology, *, micro_batches: int, samples_per_rank: int, layers: int, seed: int = 0
) -> Samples:
    """Samples of a trace in an order drawn by ``seed``, packed by their tokens; arguments as of `contenders`."""
    wanted = micro_batches * topology.num_ranks * samples_per_rank
    if wanted > len(trace.replay.mask) or layers > trace.replay.expert_ids.shape[2]:
        raise ValueError(
            f"{trace.name}: {wanted} samples x {layers} layers are asked for, it has"
            f" {len(trace.replay.mask)} x {trace.replay.expert_ids.shape[2]}"
        )
    chosen = np.random.default_rng(seed).permutation(len(trace.replay.mask))[:wanted]
    mask = np.asarray(trace.replay.mask)[chosen]
    ids = np.asarray(trace.replay.expert_ids)[chosen][:, :, :layers].astype(np.int32)
    ids = np.where(mask[..., None, None], ids, EMPTY)
    return Samples(ids, mask, pack_samples(mask.sum(1), topology, num_micro_batches=micro_batches))


def route_evenly(samples: Samples, num_experts: int) -> Samples:
    """The same tokens, routed to experts drawn at random so that all experts get as many.

    Experts are dealt from shuffled decks: of every ``E // K`` tokens no two have an expert in common.
    """
    rng, top_k = np.random.default_rng(1), samples.expert_ids.shape[-1]
    even = np.full_like(samples.expert_ids, EMPTY)
    tokens, hands = samples.mask.sum(), num_experts // top_k
    for layer in range(even.shape[2]):
        decks = np.tile(np.arange(num_experts), (-(-tokens // hands), 1))
        dealt = rng.permuted(decks, axis=1)[:, : hands * top_k].reshape(-1, top_k)
        even[samples.mask, layer] = dealt[:tokens]
    return samples._replace(expert_ids=even)


def plan_contender(
    samples: Samples, planner_name: str, topology: Topology, *, cost: UnitTimes | None = None
) -> ContenderBatch:
    """A batch under the plan of one planner.

    Args:
        samples: the batch.
        planner_name: a planner of `PLANNERS`.
        topology: the expert-parallel group.
        cost: the unit times that the planner is told, together with some of the tokens; None plans from loads alone.
    """
    ids, mask, assignment = samples
    replay = RoutingReplay(np.maximum(ids, 0), mask)
    planner = PLANNERS[planner_name].planner
    state = planner.init(topology, ids.shape[2], key=jax.random.key(0))
    batch_plan, _ = _plan(
        sample_load(replay, num_experts=topology.num_experts),
        jnp.asarray(mask.sum(1, dtype=np.int32)),
        planner,
        state,
        topology,
        num_micro_batches=len(assignment.sample),
        start=assignment,
        cost=cost,
        routes=None if cost is None else sample_routes(replay),
    )
    visits = node_visits(replay, batch_plan, topology)
    capacities = count_capacities(batch_plan.layer_plans(), topology, visits=visits)
    return ContenderBatch(_tokens_of_ranks(samples), batch_plan, visits, capacities)


def _tokens_of_ranks(samples: Samples) -> Int[np.ndarray, "M L ranks t K"]:
    """Each rank's tokens one after another, padded to the longest."""
    ids, mask, assignment = samples
    places = np.asarray(assignment.sample)
    places = places.reshape(len(places), -1, places.shape[-1])
    longest = np.append(mask.sum(1), 0)[places].sum(-1).max()
    tokens = np.full((*places.shape[:2], longest, *ids.shape[2:]), EMPTY, np.int32)
    for at in np.ndindex(places.shape[:2]):
        rows = np.concatenate([ids[sample][mask[sample]] for sample in places[at] if sample != EMPTY])
        tokens[at][: len(rows)] = rows
    return np.moveaxis(tokens, 3, 1)


@functools.cache
def expert_weights(experts: int, width: int, hidden: int, layers: int) -> np.ndarray:
    """``[L E 3 D F]`` float32, the same for every contender."""
    draw = np.random.default_rng(1).normal(size=(layers, experts, 3, width, hidden))
    return (draw / np.sqrt(width)).astype(np.float32)
