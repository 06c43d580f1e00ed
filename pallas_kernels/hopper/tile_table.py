"""Where measured sizes of tiles are kept: in a table outside the installed package, of one GPU and one version of JAX.

The table is the file that the environment variable RELIBRA_TILE_SIZES names; an empty value stands for none. Where the
variable is not set, it is ``relibra_jax/tile_sizes.json`` in the user's folder of caches: XDG_CACHE_HOME, or else
``~/.cache``. It is read once in a process, when the first kernel is traced.

What is fastest on one GPU, as one version of JAX compiles it, need not be on another: a table that was measured
elsewhere is ignored, with a warning that says so.
"""

import datetime
import functools
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import jax

from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.user_cache import cache_folder, write_whole

VARIABLE: Final = "RELIBRA_TILE_SIZES"
"""The environment variable that names the table."""


class TileTable(NamedTuple):
    """Measured sizes of tiles, and what they were measured with."""

    device: str
    """The kind of the device, as JAX calls it."""
    jax_version: str
    """The version of JAX."""
    tiles: Mapping[str, TileSizes]
    """The fastest sizes by the key of a problem."""

    @property
    def origin(self) -> str:
        """What the sizes were measured with, for messages."""
        return f"{self.device} with jax {self.jax_version}"


def empty_table() -> TileTable:
    """Return a table without entries, of the default device and the version of JAX that runs."""
    return TileTable(jax.devices()[0].device_kind, jax.__version__, {})


def table_path() -> Path | None:
    """Return the path of the table, which need not exist, or None if the environment says that there is none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return cache_folder() / "tile_sizes.json"


def read_table(path: Path) -> TileTable:
    """Return the table of a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no table of this format.
    """
    try:
        found = json.loads(path.read_text())
        tiles = {key: TileSizes(**sizes) for key, sizes in found["tiles"].items()}
        return TileTable(found["device"], found["versions"]["jax"], tiles)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of tile sizes that this version reads: {error!r}") from error


def write_table(path: Path, table: TileTable) -> None:
    """Write a table with today's date, all of it or nothing, into a folder that need not exist."""
    written = {
        "device": table.device,
        "versions": {"jax": table.jax_version},
        "date": datetime.date.today().isoformat(),
        "tiles": {key: sizes._asdict() for key, sizes in table.tiles.items()},
    }
    write_whole(path, json.dumps(written, indent=1) + "\n")


def measured_tile_sizes() -> Mapping[str, TileSizes]:
    """Return the measured sizes that hold here, by the key of a problem; none where nothing was measured.

    Raises:
        ValueError: if the file is no table, or if RELIBRA_TILE_SIZES names a file that does not exist.
    """
    path = table_path()
    if path is None or (VARIABLE not in os.environ and not path.exists()):
        return {}
    return _tiles_that_hold(path)


@functools.cache
def _tiles_that_hold(path: Path) -> Mapping[str, TileSizes]:
    """Return the entries of a file, or none and warn if they were measured elsewhere."""
    try:
        found = read_table(path)
    except FileNotFoundError:
        command = "python -m pallas_kernels.hopper.autotune"
        raise ValueError(f"{VARIABLE}={path} does not exist: write it with {command}") from None
    here = empty_table()
    if found.origin == here.origin:
        return found.tiles
    # From here to the caller of a kernel there are as many frames as JAX likes: the message names the file instead.
    warnings.warn(f"tile sizes ignored: {path} is of {found.origin}, this is {here.origin}", stacklevel=2)
    return {}
