"""The batches with which execution is measured: the same packed samples of a trace under each planner's plan."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.types import (
    BALANCE,
    EMPTY,
    Array,
    Assignment,
    BatchPlan,
    Price,
    RoutingReplay,
    Topology,
)
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.routing.sizes import Capacities, count_capacities
from relibra_jax.routing.visits import node_visits
from relibra_jax.traces.trace import Trace

CONTENDERS = ("static", "eplb", "relibra", "balanced")
"""The compared runs. `balanced` is not a planner but a bound for reports: even routing under static placement."""


class Samples(NamedTuple):
    """The samples of one batch and their packing."""

    expert_ids: Int[np.ndarray, "B T L K"]
    """The expert ids of every token; EMPTY on padding."""
    mask: Bool[np.ndarray, "B T"]
    """True on real tokens."""
    assignment: Assignment
    """The assignment of samples to ranks and micro-batches."""


class ContenderBatch(NamedTuple):
    """A batch with the plan and the buffer sizes of one planner."""

    expert_ids: Int[np.ndarray, "M L ranks t K"]
    """The expert ids of every rank's tokens, by flat rank; EMPTY on padding."""
    batch_plan: BatchPlan
    """The plan of the batch."""
    visits: Int[Array, "M L P V"]
    """The number of distinct tokens that each rank sends to each node."""
    capacities: Capacities
    """The buffer sizes that the plan needs on both paths."""


def contenders(
    trace: Trace,
    topology: Topology,
    *,
    micro_batches: int,
    samples_per_rank: int,
    layers: int,
    seed: int = 0,
    cost: Price = BALANCE,
) -> dict[str, ContenderBatch]:
    """Plan the same samples of a trace for every name in `CONTENDERS`.

    Args:
        trace: the recorded routing.
        topology: the expert-parallel group, over whose ranks samples are packed by their token counts.
        micro_batches: the number of micro-batches M.
        samples_per_rank: the mean number of samples of a rank in one micro-batch.
        layers: the number of layers L; the first ones of the trace are used.
        seed: the seed of the order of samples.
        cost: the price. The default plans from loads alone, for layers that are not striped.

    Returns:
        The batch of every planner, by name.

    Raises:
        ValueError: if the trace has too few samples or layers.
    """
    samples = draw_samples(
        trace,
        topology,
        micro_batches=micro_batches,
        samples_per_rank=samples_per_rank,
        layers=layers,
        seed=seed,
    )
    even = samples._replace(expert_ids=route_evenly(samples.expert_ids, samples.mask, topology.num_experts))
    return {
        name: plan_contender(even, "static", topology, cost=cost)
        if name == "balanced"
        else plan_contender(samples, name, topology, cost=cost)
        for name in CONTENDERS
    }


def draw_samples(
    trace: Trace, topology: Topology, *, micro_batches: int, samples_per_rank: int, layers: int, seed: int = 0
) -> Samples:
    """Draw samples of a trace and pack them by their token counts.

    Args:
        trace: the recorded routing.
        topology: the expert-parallel group, over whose ranks samples are packed.
        micro_batches: the number of micro-batches M.
        samples_per_rank: the mean number of samples of a rank in one micro-batch.
        layers: the number of layers L; the first ones of the trace are used.
        seed: the seed of the order of samples.

    Raises:
        ValueError: if the trace has too few samples or layers.
    """
    required = micro_batches * topology.num_ranks * samples_per_rank
    if required > len(trace.replay.mask) or layers > trace.replay.expert_ids.shape[2]:
        raise ValueError(
            f"{trace.name} has {len(trace.replay.mask)} samples x {trace.replay.expert_ids.shape[2]} layers, but"
            f" {required} x {layers} are needed"
        )
    drawn_samples = np.random.default_rng(seed).permutation(len(trace.replay.mask))[:required]
    mask = np.asarray(trace.replay.mask)[drawn_samples]
    ids = np.asarray(trace.replay.expert_ids)[drawn_samples][:, :, :layers].astype(np.int32)
    ids = np.where(mask[..., None, None], ids, EMPTY)
    return Samples(ids, mask, pack_samples(mask.sum(1), topology, num_micro_batches=micro_batches))


def route_evenly(
    expert_ids: Integer[np.ndarray, "B T L K"], mask: Bool[np.ndarray, "B T"], num_experts: int
) -> Int[np.ndarray, "B T L K"]:
    """Route the same tokens to random experts so that every expert receives the same number of tokens.

    Experts are dealt from shuffled decks: the ``E // K`` tokens of a deck have no expert in common.

    Args:
        expert_ids: the recorded routing, of which only the shape is used.
        mask: True on real tokens.
        num_experts: the number of logical experts of a layer.

    Returns:
        The expert ids; EMPTY on padding.
    """
    rng, top_k = np.random.default_rng(1), expert_ids.shape[-1]
    even = np.full(expert_ids.shape, EMPTY, np.int32)
    tokens, tokens_per_deck = mask.sum(), num_experts // top_k
    for layer in range(even.shape[2]):
        decks = np.tile(np.arange(num_experts), (-(-tokens // tokens_per_deck), 1))
        dealt = rng.permuted(decks, axis=1)[:, : tokens_per_deck * top_k].reshape(-1, top_k)
        even[mask, layer] = dealt[:tokens]
    return even


def plan_contender(
    samples: Samples, planner_name: str, topology: Topology, *, cost: Price = BALANCE
) -> ContenderBatch:
    """Plan a batch with one planner and count its buffer sizes.

    Args:
        samples: the batch.
        planner_name: the name of a planner in `PLANNERS`.
        topology: the expert-parallel group.
        cost: the price. The default plans from loads alone.
    """
    ids, mask, assignment = samples
    replay = RoutingReplay(np.maximum(ids, 0), mask)
    planner = PLANNERS[planner_name].planner
    state = planner.init(topology, ids.shape[2], key=jax.random.key(0))
    stage = Stage(len(assignment.sample), start=assignment)
    (batch_plan,), _ = plan_batch(replay, planner, state, topology, stages=[stage], cost=cost)
    visits = node_visits(replay, batch_plan, topology, striped=cost.striped)
    capacities = count_capacities(batch_plan.layer_plans(), topology, visits=visits)
    return ContenderBatch(_tokens_of_ranks(samples), batch_plan, visits, capacities)


def _tokens_of_ranks(samples: Samples) -> Int[np.ndarray, "M L ranks t K"]:
    """Concatenate each rank's tokens, padded to the rank with the most tokens."""
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
    """Draw expert weights ``[L E 3 D F]`` in float32, the same for every planner."""
    draw = np.random.default_rng(1).normal(size=(layers, experts, 3, width, hidden))
    return (draw / np.sqrt(width)).astype(np.float32)
