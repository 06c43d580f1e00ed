"""The figure of one layer's timeline: what every rank computes and sends, and where it waits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from relibra_jax.cli.drawing import bare, save_figure
from relibra_jax.cli.palette import GRID, IDLE, INK, PHASES
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import Topology
from relibra_jax.evaluation import Outcome, PlannedBatch
from relibra_jax.evaluation.layer_timeline import LayerTimeline, layer_timeline

MOST_RANKS: Final = 16
"""The ranks of one planner that fit a figure; at least one node is drawn."""
LEAST_LABELLED: Final = 0.1
"""The least time, as a share of the longest layer, beside which its label fits."""
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


def timeline_figure(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draw what every rank does in one layer of one micro-batch, forward, under several planners.

    The layer and the micro-batch are those of the last batch in which the first planner is most uneven. Each rank has
    three lanes: what it computes, what its links between nodes carry, and what its links inside the node carry. The
    hops of hierarchical dispatch run one after the other. All planners share one axis. A label after the end of a layer
    says how much sooner it ends than the slowest.

    Args:
        path: the PNG file to write.
        outcomes: the outcome of each planner, from top to bottom.
    """
    topology = outcomes[0].setting.topology
    load = np.asarray(rank_load(outcomes[0].batches[-1].batch_plan.plan), float)
    fullest = (load.max((2, 3)) - load.mean((2, 3))).argmax()
    micro_batch, layer = (int(each) for each in np.unravel_index(fullest, load.shape[:2]))
    lines = {outcome.planner: layer_timeline(outcome, (micro_batch, layer)) for outcome in outcomes}
    nodes = _nodes_drawn(load[micro_batch, layer], topology)
    height = 0.7 + 0.27 * len(nodes) * topology.ranks_per_node
    figure, rows = plt.subplots(
        len(outcomes), figsize=(11, 1.2 + height * len(outcomes)), sharex=True, layout="constrained"
    )
    slowest = max(lines, key=lambda name: lines[name].ends[-1])
    longest = float(lines[slowest].ends[-1])
    for axes, outcome in zip(np.atleast_1d(rows), outcomes, strict=True):
        line = lines[outcome.planner]
        _draw_ranks(axes, line, nodes, topology)
        _part_samples(axes, outcome.batches[-1], micro_batch, line.attention, nodes, topology)
        _describe(axes, outcome.planner, line, nodes, topology, longest)
        _mark_saving(axes, float(line.ends[-1]), longest, slowest)
    np.atleast_1d(rows)[0].set_xlim(0, longest)
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
    above: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
    axes.set_title(planner, loc="left", fontsize=11, color=INK, fontweight="bold", pad=14, parse_math=False)
    phases = ("attention", "dispatch", "experts", "combine")
    for name, start, end in zip(phases, np.append(0, line.ends[:-1]), line.ends, strict=True):
        if end - start > 0.07 * longest:
            middle = ((start + end) / 2, 1)
            axes.annotate(name, middle, xytext=(0, 2), ha="center", fontsize=8, color="#555555", **above)
    total = f"{line.ends[-1]:.1f} ms"
    axes.annotate(total, (line.ends[-1], 1), xytext=(3, 2), fontsize=9, fontweight="bold", **above)
    sent = (_thousands(line.sent.reshape(-1, local)[node].sum()) for node in nodes)
    crossing = f"{unit} for other nodes, by node: {', '.join(sent)}"
    axes.set_title(crossing, loc="right", fontsize=8, color=INK, pad=14)
    for number in range(1, len(nodes)):
        axes.axhline(number * local - 0.5, color=GRID, linewidth=1)
    names = [
        f"node {node}  rank {rank}" if not rank else f"{rank}" for node in nodes for rank in range(local)
    ]
    axes.set_yticks(np.arange(count), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(count - 0.4, -0.6)
    bare(axes)


def _mark_saving(axes: Axes, end: float, longest: float, slowest: str) -> None:
    """Hatch the time from the end of a layer to that of the slowest planner, and write how long it is."""
    if end == longest:
        return
    axes.axvspan(end, longest, facecolor="none", edgecolor=GRID, hatch="///", linewidth=0)
    if longest - end > LEAST_LABELLED * longest:
        axes.annotate(
            f"{longest - end:.1f} ms less\nthan {slowest}",
            ((end + longest) / 2, 0.5),
            xycoords=axes.get_xaxis_transform(),
            ha="center",
            va="center",
            fontsize=9,
            parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none"},
        )


def _thousands(count: float) -> str:
    return f"{count / 1e3:,.0f}k" if count >= 1e4 else f"{count:,.0f}"
