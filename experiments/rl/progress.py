"""What a run prints while it goes: one line a step, and a bar with the programs that JAX compiles."""

import collections
import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from experiments.rl.metrics import WARM_UP
from experiments.rl.step_clock import PLANNING
from relibra_jax.support.programs import COMPILED, LOWERED, program_name

COLUMNS: Final = (
    ("step", 7),
    ("reward", 7),
    ("loss", 7),
    ("len", 5),
    ("imbal", 6),
    ("tok/s", 6),
    ("gen", 6),
    ("plan", 6),
    ("recmp", 6),
    ("updt", 6),
    ("model", 6),
    ("ran", 6),
    ("left", 6),
)
"""The columns of the line of a step, and their widths, which fit a terminal of 80 characters."""
COLUMNS_EXPLAINED: Final = (
    "reward: mean; loss: of the policy (of the answers in the warm-up); len: mean tokens of a response; imbal: max /"
    " mean of rank load under the plan; gen, plan (with sizes and migration), recmp, updt: seconds of the phases;"
    " model: modelled time of recompute and updates of one epoch under the plan, as priced; ran: the same as it ran"
    " here; left: until the end of the seed, without evaluations"
)
"""The explanation of the columns."""
RECENT: Final = 10
"""The number of last steps of a kind from which the time left is estimated."""


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


class TimeLeft:
    """An estimate of the time left of a run, from the last steps of each kind.

    >>> time_left = TimeLeft({"warm-up": 2, "learn": 3})
    >>> time_left.seconds_after({"kind": "warm-up", "time/step_seconds": 0.5}) is None
    True
    >>> _ = time_left.seconds_after({"kind": "warm-up", "time/step_seconds": 0.5})
    >>> time_left.seconds_after({"kind": "learn", "time/step_seconds": 4.0})
    8.0
    """

    def __init__(self, steps: Mapping[str, int]):
        """Begin with the number of steps of each kind that are still to be made."""
        self._steps = dict(steps)
        self._recent = {kind: collections.deque[float](maxlen=RECENT) for kind in steps}

    def seconds_after(self, metrics: Mapping[str, Any]) -> float | None:
        """Count a step by its metrics; return the seconds left. None while no step of a kind to come was made."""
        kind = metrics["kind"]
        self._steps[kind] -= 1
        self._recent[kind].append(metrics["time/step_seconds"])
        to_come = {kind: steps for kind, steps in self._steps.items() if steps > 0}
        if not all(self._recent[kind] for kind in to_come):
            return None
        return float(sum(steps * statistics.median(self._recent[kind]) for kind, steps in to_come.items()))


def heading() -> str:
    """Return the heading of the lines that `status_text` formats."""
    return "".join(f"{name:>{width}}" for name, width in COLUMNS)


def status_text(metrics: Mapping[str, Any], *, step: int, total: int, left: float | None) -> str:
    """Format the metrics of a warm-up or learning step as one line of at most 80 characters, under `heading`.

    Args:
        metrics: the metrics of the step. What it does not have is ``-``.
        step: the number of the step, from 1.
        total: the number of all steps.
        left: the estimated seconds left. None if unknown.
    """

    of_phase = {
        name: metrics.get(f"time/{name}_seconds")
        for name in ("generate", "recompute", "update", "modelled_plan")
    }
    planning = [metrics[f"time/{name}_seconds"] for name in PLANNING if f"time/{name}_seconds" in metrics]
    cells = (
        f"{step}/{total}",
        _number(metrics.get("reward/mean")),
        _number(metrics.get("warmup/loss" if metrics["kind"] == WARM_UP else "policy/loss")),
        _number(metrics.get("response/tokens"), decimals=1),
        _number(metrics.get("balance/imbalance")),
        _number(metrics["speed/tokens_per_second"]),
        format_seconds(of_phase["generate"]),
        format_seconds(sum(planning) if planning else None),
        format_seconds(of_phase["recompute"]),
        format_seconds(of_phase["update"]),
        format_seconds(of_phase["modelled_plan"]),
        format_seconds(ran_seconds(metrics)),
        format_seconds(left),
    )
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def ran_seconds(metrics: Mapping[str, Any]) -> float | None:
    """Return the seconds in which recompute and updates of one epoch ran, which ``time/modelled_plan_seconds`` models.

    None for steps that had none.

    >>> ran_seconds({"time/recompute_seconds": 0.5, "batch/tokens": 300, "speed/update_tokens_per_second": 100.0})
    3.5
    """
    recompute, speed = metrics.get("time/recompute_seconds"), metrics.get("speed/update_tokens_per_second")
    if recompute is None or not speed:
        return None
    return float(recompute + metrics["batch/tokens"] / speed)


def format_seconds(seconds: int | float | None) -> str:
    """Format a duration in at most five characters; ``-`` for None.

    >>> [format_seconds(seconds) for seconds in (None, 0.0012, 0.25, 12.3, 150, 7260, 356400)]
    ['-', '1.2ms', '0.25', '12.3', '2m30', '2h01', '99h00']
    """
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{1e3 * seconds:.{1 if seconds < 0.00995 else 0}f}ms"
    if seconds < 99.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}"


def _number(value: int | float | None, *, decimals: int = 3) -> str:
    """Format a number with three or four digits, and at most these decimals; ``-`` for None.

    >>> [_number(value) for value in (None, -0.0123, 14.21, 123.4, 56789)]
    ['-', '-0.012', '14.2', '123', '57k']
    """
    if value is None:
        return "-"
    size = abs(value)
    if size >= 9999.5:
        return f"{value / 1e3:.0f}k"
    return f"{value:.{decimals if size < 9.9995 else 1 if size < 99.95 else 0}f}"
