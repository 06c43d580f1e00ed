"""What a long run needs around its steps: devices, a clock, metrics on disk, and a way to be stopped."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax

from relibra_jax.atomic_write import write_atomically


class Phases:
    """Seconds of the named parts of a step, and of all of it.

    >>> phases = Phases()
    >>> with phases("rollout"):
    ...     pass
    >>> list(phases.report())
    ['seconds', 'phases']
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - start

    def report(self) -> dict[str, Any]:
        """For the metrics."""
        return {"seconds": time.perf_counter() - self._start, "phases": self._spent}


def host_devices(count: int) -> list[jax.Device]:
    """The first ``count`` devices; on a CPU so many host devices are made, if JAX has not started yet.

    Raises:
        ValueError: there are fewer.
    """
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A backend that has started keeps its devices.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:
        raise ValueError(f"{count} ranks need as many devices, there are {len(jax.devices())}")
    return jax.devices()[:count]


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets, so that the step in progress can be finished and saved. The second one
    stops at once, as if there were none of this."""
    asked = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def ask(*_: object) -> None:
        asked.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class MetricsLog:
    """Metrics of a run, a JSON line each, and in TensorBoard's form if it is installed.

    Args:
        folder: of ``metrics.jsonl``.
        step: lines from here on are dropped: a run that goes on writes them anew.
    """

    def __init__(self, folder: Path, step: int):
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["step"] < step]
        with write_atomically(self.path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a")
        self._board = _tensorboard(folder, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Append a line, whole and at once."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{metrics['kind']}/{name}", value, step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without one that a kill has cut off; none if there is no file."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _tensorboard(folder: Path, step: int) -> Any:
    """A writer of event files from ``step`` on, None where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)


def keep_compiled(folder: Path) -> None:
    """Keep compiled programs in ``folder`` for later processes, unless the user has chosen another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
