"""A digest of source files, which identifies the code that made a result."""

import hashlib
from collections.abc import Sequence
from pathlib import Path


def source_digest(folders: Sequence[str]) -> str:
    """Return a digest of Python files of this project, as 12 hexadecimal digits.

    Args:
        folders: the folders of the files; a folder with ``/**`` includes those inside it.
    """
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in folders:
        for path in sorted(root.glob(f"{folder}/*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
