"""``python -m experiments.count_buffers``: count the rows of the exchange's buffers before the step.

`receive` is the number of rows that the ragged exchange needs on the rank with the most rows; `/ balanced` divides it
by the mean rows per rank of the largest micro-batch. `padded` is the number of rows that the padded exchange needs: one
lane for each pair of ranks, all as long as the longest. Systems that do not know the routing in advance allocate the
worst case, in which every token of the group goes to one rank.

`hops` are all rows that hierarchical dispatch, the default on several nodes, builds at most: lanes sent and received
between nodes and inside them, the tokens that arrive at a node, and the rows of the slots. `striped` is the same if the
ranks of a node deal their tokens to each other. `whole lanes` are the rows if the buffers of a hop also had the rows
that a rank keeps.

The counts need no device. A row has D bfloat16 numbers.
"""

import dataclasses
import sys
from typing import Annotated, Final

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.contenders import contenders
from experiments.program import TraceName, run_program
from relibra_jax.contract.types import BALANCE, Topology
from relibra_jax.evaluation import Ranks
from relibra_jax.routing.sizes import Capacities, worst_case_capacities
from relibra_jax.traces.read import read_trace

COLUMNS: Final = ("planner", "receive", "/ balanced", "saved", "padded", "padded / receive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Count the buffer rows that each planner's step needs."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    micro_batches: int = 5
    """The number of micro-batches."""
    layers: int = 24
    """The number of layers, at most that of the trace."""
    samples_per_rank: int = 8
    """The mean number of samples of a rank in a micro-batch."""
    width: int = 2880
    """The model width D, from which the bytes are computed."""


def main(config: Buffers) -> None:
    """Count the buffers and print the table.

    Args:
        config: the settings.
    """
    trace = read_trace(config.trace)
    layers = min(config.layers, trace.replay.expert_ids.shape[2])
    topology = config.ranks.topology(trace.num_experts)
    by_name, striped = (
        contenders(
            trace,
            topology,
            micro_batches=config.micro_batches,
            samples_per_rank=config.samples_per_rank,
            layers=layers,
            cost=dataclasses.replace(BALANCE, striped=striped),
        )
        for striped in (False, True)
    )
    tokens, top_k = by_name["static"].expert_ids.shape[-2:]
    worst = worst_case_capacities(tokens, top_k, topology).rows
    balanced = float(np.asarray(by_name["static"].batch_plan.load).sum((2, 3, 4)).max()) / topology.num_ranks
    table = Table(
        title=f"{trace.name}: {config.micro_batches} micro-batches x {layers} layers,"
        f" {topology.num_nodes}x{topology.ranks_per_node} ranks, at most {tokens} tokens per rank;"
        f" balanced {balanced:.0f} rows, worst case {worst} rows",
        title_justify="left",
    )
    for column in (*COLUMNS, "whole lanes", "hops", "striped"):
        table.add_column(column, justify="left" if column == "planner" else "right")
    for name, contender in by_name.items():
        sizes = contender.capacities
        rows, padded = sizes.rows, topology.num_ranks * sizes.flat.pair + sizes.flat.own
        saved = (worst - rows) * config.width * 2 / 2**20
        hops = (
            _hop_rows(sizes, topology, whole=True),
            *(_hop_rows(each.capacities, topology) for each in (contender, striped[name])),
        )
        cells = f"{rows}", f"{rows / balanced:.3f}", f"{saved:.0f} MiB", f"{padded}", f"{padded / rows:.2f}"
        table.add_row(name, *cells, *map(str, hops))
    Console(width=120).print(table)


def _hop_rows(sizes: Capacities, topology: Topology, *, whole: bool = False) -> int:
    """Return the rows of all buffers of hierarchical dispatch; with ``whole`` also those that a rank keeps."""
    assert sizes.node is not None
    visited = topology.visited
    hops = (visited.num_nodes, sizes.node), (visited.ranks_per_node, sizes.local)
    lanes = sum(2 * (ranks * each.pair + whole * each.own) for ranks, each in hops if ranks > 1)
    return lanes + sizes.node.receive + sizes.rows


if __name__ == "__main__":
    sys.exit(run_program(main, Buffers, description=__doc__))
