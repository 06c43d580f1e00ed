"""The progress bar of a run, which shows the last step's metrics and the programs that JAX compiles."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from experiments.rl.metrics import WARM_UP
from relibra_jax.support.programs import COMPILED, LOWERED, program_name


@contextlib.contextmanager
def tell_compilations(tell: Callable[[str], None]) -> Iterator[None]:
    """Call a function at the start and the end of every compilation in the block.

    Args:
        tell: the function to call, on the thread that compiles. At the start of a compilation its argument is the name
            of the compiled function. At the end it is the name of a program that another thread is still compiling, or
            "" if there is none.

    >>> def double(x):
    ...     return 2 * x
    >>> names = []
    >>> with tell_compilations(names.append):
    ...     _ = jax.jit(double)(1.0)
    >>> names
    ['double', '']
    """

    running: dict[int, str] = {}

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == LOWERED:
            name = program_name(details)
            running[threading.get_ident()] = name
            tell(name)
        elif event == COMPILED:
            running.pop(threading.get_ident(), None)
            tell(next(iter(list(running.values())), ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def progress_bar(console: Console, name: str, *, total: int) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar, which names the programs that are being compiled; yield it and its only task.

    Args:
        console: the console to show it on.
        name: the description of the bar.
        total: the number of steps.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    status = TextColumn("{task.fields[status]}")
    with Progress(*columns, status, console=console, transient=True) as bar:
        task_id = bar.add_task(name, total=total, status="")

        def show(program: str) -> None:
            bar.update(task_id, status=f"compiling {program}" if program else "")

        with tell_compilations(show):
            yield bar, task_id


def status_text(metrics: dict[str, Any]) -> str:
    """Format the metrics of a step for the progress bar."""
    speed = f"{metrics['speed/tokens_per_second']:.0f} tokens/s"
    if metrics["kind"] == WARM_UP:
        return f"warm-up, loss {metrics['warmup/loss']:.3f}, {speed}"
    reward = "none" if metrics["reward/mean"] is None else f"{metrics['reward/mean']:.3f}"
    balance = (
        f"imbalance {metrics['balance/imbalance']:.3f} (static {metrics['balance/imbalance_static']:.3f})"
    )
    return f"reward {reward}, {balance}, {speed}"
