"""Metrics of a run on disk: a JSON line each, and TensorBoard's event files if tensorboardX is installed."""

import json
from pathlib import Path
from typing import Any

from relibra_jax.atomic_write import write_atomically


class MetricsLog:
    """The open log of a run.

    Args:
        folder: the folder of ``metrics.jsonl``.
        step: the step that the run is at; lines from there on are dropped, a run that goes on writes them anew.
    """

    def __init__(self, folder: Path, step: int):
        path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] < step]
        with write_atomically(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")
        self._board = _tensorboard(folder, step)

    def __enter__(self) -> "MetricsLog":
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
