"""``python -m experiments.compile_time WHAT``: list every program that JAX compiles, what it costs, and why.

    python -m experiments.compile_time flax      # the loop of the Flax guide, with some batches
    python -m experiments.compile_time learn     # a short reinforcement-learning run
    python -m experiments.compile_time plan      # the first plan of a large model by ReLibra
    python -m experiments.compile_time tests     # pytest with the remaining arguments; the slowest twenty tests

Nothing is read from the compilation cache. Seconds are wall-clock seconds of one process; run it on idle cores.
"""

import argparse
import collections
import contextlib
import dataclasses
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from rich.table import Table

TRACED: Final = "/jax/core/compile/jaxpr_trace_duration"
"""JAX's event at the end of tracing, with the name of the function."""
SLOWEST: Final = 20
"""The number of tests that are listed."""
TESTS: Final[list[tuple[float, str, list["Program"]]]] = []
"""The seconds, name and programs of every test that pytest has run."""


@dataclasses.dataclass(kw_only=True)
class Program:
    """A compiled program."""

    name: str
    tracing: float
    """Seconds of tracing, with the functions that it calls."""
    lowering: float
    compiling: float
    instructions: int = 0
    """The number of StableHLO instructions."""

    @property
    def seconds(self) -> float:
        """The seconds from the call to the compiled program."""
        return self.tracing + self.lowering + self.compiling


@dataclasses.dataclass
class Log:
    """What was compiled in a block."""

    programs: list[Program] = dataclasses.field(default_factory=list)
    causes: dict[str, list[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    """JAX's explanations why a function was traced again, by the function's name."""


class _Causes(logging.Handler):
    """Collects the explanations of JAX why functions are traced again."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if found := re.search(r"for (\S+) defined", text):
            reason = " ".join(line.strip() for line in text.splitlines()[2:])
            self.log.causes[found[1].strip("_")].append(reason)


@contextlib.contextmanager
def log_programs() -> Iterator[Log]:
    """Record every program that is compiled in the block, with nothing read from the compilation cache."""
    # Imported here, because pytest's plugins are imported before the hook that checks annotated shapes.
    from relibra_jax.support.programs import COMPILED, LOWERED, program_name

    log, traced, lowered = Log(), collections.defaultdict(float), {}

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        name = program_name(details)
        if event == TRACED:
            # A function that another one calls is traced inside it, so only its own last tracing counts.
            traced[name] = duration_secs
        elif event == LOWERED:
            lowered[name] = duration_secs
        elif event == COMPILED:
            parts = traced.pop(name, 0.0), lowered.pop(name, 0.0), duration_secs
            log.programs.append(Program(name=name, tracing=parts[0], lowering=parts[1], compiling=parts[2]))

    handler, logger = _Causes(log), logging.getLogger("jax")
    keep_before = jax.config.jax_enable_compilation_cache
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name, value, before in (
            ("jax_explain_cache_misses", True, False),
            ("jax_enable_compilation_cache", False, keep_before),
            ("jax_dump_ir_to", folder, ""),
        ):
            jax.config.update(name, value)
            stack.callback(jax.config.update, name, before)
        # JAX reads whether the cache is on only once.
        compilation_cache.reset_cache()
        stack.callback(compilation_cache.reset_cache)
        propagate, logger.propagate = logger.propagate, False
        stack.callback(setattr, logger, "propagate", propagate)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        jax.monitoring.register_event_duration_secs_listener(listen)
        stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
        yield log
        for program, count in zip(log.programs, _instructions(Path(folder)), strict=False):
            program.instructions = count


def _instructions(folder: Path) -> list[int]:
    """Return the number of instructions of every dumped program, in the order of compilation."""
    files = sorted(folder.glob("jax_ir*_compile.mlir"))
    return [len(re.findall(r"^\s+%\S+ = ", file.read_text(), re.MULTILINE)) for file in files]


def programs_table(log: Log, title: str) -> Table:
    """Return a table of the programs by name, the most expensive first."""
    table = Table(title=title, title_justify="left")
    for column in ("program", "times", "tracing s", "lowering s", "compiling s", "instructions"):
        table.add_column(column, justify="left" if column == "program" else "right")
    table.add_column("why again", overflow="fold")
    by_name: dict[str, list[Program]] = collections.defaultdict(list)
    for program in log.programs:
        by_name[program.name].append(program)
    for name, group in sorted(by_name.items(), key=lambda item: -sum(one.seconds for one in item[1])):
        sums = (sum(getattr(one, part) for one in group) for part in ("tracing", "lowering", "compiling"))
        reasons = log.causes.get(name, [])[-1:] if len(group) > 1 else []
        table.add_row(
            name,
            str(len(group)),
            *(f"{value:.2f}" for value in sums),
            f"{sum(one.instructions for one in group):,}",
            " ".join(reasons)[:200],
        )
    return table


def run_flax(batches: int) -> None:
    """Run the loop of the Flax guide."""
    from experiments.examples import flax_loop

    flax_loop.main(batches=batches)


def run_learn(steps: int) -> None:
    """Run a short reinforcement-learning run, with the settings of the demo."""
    from experiments.rl.configs import Train
    from experiments.rl.train import run_train

    with tempfile.TemporaryDirectory() as folder:
        run_train(Train(warmup_steps=2, steps=steps, out=Path(folder) / "run"), Console())


def run_plan(_: int) -> None:
    """Plan one batch of Qwen3-235B's shape, 94 layers x 32 micro-batches x 128 experts, with ReLibra."""
    import numpy as np

    from relibra_jax import PlanRequest, Topology, relibra

    topology = Topology(num_nodes=4, ranks_per_node=8, num_experts=128, replica_slots=2)
    popular = np.random.default_rng(0).lognormal(0, 1, (32, 94, 1, 1, 128))
    load = (1000 * popular).astype(np.int32).repeat(4, axis=2).repeat(8, axis=3)
    planner = relibra()
    state = planner.init(topology, 94, key=jax.random.key(0))
    jax.block_until_ready(jax.jit(planner.update, static_argnums=2)(PlanRequest(load), state, topology))


RUNS: Final[dict[str, tuple[Callable[[int], None], int]]] = {
    "flax": (run_flax, 3),
    "learn": (run_learn, 3),
    "plan": (run_plan, 1),
}
"""What can be run, with the default number of batches or steps."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Any:
    """Record what a test compiles, its fixtures included. This module is a plugin of pytest."""
    begin = time.perf_counter()
    with log_programs() as log:
        result = yield
    TESTS.append((time.perf_counter() - begin, item.nodeid, log.programs))
    return result


def pytest_terminal_summary() -> None:
    """Print what the slowest tests compile."""
    programs = [program for _, _, programs in TESTS for program in programs]
    parts = (sum(getattr(one, part) for one in programs) for part in ("tracing", "lowering", "compiling"))
    title = (
        f"the {SLOWEST} slowest of {len(TESTS)} tests, which took {sum(seconds for seconds, _, _ in TESTS):.0f} s;"
        f" {len(programs)} programs: {', '.join(f'{value:.0f}' for value in parts)} s of tracing, lowering, compiling"
    )
    table = Table("test", title=title, title_justify="left")
    for column in ("seconds", "of which compiling", "programs"):
        table.add_column(column, justify="right")
    table.add_column("slowest programs", overflow="fold")
    for seconds, name, programs in sorted(TESTS, reverse=True, key=lambda test: test[0])[:SLOWEST]:
        slow = sorted(programs, key=lambda one: -one.seconds)[:3]
        table.add_row(
            name.split("/")[-1],
            f"{seconds:.1f}",
            f"{sum(one.seconds for one in programs):.1f}",
            str(len(programs)),
            ", ".join(f"{one.name} {one.seconds:.1f}" for one in slow),
        )
    Console(width=160).print(table)


def main(args: Sequence[str] | None = None) -> int:
    """Run what the arguments name, and print its programs.

    Args:
        args: the arguments. None stands for those of the process.

    Returns:
        The exit status: that of pytest, or 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compile_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=(*RUNS, "tests"))
    parser.add_argument("--steps", type=int, help="the number of batches or steps (default: 3)")
    options, rest = parser.parse_known_args(args)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.what == "tests":
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "experiments.compile_time", *rest]
        return subprocess.run(command).returncode
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run, steps = RUNS[options.what]
    begin, cpu = time.perf_counter(), time.process_time()
    with log_programs() as log:
        run(options.steps or steps)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    title = f"{options.what}: {len(log.programs)} programs, {cpu:.0f} CPU seconds, {wall:.0f} s in all"
    console.print(programs_table(log, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
