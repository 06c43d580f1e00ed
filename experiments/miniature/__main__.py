"""A cluster in miniature on one Linux machine: one process for each rank, links and cores limited.

    python -m experiments.miniature run --nodes 2 --ranks 2 -- COMMAND      any command on every rank
    python -m experiments.miniature compare TRACE --twin gpt-oss-20b         planners, measured and modelled
    python -m experiments.miniature learn --nodes 2 --ranks 2                training runs with several settings

Every rank has a network namespace, with links to a switch of a fast rate to its own node and a slow one to others, and
a share of a core. All of it ends with the command, however that ends.
"""

import dataclasses
import sys
from typing import Annotated

import tyro

from experiments.miniature.cluster import Miniature
from experiments.miniature.compare import Compare, compare
from experiments.miniature.faults import Fault
from experiments.miniature.launch import run_on_ranks
from experiments.miniature.learn import Learn, learn
from experiments.program import run_program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Run a command on every rank. Rank 0 prints."""

    miniature: Annotated[Miniature, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Miniature)
    """The sizes."""
    fault: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A fault to cause: ``down:1@20+10`` takes down the link of rank 1 after 20 s for 10 s, ``slow:1@20`` gives it a
    tenth of its rates for good, ``lose:1@20+10`` makes it lose packets, and ``stop:1@20+10`` stops the rank's process.
    May be given several times."""
    command: Annotated[tuple[str, ...], tyro.conf.Positional]
    """The command and its arguments, after ``--``. It finds the other ranks by JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID."""


def main(options: Run | Compare | Learn) -> int:
    """Run a command, or compare planners or training runs."""
    if isinstance(options, Compare):
        return compare(options)
    if isinstance(options, Learn):
        return learn(options)
    if not options.command:
        raise ValueError("no command to run: give one after --")
    faults = [Fault.parse(text) for text in options.fault]
    return run_on_ranks(options.miniature, options.command, faults=faults)


if __name__ == "__main__":
    sys.exit(
        run_program(
            main,
            Annotated[Run, tyro.conf.subcommand("run")]
            | Annotated[Compare, tyro.conf.subcommand("compare")]
            | Annotated[Learn, tyro.conf.subcommand("learn")],
            description=__doc__,
        )
    )
