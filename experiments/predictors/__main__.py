"""``python -m experiments.predictors [TRACE]``: accuracy, overhead and gain of predictors, drawn as in MoE-GPS.

Source: MoE-GPS (arXiv 2506.07366). All times are modelled.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from experiments.predictors.figure import Row, draw_predictors, lead
from experiments.predictors.loads import decode_like, prefill_like
from experiments.predictors.prices import Priced, price_load
from experiments.program import TraceName, run_program, wide_console
from relibra_jax.cli.terminal import progress_bar, wide_table
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation.settings import Ranks
from relibra_jax.evaluation.thresholds import route_some_evenly
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer, check_positive, check_seed
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import some_layers

EVEN_SHARES: Final = (0.9, 0.75, 0.5, 0.0)
"""The shares of tokens that are routed evenly, which lowers the skew of the trace."""
PREDICTORS: Final = 11
"""The most predictors of a load."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predictors:
    """Draw what predictors of routes gain in inference, by accuracy, overhead, skew and network."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    model: str = "gpt-oss-20b"
    """The model whose sizes are modelled, with the trace's number of experts and top-k."""
    cluster: str = "a100"
    """The cluster whose devices are modelled, on one node."""
    speeds: tuple[float, ...] = (300.0, 100.0, 32.0, 16.0)
    """The speeds of the network to try, in GB/s that a rank sends while it receives as many, fastest first. By default
    those of the paper, which counts both directions: 600 (NVLink 3), 200, 64 (PCIe 4.0 x16) and 32."""
    ranks: int = 4
    """The number of ranks."""
    replica_slots: int = 2
    """The number of copies of experts that a rank holds in each layer."""
    prefill_tokens: float = 4096.0
    """The tokens of a rank in a micro-batch of prefill."""
    decode_tokens: float = 256.0
    """The sequences of a rank in a step of decoding."""
    context: float = 4096.0
    """The tokens in the cache of each sequence of decoding."""
    layers: int = 8
    """The number of layers that are planned, evenly spaced. Times are those of these layers."""
    seed: int = 0
    """The seed of the order of samples, of the networks' errors and of planning."""
    out: Path = Path("out/predictors")
    """The folder that the figure and the numbers are written to."""


def main(options: Predictors) -> None:
    """Price all predictors on both loads at every skew, print the tables, and write the figure and the numbers.

    Args:
        options: the trace, the model, the hardware, and the folder to write to.

    Raises:
        ValueError: if the trace and the settings do not fit each other, or a number is out of its range. Nothing is
            written then.
    """
    check_seed("seed", options.seed)
    check_integer("layers", options.layers, least=1)
    for name in ("prefill_tokens", "decode_tokens", "context"):
        check_positive(name, getattr(options, name))
    if not options.speeds:
        raise ValueError("speeds must have at least one speed of the network")
    for speed in options.speeds:
        check_positive("speeds", speed)
    device = look_up("cluster=", options.cluster, CLUSTERS)
    clusters = [dataclasses.replace(device, fast_bandwidth=speed * 1e9) for speed in options.speeds]
    trace = some_layers(read_trace(options.trace), options.layers)
    topology = Ranks(nodes=1, ranks_per_node=options.ranks, replica_slots=options.replica_slots).topology(
        trace.num_experts
    )
    sizes = {"num_experts": trace.num_experts, "top_k": trace.replay.expert_ids.shape[-1]}
    model = dataclasses.replace(look_up("model=", options.model, MODELS), **sizes)
    flatter = [route_some_evenly(trace, share, seed=options.seed) for share in EVEN_SHARES]
    loads = [
        [
            prefill_like(each, topology, tokens_per_rank=options.prefill_tokens, seed=options.seed)
            for each in flatter
        ],
        [
            decode_like(each, topology, tokens_per_rank=options.decode_tokens, context=options.context)
            for each in flatter
        ],
    ]
    console, rows = wide_console(), []
    with progress_bar(console, width=12) as bar:
        task = bar.add_task("predictors", total=2 * len(flatter) * PREDICTORS)
        for skews in loads:
            priced = [
                price_load(
                    *(load, model, topology, clusters),
                    seed=options.seed,
                    progress=lambda: bar.update(task, advance=1),
                )
                for load in skews
            ]
            rows.append(Row(skews[0].name, [skew for _, skew in priced], [each for each, _ in priced]))
    title = (
        f"{trace.name} on {options.ranks} ranks, {options.replica_slots} copies a rank: {options.model} on"
        f" {options.cluster}, modelled"
    )
    for row in rows:
        console.print(predictors_table(row, options.speeds, f"{row.name}, skew {row.skews[-1]:.2f}; {title}"))
    options.out.mkdir(parents=True, exist_ok=True)
    figure, numbers = options.out / "predictors.png", options.out / "predictors.json"
    draw_predictors(figure, rows, options.speeds, title)
    settings = {"setting": title, "speeds": options.speeds}
    write_json(numbers, settings | {row.name: _numbers(row, len(options.speeds)) for row in rows})
    console.print(f"figure: {figure}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def predictors_table(row: Row, speeds: tuple[float, ...], title: str) -> Table:
    """Make a table with one line for each predictor, at the skew of the trace.

    Args:
        row: the load.
        speeds: the speeds of the network, in GB/s, fastest first.
        title: the title of the table.
    """
    table = wide_table(title, width=150)
    table.add_column("predictor", no_wrap=True)
    for name in ("right", "error", "imbalance"):
        table.add_column(name, justify="right", no_wrap=True)
    for speed in (speeds[0], speeds[-1]):
        for name in ("overhead", "exposed copies", "time", "as published"):
            table.add_column(f"{name}, {speed:g} GB/s", justify="right")
    none = row.priced[-1][0]
    for each in row.priced[-1]:
        cells = []
        for cluster in (0, len(speeds) - 1):
            times, base = each.times[cluster], none.times[cluster].total
            cells += [f"{times.predictor / base:.1%}", f"{times.copies / base:.1%}"]
            cells += [f"{times.total / base:.3f}", f"{times.published / base:.3f}"]
        right = "-" if each.accuracy is None else f"{each.accuracy:.1%}"
        table.add_row(each.name, right, f"{each.error:.1%}", f"{each.imbalance:.3f}", *cells)
    return table


def _numbers(row: Row, clusters: int) -> dict[str, Any]:
    """Return the numbers of a load for the file: leads at every skew, and predictors at that of the trace."""
    return {
        "skews": row.skews,
        "lead_of_distribution": {
            name: [
                [lead(priced, number, published=flag) for number in range(clusters)] for priced in row.priced
            ]
            for name, flag in (("published", True), ("as_layers_run", False))
        },
        "predictors": [_plain(each) for each in row.priced[-1]],
    }


def _plain(priced: Priced) -> dict[str, Any]:
    return priced._asdict() | {"times": [times._asdict() for times in priced.times]}


if __name__ == "__main__":
    sys.exit(run_program(main, Predictors))
