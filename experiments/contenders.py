"""The work that planners are measured on: tokens of a trace, laid out over ranks, and a plan of each contender."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relibra_jax.cli.traces import Trace
from relibra_jax.capacity import Capacities, count_capacities
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.replay import expert_load
from relibra_jax.types import EMPTY, Array, Assignment, Plan, RoutingReplay, Topology

CONTENDERS = ("static", "eplb", "relibra", "balanced")
"""`balanced` is no plan: routing forced to be even, under static placement. The bound that reports compare with."""


class Work(NamedTuple):
    """A batch as one contender runs it."""

    expert_ids: np.ndarray
    """``[M L N G t K]``, EMPTY on padding."""
    load: Array
    """``[M L N G E]``."""
    plan: Plan
    sizes: Capacities


def contenders(
    trace: Trace, topology: Topology, *, micro_batches: int, samples_per_rank: int, layers: int, seed: int = 0
) -> dict[str, Work]:
    """The same samples, drawn from the trace by ``seed``, under every contender.

    Args:
        trace: its first ``layers`` layers are used.
        topology: the ranks; samples lie on them in the drawn order.
        micro_batches: M.
        samples_per_rank: of one micro-batch.
        layers: L.
        seed: of the order of samples.

    Raises:
        ValueError: the trace is too short.
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
    lies = Assignment(
        jnp.arange(wanted).reshape(
            micro_batches, topology.num_nodes, topology.ranks_per_node, samples_per_rank
        )
    )
    return {
        name: _work(even if name == "balanced" else ids, mask, lies, topology, name) for name in CONTENDERS
    }


def _work(ids, mask, lies: Assignment, topology: Topology, name: str) -> Work:
    replay = RoutingReplay(jnp.asarray(np.maximum(ids, 0)), jnp.asarray(mask))
    load = expert_load(replay, lies, num_experts=topology.num_experts)
    planner = PLANNERS["static" if name == "balanced" else name].planner
    state = planner.init(topology, ids.shape[2], key=jax.random.key(0))
    plan, _ = jax.jit(planner.update)(load, state, topology)
    return Work(_tokens_of_ranks(ids, mask, lies), load, plan, count_capacities(plan, load, topology))


def _tokens_of_ranks(ids, mask, lies: Assignment) -> np.ndarray:
    """``[M L N G t K]``: each rank's tokens one after another, padded to the longest."""
    places = np.asarray(lies.sample)
    longest = mask.sum(1)[places].sum(-1).max()
    shape = (*places.shape[:3], longest, *ids.shape[2:])
    tokens = np.full(shape, EMPTY, np.int32)
    for at in np.ndindex(places.shape[:3]):
        rows = np.concatenate([ids[sample][mask[sample]] for sample in places[at]])
        tokens[at][: len(rows)] = rows
    return np.moveaxis(tokens, 4, 1)


@functools.cache
def expert_weights(experts: int, width: int, hidden: int, layers: int) -> np.ndarray:
    """``[L E 3 D F]`` float32, the same for every contender."""
    draw = np.random.default_rng(1).normal(size=(layers, experts, 3, width, hidden))
    return (draw / np.sqrt(width)).astype(np.float32)
