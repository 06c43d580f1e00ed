"""What is found out on a machine and kept for later processes: files in the user's folder of caches."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder, ``relibra_jax`` in XDG_CACHE_HOME, or else in ``~/.cache``; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relibra_jax"


def write_whole(path: Path, text: str) -> None:
    """Write a file, all of it or nothing, into a folder that need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
