"""Atomic file writes: write a temporary file in the same folder, then rename it to its final name."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename it to ``path`` if the block raises no error.

    Args:
        path: the file to write or replace. The temporary file is in the same folder.

    >>> with write_atomically(os.path.join(tempfile.mkdtemp(), "note.txt")) as part:
    ...     _ = part.write_text("complete")
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(
            0o644
        )  # after the block, because a writer may have replaced the temporary file by one of its own
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a value as indented JSON, atomically.

    Args:
        path: the file to write or replace.
        value: the value, which `json.dumps` accepts.

    >>> write_json(os.path.join(tempfile.mkdtemp(), "numbers.json"), {"imbalance": 1.02})
    """
    with write_atomically(path) as part:
        part.write_text(json.dumps(value, indent=1) + "\n")
