"""What code made a run: the versions of the packages and a digest of the sources, for each start of the run."""

import functools
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import relibra_jax
from experiments.source_digest import source_digest
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.json_text import parse_json

PACKAGES: Final = ("jax", "jaxlib", "flax", "optax", "numpy")
SOURCES: Final = ("experiments/**", "relibra_jax/**", "pallas_kernels/**")
FILE: Final = "starts.json"
START: Final = ("date", "seed", "step")
"""What a start has beside the code."""


def save_start(folder: Path, *, seed: int, step: int) -> None:
    """Add a start to ``starts.json`` in the folder of a run.

    Args:
        folder: the folder of the run.
        seed: the seed that starts or is resumed.
        step: the step from which it goes on.
    """
    start = dict(zip(START, (datetime.now().isoformat("T", "seconds"), seed, step), strict=True))
    write_json(folder / FILE, [*read_starts(folder), start | code()])


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, the first one first. Runs of earlier versions have none."""
    path = folder / FILE
    return parse_json(path.read_text()) if path.exists() else []


@functools.cache
def code() -> dict[str, str | None]:
    """Return the commit, a digest of this project's sources, and the versions of the packages.

    The commit ends with ``-dirty`` if files have changed. It is None outside of a repository.
    """
    return {
        "commit": _commit(),
        "sources": source_digest(SOURCES),
        "relibra_jax": relibra_jax.__version__,
        **{package: version(package) for package in PACKAGES},
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
