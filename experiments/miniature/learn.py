"""The variants of a sweep on a miniature: generation, planning, recompute and updates, with measured times.

Every rank runs ``python -m experiments.miniature.learn`` with the arguments of `experiments.run`.
"""

import dataclasses
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import tyro
from rich.table import Table

from experiments import run
from experiments.miniature.cluster import Miniature
from experiments.miniature.launch import run_on_ranks
from experiments.miniature.report import describe_machine, new_table
from experiments.miniature.sharing import shared_programs
from experiments.program import wide_console
from experiments.rl.config_file import read_config
from experiments.rl.metrics import LEARN
from experiments.rl.metrics_log import read_seed
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer

MEDIANS: Final = ("speed/tokens_per_second", "time/step_seconds", "time/exposed_seconds", "balance/imbalance")
"""The metrics of which the table has medians."""
LEARNED: Final = ("policy/loss", "policy/gradient_norm", "reward/mean")
"""The metrics that planners must not change, unlike other settings."""
COMPILING: Final = 2
"""The number of first steps that compile, whose times do not count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learn:
    """Make a training run for each variant of a configuration, and compare their speeds and gradients."""

    miniature: Annotated[Miniature, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Miniature)
    """The sizes."""
    config: str = "planners"
    """The name or file of a configuration with variants, for as many ranks."""
    steps: int = 7
    """The number of learning steps, of which the first two compile."""
    out: Path = Path("out/miniature-learn")
    """The folder of the runs and results."""
    settings: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Other settings of all runs after ``--``, as `experiments.run` takes them."""


def learn(options: Learn) -> int:
    """Make the runs, print their table and write ``learn.json``; return the exit status."""
    check_integer("steps", options.steps, least=COMPILING + 1)
    variants, sizes = read_config(options.config).variants, options.miniature
    if not variants:
        raise ValueError(f"config={options.config}: the configuration has no variants to compare")
    shared = [
        "--nodes",
        str(sizes.nodes),
        "--ranks-per-node",
        str(sizes.ranks),
        "--steps",
        str(options.steps),
    ]
    rows: dict[str, Any] = {}
    program = [
        sys.executable,
        "-m",
        "experiments.miniature.learn",
        options.config,
        *shared,
        *options.settings,
    ]
    for name in variants:
        command = [*program, "--variant", name, "--out", str(options.out)]
        if status := run_on_ranks(sizes, command):
            return status
        rows[name] = measure(read_seed(options.out / name, 0))
    report = {"settings": dataclasses.asdict(sizes), "options": [*shared, *options.settings], "rows": rows}
    path = options.out / "learn.json"
    write_json(path, report | describe_machine())
    console = wide_console()
    console.print(make_table(rows))
    console.print(f"numbers: {path}")
    return 0


def measure(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the metrics of the learning steps of a run that are compared.

    Args:
        lines: the metrics of all steps.
    """
    steps = [line for line in lines if line["kind"] == LEARN]
    return {name: [step[name] for step in steps] for name in (*MEDIANS, *LEARNED)}


def make_table(rows: Mapping[str, Mapping[str, list[float]]]) -> Table:
    """Return the table of medians without the first steps, and the largest relative difference of gradient norms.

    Args:
        rows: the metrics of each run, as `measure` returns them.
    """
    columns = ("tokens/s", "s per step", "exposed planning, s", "imbalance", "gradients differ by")
    table = new_table("Training, medians of the steps that do not compile", "variant", *columns)
    first = next(iter(rows.values()))["policy/gradient_norm"]
    for name, row in rows.items():
        medians = [statistics.median(row[metric][COMPILING:]) for metric in MEDIANS]
        norms = zip(first, row["policy/gradient_norm"], strict=True)
        difference = max(abs(other / one - 1) if one else abs(other) for one, other in norms)
        table.add_row(name, *(f"{value:.3g}" for value in medians), f"{difference:.1e}")
    return table


if __name__ == "__main__":
    with shared_programs():
        sys.exit(run.main(sys.argv[1:]))
