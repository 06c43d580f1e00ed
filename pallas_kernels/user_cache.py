"""Files in the user's cache folder: measurements and verdicts that later processes on the machine reuse."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the path of the cache folder: ``relibra_jax`` in XDG_CACHE_HOME or, if unset, in ``~/.cache``.

    The folder need not exist.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relibra_jax"


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, and create its folder if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
