"""``python -m experiments.count_buffers``: rows of the exchange's buffers, counted before the step.

`receive` is what the ragged exchange needs on the fullest rank, over the balanced rows of the largest micro-batch;
`padded` what the padded one needs: a lane as long as the longest for each pair of ranks. Systems without foresight
hold the worst case: every token of the group on one rank. No device is involved; bytes are rows x D x 2 (bf16).
"""

import dataclasses
import sys
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.contenders import contenders
from relibra_jax.capacity import worst_case_capacities
from relibra_jax.cli.options import Ranks, TraceName
from relibra_jax.cli.parsing import run_program
from relibra_jax.traces.read import read_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Count the buffers that each contender's step needs."""

    trace: TraceName = None
    """A trace by name or path (.npz); else the one that RELIBRA_TRACE gives, else the recorded one of this project."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    micro_batches: int = 5
    layers: int = 24
    samples_per_rank: int = 8
    width: int = 2880
    """D, for the bytes."""


def main(config: Buffers) -> None:
    """Print the table."""
    trace = read_trace(config.trace)
    layers = min(config.layers, trace.replay.expert_ids.shape[2])
    topology = config.ranks.topology(trace.num_experts)
    by_name = contenders(
        trace,
        topology,
        micro_batches=config.micro_batches,
        samples_per_rank=config.samples_per_rank,
        layers=layers,
    )
    tokens, top_k = by_name["static"].expert_ids.shape[-2:]
    worst = worst_case_capacities(tokens, top_k, topology).rows
    balanced = float(np.asarray(by_name["static"].batch_plan.load).sum((2, 3, 4)).max()) / topology.num_ranks
    table = Table(
        title=f"{trace.name}: {config.micro_batches} micro-batches x {layers} layers,"
        f" {topology.num_nodes}x{topology.ranks_per_node} ranks, at most {tokens} tokens a rank;"
        f" balanced {balanced:.0f} rows, worst case {worst} rows",
        title_justify="left",
    )
    for column in ("contender", "receive", "/ balanced", "saved", "padded", "padded / receive"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, contender in by_name.items():
        sizes = contender.capacities
        rows, padded = sizes.rows, topology.num_ranks * sizes.flat.pair + sizes.flat.own
        saved = (worst - rows) * config.width * 2 / 2**20
        table.add_row(
            name, f"{rows}", f"{rows / balanced:.3f}", f"{saved:.0f} MiB", f"{padded}", f"{padded / rows:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, Buffers, description=__doc__))
