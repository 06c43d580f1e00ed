"""Files that are whole or absent: written beside their place, then renamed into it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


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
        part.chmod(0o644)
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
