"""The timeline of one layer: what every rank computes and sends, and where it waits, as the cost model sees it."""

from typing import NamedTuple

import jax
import numpy as np

from relibra_jax.contract.types import Array
from relibra_jax.cost.step_time import attention_time, hop_times, rank_time
from relibra_jax.cost.traffic import count_sent, count_traffic
from relibra_jax.evaluation.outcome import Outcome


class LayerTimeline(NamedTuple):
    """Modelled milliseconds of the forward pass of one layer of one micro-batch, for every flat rank."""

    attention: np.ndarray
    experts: np.ndarray
    """``[P 3]``: in home, resident and replica slots."""
    inside: np.ndarray
    """Dispatch inside the node; combine takes as long."""
    crossing: np.ndarray
    """Dispatch between nodes; combine takes as long."""
    gather: np.ndarray
    """Filling the buffers of dispatch; those of combine take as long."""
    transfer: np.ndarray
    """The replicas that the rank sends or receives, beside attention."""
    sent: np.ndarray
    """Tokens, or token copies on the flat path, that the rank has to send to other nodes at dispatch."""
    hierarchical: bool
    """Whether the hop inside nodes follows that between nodes at dispatch, and precedes it at combine. On the flat path
    both networks work at the same time."""

    @property
    def exchange(self) -> float:
        """The length of dispatch or combine, without the buffers."""
        inside, crossing = float(self.inside.max()), float(self.crossing.max())
        return crossing + inside if self.hierarchical else max(crossing, inside)

    @property
    def ends(self) -> np.ndarray:
        """When the four phases end: attention with the transfer of replicas, dispatch, experts, combine, in
        one piece."""
        before = max(self.attention.max(), self.transfer.max())
        exchange = self.exchange + self.gather.max()
        return np.cumsum([before, exchange, self.experts.sum(1).max(), exchange])


def layer_timeline(outcome: Outcome, place: tuple[int, int]) -> LayerTimeline:
    """Return the timeline of one layer of one micro-batch of the last batch.

    Args:
        outcome: the outcome of a planner.
        place: the indices of the micro-batch and the layer.
    """
    topology, cost_model = outcome.setting.topology, outcome.cost_model
    cost = cost_model.price(topology, updates=0, recompute=True)
    batch, visits = outcome.batches[-1], outcome.visits[-1]
    layer_plans = batch.batch_plan.layer_plans()
    attention, _ = attention_time(
        batch.batch_plan.assignment, batch.lengths, cost, sequence_length=batch.sequence_length
    )
    times = _rank_time(layer_plans, attention, topology, cost, visits=visits)
    sent = count_sent(layer_plans, topology, cost, visits=visits)
    between, inside = hop_times(sent, topology, cost)
    needed = count_traffic(layer_plans, topology, visits=visits).slow_sent

    def at_place(part: Array) -> np.ndarray:
        return np.asarray(part, float)[place].ravel()

    quota = np.asarray(batch.batch_plan.plan.quota)[place].reshape(topology.num_ranks, -1)
    tiles = np.ceil(quota / float(cost.tile))
    kinds = np.split(tiles, [topology.home_slots, topology.held_slots], axis=1)
    shares = np.stack([kind.sum(1) for kind in kinds], 1) / np.maximum(tiles.sum(1), 1)[:, None]
    # Dispatch is one of the two exchanges of a forward pass.
    return LayerTimeline(
        attention=1e3 * at_place(times.attention),
        experts=1e3 * at_place(times.compute)[:, None] * shares,
        inside=1e3 / 2 * (at_place(inside) + at_place(times.stripe)),
        crossing=1e3 / 2 * at_place(between),
        gather=1e3 / 2 * at_place(times.gather),
        transfer=1e3 * at_place(times.fetch),
        sent=cost_model.scale * at_place(needed),
        hierarchical=cost.hierarchical,
    )


_rank_time = jax.jit(rank_time)
