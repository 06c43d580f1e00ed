"""The log of a run's metrics: JSON lines, event files if tensorboardX is installed, and the user's own writer."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from experiments.rl.metrics import scalars_of
from relibra_jax.support.atomic_write import write_atomically
from relibra_jax.support.outside import import_outside


@runtime_checkable
class Writer(Protocol):
    """An object that metrics are written to, such as a run of Weights & Biases.

    If it has a method ``finish()``, the log calls it at the end of the run.
    """

    def log(self, metrics: dict[str, int | float], step: int) -> object:
        """Write the metrics of a step, under the names of `experiments.rl.metrics.METRICS`."""


type OpenWriter = Callable[[Path, dict[str, Any]], Writer]
"""A function of the folder and the settings (with ``seed``) of one seed's run that opens its writer."""


def import_writer(name: str) -> OpenWriter:
    """Import a function that opens a writer.

    Args:
        name: the function as ``module:function``, in the current folder or on Python's module path.

    Returns:
        The function.

    Raises:
        ValueError: if the name does not have this form, there is no such module or function, or the function does not
            take a folder and settings.
    """
    function = import_outside("writer", name)
    try:
        inspect.signature(function).bind(Path(), {})
    except TypeError as error:
        raise ValueError(f"writer {name!r} must be a function of (folder, settings): {error}") from error
    return function


def open_checked(open_writer: OpenWriter, folder: Path, settings: dict[str, Any]) -> Writer:
    """Open a writer and check that it can log.

    Args:
        open_writer: the function that opens the writer.
        folder: the folder of the run.
        settings: the settings of the run.

    Returns:
        The writer.

    Raises:
        ValueError: if the function returns an object without ``log``.
    """
    writer = open_writer(folder, settings)
    if not isinstance(writer, Writer):
        name = getattr(open_writer, "__qualname__", repr(open_writer))
        raise ValueError(
            f"writer {name} returned a {type(writer).__name__}: it must return an object with log(metrics, step=)"
        )
    return writer


class MetricsLog:
    """The open metrics log of a run.

    Args:
        folder: the folder of ``metrics.jsonl``.
        step: the step at which the run starts or resumes. Lines from this step on are dropped, because the run writes
            them again.
        writer: an additional writer. None for no additional one.
    """

    def __init__(self, folder: Path, step: int, writer: Writer | None = None):
        path = folder / "metrics.jsonl"
        earlier_lines = [line for line in read_metrics(path) if line["step"] < step]
        with write_atomically(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in earlier_lines))
        self._file = path.open("a")
        self._writers = [each for each in (_tensorboard(folder, step), writer) if each is not None]

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        for writer in self._writers:
            if hasattr(writer, "finish"):
                writer.finish()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Append a line to the file, flush it, and pass its numbers to the writers."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.log(scalars_of(metrics), step=step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, except a last line that a killed process left incomplete.

    A missing file has no lines.
    """
    if not path.exists():
        return []
    complete_text = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete_text.splitlines()]


class _Board:
    """TensorBoard's event files as a writer."""

    def __init__(self, board: Any):
        self._board = board

    def log(self, metrics: dict[str, int | float], step: int) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def finish(self) -> None:
        self._board.close()


def _tensorboard(folder: Path, step: int) -> _Board | None:
    """Open a writer of event files from ``step`` on. None if tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return _Board(SummaryWriter(str(folder), purge_step=step))
