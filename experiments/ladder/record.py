"""The record of a ladder: an append-only file of JSON lines, one for each result and for the end of each step.

This module uses only the standard library, so it works even if JAX does not.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any, Final

from experiments.source_digest import source_digest

SOURCES: Final = (
    "pallas_kernels/**",
    "relibra_jax/**",
    "experiments",
    "experiments/gpu_day",
    "experiments/ladder",
)
"""The folders with the code that steps depend on, as patterns."""


class Record:
    """An append-only file with the results of all steps.

    Args:
        path: the path of the file, in JSON lines. The file may exist from an earlier command.
        rehearsal: whether the steps run at small sizes without a GPU. A step that passed in a rehearsal counts as
            passed only in rehearsals.
    """

    def __init__(self, path: Path, *, rehearsal: bool = False):
        self.path, self.rehearsal, self.source = path, rehearsal, source_digest(SOURCES)
        self._lock = threading.Lock()

    def add(self, **facts: Any) -> None:
        """Append one line, and flush it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.path.open("a") as file:
            # If a process was killed while it wrote, the last line has no line break.
            start = "" if not file.tell() or self.path.read_bytes().endswith(b"\n") else "\n"
            file.write(start + json.dumps({"rehearsal": self.rehearsal, **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def passed(self) -> set[str]:
        """Return the steps whose last run with this code passed, in rehearsals if this is one and else in real runs."""
        state = {
            line["step"]: line["state"]
            for line in read_record(self.path)
            if "state" in line and (line["rehearsal"], line["source"]) == (self.rehearsal, self.source)
        }
        return {step for step, last in state.items() if last == "passed"}


def read_record(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, without incomplete ones; an empty list if there is no file."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines
