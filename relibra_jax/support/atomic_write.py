"""Atomic file writes: write a temporary file in the same folder, then rename it to its final name.

Only regular files are replaced. What else a name may be (a link, a device, a pipe) stays what it is.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, and rename it to ``path`` if the block raises no error.

    A link is followed, and a file that exists keeps its mode, and its owner as far as that is permitted. Devices and
    pipes stay what they are: they are written to.

    Args:
        path: the file to write or replace. The temporary file is in the same folder.

    Raises:
        OSError: if ``path`` is a folder, or cannot be written.

    >>> with write_atomically(os.path.join(tempfile.mkdtemp(), "note.txt")) as part:
    ...     _ = part.write_text("complete")
    """
    path = Path(path)
    if path.is_symlink() and not path.exists():
        path = Path(os.path.realpath(path))
    before = path.stat() if path.exists() else None
    if before is not None and stat.S_ISDIR(before.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if before is not None and not stat.S_ISREG(before.st_mode):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, path.name)
            yield part
            with part.open("rb") as written, path.open("wb") as special:
                shutil.copyfileobj(written, special)
        return
    path = Path(os.path.realpath(path))
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        # After the block, because a writer may have replaced the temporary file by one of its own.
        part.chmod(0o644 if before is None else stat.S_IMODE(before.st_mode))
        if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            for owner in ((-1, before.st_gid), (before.st_uid, -1)):
                with contextlib.suppress(PermissionError):
                    os.chown(part, *owner)
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
