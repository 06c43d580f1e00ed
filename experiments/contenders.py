"""The contenders that execution is measured with: the same packed samples of a trace under the plan of each planner."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.capacity import Capacities, count_capacities
from relibra_jax.cli.traces import Trace
from relibra_jax.plan import rank_load
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.replay import expert_load
from relibra_jax.types import EMPTY, Assignment, BatchPlan, RoutingReplay, Topology

CONTENDERS = ("static", "eplb", "relibra", "balanced")
"""`balanced` is no planner: routing forced to be even, under static placement. The bound that reports compare with."""


class ContenderBatch(NamedTuple):
    """A batch as one contender runs it."""

    expert_ids: Int[np.ndarray, "M L ranks t K"]
    """The experts of every rank's tokens, EMPTY on padding; ranks count flat."""
    batch_plan: BatchPlan
    """The contender's plan of the batch."""
    capacities: Capacities
    """The buffer sizes that it needs."""

    @property
    def rank_load(self) -> Int[np.ndarray, "M L N G"]:
        """Token copies that each rank computes."""
        return np.asarray(rank_load(self.batch_plan.plan))


def contenders(
    trace: Trace, topology: Topology, *, micro_batches: int, samples_per_rank: int, layers: int, seed: int = 0
) -> dict[str, ContenderBatch]:
    """The same samples, drawn from the trace by ``seed``, under every contender.

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
    turn = np.cumsum(mask.ravel()).reshape(mask.shape)[..., None, None] * ids.shape[-1]
    even = np.where(ids == EMPTY, EMPTY, (turn + np.arange(ids.shape[-1])) % topology.num_experts)
    assignment = pack_samples(mask.sum(1), topology, num_micro_batches=micro_batches)
    return {
        name: _contender(even if name == "balanced" else ids, mask, assignment, topology, name)
        for name in CONTENDERS
    }


def _contender(ids, mask, assignment: Assignment, topology: Topology, name: str) -> ContenderBatch:
    replay = RoutingReplay(jnp.asarray(np.maximum(ids, 0)), jnp.asarray(mask))
    load = expert_load(replay, assignment, num_experts=topology.num_experts)
    planner = PLANNERS["static" if name == "balanced" else name].planner
    state = planner.init(topology, ids.shape[2], key=jax.random.key(0))
    plan, _ = jax.jit(planner.update)(load, state, topology)
    batch_plan = BatchPlan(assignment, load, plan)
    capacities = count_capacities(batch_plan.layer_plans(), topology)
    return ContenderBatch(_tokens_of_ranks(ids, mask, assignment), batch_plan, capacities)


def _tokens_of_ranks(ids, mask, assignment: Assignment) -> Int[np.ndarray, "M L ranks t K"]:
    """Each rank's tokens one after another, padded to the longest."""
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
