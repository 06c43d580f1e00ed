"""The timeline of one layer: what every rank computes and sends, and where it waits, as the cost model sees it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from relibra_jax.cli.batch_prices import count_visits, sample_lengths
from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.outcomes import Outcome
from relibra_jax.cli.palette import GRID, IDLE, INK, PHASES
from relibra_jax.cli.planner_runs import PlannedBatch
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import Array, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.step_time import attention_time, rank_time
from relibra_jax.cost.traffic import count_sent, count_traffic

MOST_RANKS: Final = 16
"""The ranks of one planner that fit a figure; at least one node is drawn."""
COMPUTING, CROSSING, INSIDE = (-0.14, 0.44), (0.2, 0.14), (0.37, 0.14)
"""The three lanes of a rank: centre and height, in rows."""
KEYS: Final = {
    "attention": "attention (white lines separate samples)",
    "home": "experts in home slots",
    "resident": "experts in resident slots",
    "replica": "experts in replica slots",
    "transfer": "replicas being sent",
    "inside": "tokens inside a node",
    "crossing": "tokens between nodes",
    "gather": "buffers of the exchange",
}
"""The legend, by the names of `relibra_jax.cli.palette.PHASES`."""


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
        """When the four phases end: attention with the transfer of replicas, dispatch, experts, combine."""
        before = max(self.attention.max(), self.transfer.max())
        exchange = self.exchange + self.gather.max()
        return np.cumsum([before, exchange, self.experts.sum(1).max(), exchange])


def layer_timeline(
    batch: PlannedBatch, place: tuple[int, int], topology: Topology, cost_model: CostModel
) -> LayerTimeline:
    """Return the timeline of one layer of one micro-batch under a plan.

    Args:
        batch: the batch and its plan.
        place: the indices of the micro-batch and the layer.
        topology: the expert-parallel group.
        cost_model: the cost model, which gives the length of each phase.
    """
    cost = cost_model.price(topology, updates=0, recompute=True)
    visits = count_visits(batch, topology, cost)
    layer_plans = batch.batch_plan.layer_plans()
    lengths, row_length = sample_lengths(batch)
    attention, _ = attention_time(batch.batch_plan.assignment, lengths, cost, row_length=row_length)
    times = _rank_time(layer_plans, attention, topology, cost, visits=visits)
    rows = _count_sent(layer_plans, topology, cost, visits=visits)
    needed = _count_traffic(layer_plans, topology, visits=visits).slow_sent

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
        inside=1e3 / 2 * float(cost.spread) * at_place(rows.inside),
        crossing=1e3 / 2 * float(cost.crossing) * at_place(rows.between),
        gather=1e3 / 2 * at_place(times.gather),
        transfer=1e3 * at_place(times.fetch),
        sent=cost_model.scale * at_place(needed),
        hierarchical=cost.hierarchical,
    )


_rank_time, _count_sent, _count_traffic = jax.jit(rank_time), jax.jit(count_sent), jax.jit(count_traffic)


def timeline_figure(
    path: Path, outcomes: Sequence[Outcome], topology: Topology, cost_model: CostModel
) -> None:
    """Draw what every rank does in one layer of one micro-batch, forward, under several planners.

    The layer and the micro-batch are those of the last batch in which the first planner is most uneven. Each rank has
    three lanes: what it computes, what its links between nodes carry, and what its links inside the node carry. The
    hops of hierarchical dispatch run one after the other.

    Args:
        path: the PNG file to write.
        outcomes: the outcome of each planner, from top to bottom.
        topology: the expert-parallel group.
        cost_model: the cost model, which gives the length of each phase.
    """
    load = np.asarray(rank_load(outcomes[0].batches[-1].batch_plan.plan), float)
    fullest = (load.max((2, 3)) - load.mean((2, 3))).argmax()
    micro_batch, layer = (int(each) for each in np.unravel_index(fullest, load.shape[:2]))
    lines = {
        outcome.planner: layer_timeline(outcome.batches[-1], (micro_batch, layer), topology, cost_model)
        for outcome in outcomes
    }
    nodes = _nodes_drawn(load[micro_batch, layer], topology)
    height = 0.7 + 0.27 * len(nodes) * topology.ranks_per_node
    figure, rows = plt.subplots(
        *(len(outcomes), 1), figsize=(11, 1.2 + height * len(outcomes)), sharex=True, layout="constrained"
    )
    longest = max(line.ends[-1] for line in lines.values())
    for axes, outcome in zip(np.atleast_1d(rows), outcomes, strict=True):
        line = lines[outcome.planner]
        _draw_ranks(axes, line, nodes, topology)
        _part_samples(axes, outcome.batches[-1], micro_batch, line.attention, nodes, topology)
        _describe(axes, outcome.planner, line, nodes, topology, longest)
    np.atleast_1d(rows)[0].set_xlim(0, 1.15 * longest)
    left_out = f"; {len(nodes)} of {topology.num_nodes} nodes drawn" * (len(nodes) < topology.num_nodes)
    np.atleast_1d(rows)[-1].set_xlabel(
        f"modelled milliseconds, forward pass of layer {layer} in micro-batch {micro_batch},"
        f" where {outcomes[0].planner} is most uneven{left_out}",
        fontsize=9,
    )
    keys = {key: label for key, label in KEYS.items() if key != "resident" or topology.resident_slots}
    handles = [Patch(facecolor=PHASES[key], label=label) for key, label in keys.items()]
    handles.append(Patch(facecolor=IDLE, label="not computing"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, frameon=False)
    save_figure(figure, path)


def _nodes_drawn(load: np.ndarray, topology: Topology) -> np.ndarray:
    """Return the nodes that fit: all, or those with the fullest ranks."""
    count = max(1, MOST_RANKS // topology.ranks_per_node)
    return np.sort(np.argsort(-load.max(1), kind="stable")[:count])


def _ranks(nodes: np.ndarray, topology: Topology) -> np.ndarray:
    """Return the flat ranks of some nodes."""
    local = np.arange(topology.ranks_per_node)
    return (nodes[:, None] * topology.ranks_per_node + local).ravel()


def _draw_ranks(axes: Axes, line: LayerTimeline, nodes: np.ndarray, topology: Topology) -> None:
    """Draw the lanes of every rank, one rank per row."""
    ranks = _ranks(nodes, topology)
    rows, (attended, dispatched, computed, combined) = np.arange(len(ranks)), line.ends

    def bars(lane: tuple[float, float], length: np.ndarray, start: np.ndarray | float, key: str) -> None:
        centre, height = lane
        axes.barh(rows + centre, length, left=start, height=height, color=PHASES[key])

    axes.barh(rows + COMPUTING[0], combined, height=COMPUTING[1], color=IDLE)
    bars(COMPUTING, line.attention[ranks], 0.0, "attention")
    bars(INSIDE, line.transfer[ranks], 0.0, "transfer")
    start = np.full(len(ranks), dispatched)
    for kind, key in enumerate(("home", "resident", "replica")):
        bars(COMPUTING, line.experts[ranks, kind], start, key)
        start = start + line.experts[ranks, kind]
    first_hop, last_hop = (line.crossing.max(), line.inside.max()) if line.hierarchical else (0.0, 0.0)
    bars(CROSSING, line.crossing[ranks], attended, "crossing")
    bars(INSIDE, line.inside[ranks], attended + first_hop, "inside")
    bars(INSIDE, line.inside[ranks], computed, "inside")
    bars(CROSSING, line.crossing[ranks], computed + last_hop, "crossing")
    for end in (dispatched, combined):
        bars(COMPUTING, line.gather[ranks], end - line.gather.max(), "gather")
    axes.vlines(line.ends[:-1], -0.6, len(ranks) - 0.4, color=INK, linewidth=0.6, linestyle=":")
    axes.vlines(combined, -0.6, len(ranks) - 0.4, color=INK, linewidth=1)


def _part_samples(
    axes: Axes,
    batch: PlannedBatch,
    micro_batch: int,
    attention: np.ndarray,
    nodes: np.ndarray,
    topology: Topology,
) -> None:
    """Draw a white line in a rank's attention wherever the next sample begins."""
    tokens = np.append(np.asarray(batch.replay.mask).sum(1), 0)  # EMPTY, the last, has none
    sample = np.asarray(batch.batch_plan.assignment.sample[micro_batch])
    ranks = _ranks(nodes, topology)
    ends = tokens[sample].reshape(topology.num_ranks, -1)[ranks].cumsum(1)
    row, end = np.nonzero(ends < ends[:, -1:])
    at = ends[row, end] / np.maximum(ends[row, -1], 1) * attention[ranks][row]
    centre, height = row + COMPUTING[0], COMPUTING[1]
    axes.vlines(at, centre - height / 2, centre + height / 2, color="white", linewidth=0.8)


def _describe(
    axes: Axes,
    planner: str,
    line: LayerTimeline,
    nodes: np.ndarray,
    topology: Topology,
    longest: float,
) -> None:
    """Write the names of phases, ranks and nodes, and the numbers of a planner."""
    count, local = len(nodes) * topology.ranks_per_node, topology.ranks_per_node
    unit = "tokens" if line.hierarchical else "token copies"
    axes.set_title(planner, loc="left", fontsize=11, color=INK, fontweight="bold", pad=14, parse_math=False)
    starts = np.append(0, line.ends[:-1])
    for name, start, end in zip(
        ("attention", "dispatch", "experts", "combine"), starts, line.ends, strict=True
    ):
        if end - start > 0.07 * longest:
            axes.annotate(
                *(name, ((start + end) / 2, 1)),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color="#555555",
            )
    axes.annotate(
        *(f"{line.ends[-1]:.1f} ms", (line.ends[-1], 1)),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
    )
    for number, node in enumerate(nodes):
        sent = line.sent.reshape(-1, local)[node].sum()
        middle = (number + 0.5) * local - 0.5
        axes.annotate(
            *(f"node {node} has\n{_thousands(sent)} {unit}\nfor other nodes", (line.ends[-1], middle)),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        if number:
            axes.axhline(number * local - 0.5, color=GRID, linewidth=1)
    names = [
        f"node {node}  rank {rank}" if not rank else f"{rank}" for node in nodes for rank in range(local)
    ]
    axes.set_yticks(np.arange(count), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(count - 0.4, -0.6)
    bare(axes)


def _thousands(count: float) -> str:
    return f"{count / 1e3:,.0f}k" if count >= 1e4 else f"{count:,.0f}"
