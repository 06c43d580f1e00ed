"""Look at a training run: ``python -m experiments.watch RUN``, while it goes or afterwards.

It writes one HTML file that loads nothing from elsewhere, or serves it on this machine. Curves by seed, imbalance by
layer and step, the last step by rank, and sample texts come from ``seed-*/metrics.jsonl`` and ``samples.jsonl``.
"""

import dataclasses
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments.program import run_program
from experiments.watch.page import run_page
from experiments.watch.run_data import read_run
from experiments.watch.server import ADDRESS, serve_run
from relibra_jax.support.atomic_write import write_atomically
from relibra_jax.support.output_paths import check_page

console = Console()


@dataclasses.dataclass(frozen=True)
class Watch:
    """Show a training run as an HTML page."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of the run."""
    out: Path | None = None
    """The file to write. None for ``watch.html`` in the folder of the run."""
    serve: int | None = None
    """The port on which to serve the page instead, on this machine alone, until Ctrl-C. 0 chooses one. The page reloads
    itself."""


def main(options: Watch) -> None:
    """Write or serve the page.

    Args:
        options: the options of the command.

    Raises:
        ValueError: if the folder contains no run, ``out`` is a folder, or the port cannot be used.
    """
    if options.serve is not None and options.out is not None:
        raise ValueError("serve and out exclude each other: a page is served or written")
    run = read_run(options.run)
    if options.serve is not None:
        with serve_run(options.run, options.serve) as server:
            console.print(f"http://{ADDRESS}:{server.server_port}/ until Ctrl-C", highlight=False)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return
    path = options.run / "watch.html" if options.out is None else options.out
    check_page(path, option="out", example="watch.html")
    with write_atomically(path) as part:
        part.write_text(run_page(run), encoding="utf-8")
    console.print(f"page: {path}", highlight=False, soft_wrap=True)


def run(args: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the program; return the exit status."""
    return run_program(main, Watch, args, description=__doc__)


if __name__ == "__main__":
    sys.exit(run())
