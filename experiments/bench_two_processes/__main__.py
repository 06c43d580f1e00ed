"""``python -m experiments.bench_two_processes``: time optimizer updates on two processes, as two one-rank nodes.

Each process is pinned to one core and single-threaded. The processes communicate through gloo on the loopback
interface, a real network that is slow compared with a core. A timed update includes the push of residents, the forward
and backward pass of a stack of layers over every micro-batch, the return of residents' gradients, clipping and AdamW's
step. The tables of layers are prepared once per batch, outside the update, and have a column of their own.

A calculation by hand shows when residents pay. Once per update, a resident's weights cross to its node and its
gradients cross back: 2 * 3 * D * F * 4 bytes. A token copy crosses four times per layer, in dispatch and combine,
forward and backward: 4 * D * 4 bytes. (With rematerialisation, which is not used here, it crosses six times.) On the
flat path a resident therefore pays from 1.5 * F token copies per update that stay in their node because of it, as it
then saves more bytes than it costs. For F = 128 this is 192 copies. From 600 tokens of a node, the mean expert
of 32 with top-4 gets 75 copies in a micro-batch. These are 300 copies in four micro-batches, 600 in eight and 2,400 in
thirty-two. On the hierarchical path only those tokens count that cross for no other expert. A replica of EPLB crosses
like a resident, but in every micro-batch.

`balanced` has the same tokens, routed to random experts so that all experts get the same number, without residents or
replicas. Each planner's buffers are those of its largest batch, as in a run that keeps its compiled step. ReLibra has
no replicas here, because its replicas stay inside a node and a node has only one rank.
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
from experiments.program import TraceName, run_program
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.support.atomic_write import write_json
from relibra_jax.traces.read import read_trace

SKEW = 1.5
"""The skew of the synthetic routing; two ranks with sixteen experts each would even out a smaller skew."""
MEAN_TOKENS = 300
"""The mean length of the synthetic samples in tokens, equal to that of the recorded trace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTwoProcesses:
    """Time updates on two cores, and count the bytes that cross between them."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    routing: tuple[Literal["trace", "synthetic"], ...] = ("trace", "synthetic")
    """The kinds of routing to run."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Settings)
    out: Path | None = None
    """The JSON file for all results. None writes no file."""
    process: Annotated[tuple[int, int] | None, tyro.conf.arg(name="as-process")] = None
    """The number of this process and the port of process 0. The command passes it to its child processes."""


def launch() -> None:
    """Start both processes, each on its own core; process 0 prints the results."""
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
        sys.exit(f"the two processes ended with exit statuses {status}")


@contextlib.contextmanager
def _on_core(number: int):
    """Make processes that start inside this context run on one core, including their first threads."""
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
    """Run all measurements in one of the two processes.

    Args:
        config: the settings.
        number: the number of this process.
        port: the port of process 0.
    """
    # Without asynchronous dispatch, programs run in call order, so both processes are always in the same exchange.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    settings, console = config.settings, Console(quiet=number > 0, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"jax {jax.__version__}, two processes, one core each; D={settings.width}, F={settings.hidden}, float32;"
        f" ReLibra: {settings.resident_slots} resident slots per rank, EPLB: {settings.replica_slots} replica slots",
        highlight=False,
    )
    skewed = synthetic_trace(skew=SKEW, mean_tokens=MEAN_TOKENS, layers=settings.layers)
    all_lines: list[Line] = []
    skewed = skewed._replace(name=f"synthetic, Zipf {SKEW}")
    for trace in (read_trace(config.trace) if routing == "trace" else skewed for routing in config.routing):
        for path in settings.paths:
            with console.status("") as status:
                lines = list(run_path(trace, path, settings, status.update))
            all_lines += lines
            for table in make_tables(lines):
                console.print(table)
            if config.out and not number:
                _write(config.out, make_report(all_lines, settings))


def _write(path: Path, report: dict[str, object]) -> None:
    """Write the results so far, so that a stopped run keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)


def main(config: BenchTwoProcesses) -> None:
    """Start both processes, or run as one of them.

    Args:
        config: the settings. ``process`` is None in the process that starts the other two.
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
