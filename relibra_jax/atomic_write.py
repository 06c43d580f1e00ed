"""Files that are whole or absent: written beside their place, then renamed into it."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path in the same folder that takes ``path``'s place when the block ends without an error.

    >>> with write_atomically(os.path.join(tempfile.mkdtemp(), "note.txt")) as part:
    ...     _ = part.write_text("complete")
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)  # last: a writer may have put a file of its own in its place
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all.

    >>> write_json(os.path.join(tempfile.mkdtemp(), "numbers.json"), {"imbalance": 1.02})
    """
    with write_atomically(path) as part:
        part.write_text(json.dumps(value, indent=1) + "\n")
