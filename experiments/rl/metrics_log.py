"""The log of a run's metrics: JSON lines of numbers and of sample texts, and a writer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from experiments.rl.sample_texts import SampleText
from experiments.rl.writers import Writer, write_line
from relibra_jax.support.atomic_write import write_atomically

METRICS_FILE: Final = "metrics.jsonl"
"""The file of metrics in the folder of a seed."""
SAMPLES_FILE: Final = "samples.jsonl"
"""The file of sample texts beside it, with a line for each learning step."""


class MetricsLog:
    """The open metrics log of a run.

    Args:
        folder: the folder of ``metrics.jsonl`` and ``samples.jsonl``.
        step: the step at which the run starts or resumes. Lines from this step on are dropped, because the run writes
            them again.
        writer: an additional writer. None for no additional one.
    """

    def __init__(self, folder: Path, step: int, writer: Writer | None = None):
        self._metrics, self._samples = (_Lines(folder / name, step) for name in (METRICS_FILE, SAMPLES_FILE))
        self._writer = writer

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._samples.close()
        if self._writer is not None and hasattr(self._writer, "finish"):
            self._writer.finish()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Append a line to the file, flush it, and pass its numbers and lists to the writer."""
        self._metrics.append({"step": step, **metrics})
        if self._writer is not None:
            write_line(self._writer, metrics, step)

    def write_samples(self, step: int, texts: Sequence[SampleText]) -> None:
        """Append some samples of a learning step to their file, and flush it."""
        self._samples.append({"step": step, "samples": list(texts)})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, except a last line that a killed process left incomplete.

    A missing file has no lines.
    """
    if not path.exists():
        return []
    complete_text = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete_text.splitlines()]


def read_seed(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Read the metrics of one seed in the folder of a run, as `read_metrics` does."""
    return read_metrics(folder / f"seed-{seed}" / METRICS_FILE)


class _Lines:
    """An open file of JSON lines, from which those from ``step`` on have been dropped."""

    def __init__(self, path: Path, step: int):
        earlier_lines = [line for line in read_metrics(path) if line["step"] < step]
        with write_atomically(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in earlier_lines))
        self._file = path.open("a")

    def close(self) -> None:
        self._file.close()

    def append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
