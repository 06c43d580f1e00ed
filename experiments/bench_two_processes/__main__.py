"""``python -m experiments.bench_two_processes``: an optimizer update over two real processes, as two nodes of one rank.

Each process is one node: one rank, pinned to one core and single-threaded. They talk through gloo on the loopback
interface, a real network that is slow beside a core. A timed update is everything that a contender does in one: the
push of residents, forward and backward of a stack of layers over every micro-batch, the return of residents' gradients,
clipping and AdamW's step. The layers' tables are prepared once a batch, outside of it, and have a column of their own.

By hand: a resident's weights cross to its node and its gradients back, once an update: 2 * 3 * D * F * 4 bytes. A token
copy crosses four times in a layer, dispatch and combine, forward and backward: 4 * D * 4 bytes; six times with
rematerialisation, which is not used here. So on the flat path a resident of a layer pays for itself from 1.5 * F token
copies an update that stay in their node for it. With F = 128 that is 192, and from 600 tokens of a node the mean expert
of 32 with top-4 gets 75 in a micro-batch: 300 in 4, 600 in 8, 2,400 in 32. On the hierarchical path only tokens count
that then cross for no other expert. A replica of EPLB's crosses as a resident does, but in every micro-batch.

`balanced` is as many tokens, routed to experts drawn at random so that all have as many, without residents or replicas.
Buffers are those of the largest of a contender's batches, as in a run that keeps its compiled step. One rank a node
leaves ReLibra no replicas, since they stay in their node.
"""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

from experiments.bench_two_processes.report import make_report, make_tables
from experiments.bench_two_processes.runs import Line, Settings, run_path
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.atomic_write import write_json
from relibra_jax.cli.options import TraceName
from relibra_jax.cli.parsing import run_program
from relibra_jax.traces.read import read_trace

SKEW = 1.5
"""The skew of the synthetic routing: two ranks of sixteen experts each even out what is milder."""
MEAN_TOKENS = 300
"""The mean length of the synthetic samples, that of the recorded ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTwoProcesses:
    """Time updates on two cores, and count what crosses between them."""

    trace: TraceName = None
    """A trace by name or path (.npz); else the one that RELIBRA_TRACE gives, else the recorded one of this project."""
    routing: tuple[Literal["trace", "synthetic"], ...] = ("trace", "synthetic")
    """What routing is run."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Settings)
    out: Path | None = None
    """A file for everything that was found, as JSON."""
    process: Annotated[tuple[int, int] | None, tyro.conf.arg(name="as-process")] = None
    """Number of this process and the port of process 0; given by the command to its own children."""


def launch() -> None:
    """Start both processes, each on a core of its own; process 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.bench_two_processes", *sys.argv[1:], "--as-process"]
    children: list[subprocess.Popen] = []
    try:
        for number in range(2):
            with _on_core(number):
                children.append(subprocess.Popen([*command, str(number), str(port)], env=environment))
        status = [child.wait() for child in children]
    finally:
        for child in children:
            child.kill()
    if any(status):
        sys.exit(f"processes ended with {status}")


@contextlib.contextmanager
def _on_core(number: int):
    """Processes that are started here run on one core, their first threads too."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(config: BenchTwoProcesses, number: int, port: int) -> None:
    """What one process does."""
    # Programs run in the order in which they were called, so that both processes are always in the same exchange.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    settings, console = config.settings, Console(quiet=number > 0, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"jax {jax.__version__}, two processes, one core each; D={settings.width}, F={settings.hidden}, float32;"
        f" residents: {settings.resident_slots} slots a rank, EPLB: {settings.replica_slots} replica slots",
        highlight=False,
    )
    skewed = synthetic_trace(skew=SKEW, mean_tokens=MEAN_TOKENS, layers=settings.layers)
    found: list[Line] = []
    skewed = skewed._replace(name=f"synthetic, Zipf {SKEW}")
    for trace in (read_trace(config.trace) if routing == "trace" else skewed for routing in config.routing):
        for path in settings.paths:
            with console.status("") as status:
                lines = list(run_path(trace, path, settings, status.update))
            found += lines
            for table in make_tables(lines):
                console.print(table)
            if config.out and not number:
                _write(config.out, make_report(found, settings))


def _write(path: Path, report: dict[str, object]) -> None:
    """Everything found so far: a run that is stopped leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)


def main(config: BenchTwoProcesses) -> None:
    """Start both processes, or be one of them.

    Args:
        config: the settings; ``process`` is None for the process that starts the others.
    """
    if config.process is None:
        launch()
    else:
        measure(config, *config.process)


if __name__ == "__main__":
    sys.exit(
        run_program(
            main, BenchTwoProcesses, prog="python -m experiments.bench_two_processes", description=__doc__
        )
    )
