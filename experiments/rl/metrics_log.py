"""Metrics of a run on disk: a JSON line each, TensorBoard's event files if tensorboardX is installed, and a writer of
the user's own."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from experiments.rl.metrics import scalars_of
from relibra_jax.atomic_write import write_atomically
from relibra_jax.cli.outside import import_outside


@runtime_checkable
class Writer(Protocol):
    """What metrics are written to, such as a run of Weights & Biases. If it has ``finish()``, it is called at the end
    of the run."""

    def log(self, metrics: dict[str, int | float], step: int) -> object:
        """Write the metrics of a step, by the names of `experiments.rl.metrics.METRICS`."""


type OpenWriter = Callable[[Path, dict[str, Any]], Writer]
"""Opens the writer of the run of one seed, given its folder and all its settings, ``seed`` among them."""


def import_writer(name: str) -> OpenWriter:
    """Import what opens a writer, by its name.

    Args:
        name: ``module:function``, of the current folder or where Python finds modules.

    Raises:
        ValueError: if the name is of another form, there is no such module or function, or it does not take a folder
            and settings.
    """
    found = import_outside("writer", name)
    try:
        inspect.signature(found).bind(Path(), {})
    except TypeError as error:
        raise ValueError(f"writer {name!r} must be a function of (folder, settings): {error}") from error
    return found


def open_checked(open_writer: OpenWriter, folder: Path, settings: dict[str, Any]) -> Writer:
    """Open a writer.

    Raises:
        ValueError: if what is returned has no ``log``.
    """
    writer = open_writer(folder, settings)
    if not isinstance(writer, Writer):
        name = getattr(open_writer, "__qualname__", repr(open_writer))
        raise ValueError(
            f"writer {name} returned a {type(writer).__name__}: expected an object with log(metrics, step=)"
        )
    return writer


class MetricsLog:
    """The open log of a run.

    Args:
        folder: the folder of ``metrics.jsonl``.
        step: the step that the run is at; lines from there on are dropped, a run that goes on writes them anew.
        writer: a further writer.
    """

    def __init__(self, folder: Path, step: int, writer: Writer | None = None):
        path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] < step]
        with write_atomically(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in kept))
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
        """Append a line, whole and at once, and give its numbers to the writers."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for writer in self._writers:
            writer.log(scalars_of(metrics), step=step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without one that a kill has cut off; none if there is no file."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


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
    """A writer of event files from ``step`` on, None where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return _Board(SummaryWriter(str(folder), purge_step=step))
