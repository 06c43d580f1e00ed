"""The table of measured tile sizes: a file for one kind of GPU and one version of JAX, outside the installed package.

The environment variable RELIBRA_TILE_SIZES gives the path of the file; an empty value disables the table. If the
variable is not set, the file is ``relibra_jax/tile_sizes.json`` in the user's cache folder (XDG_CACHE_HOME, or else
``~/.cache``). Each process reads it once, when the first kernel is traced.

The fastest sizes may differ between GPUs and versions of JAX. So a table that was measured on another kind of device or
with another version of JAX is ignored with a warning.
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
"""The environment variable with the path of the table."""


class TileTable(NamedTuple):
    """Measured tile sizes, with the device and the version of JAX that they were measured with."""

    device: str
    """The kind of the device, as JAX calls it."""
    jax_version: str
    """The version of JAX."""
    tiles: Mapping[str, TileSizes]
    """The fastest tile sizes, by the key of the problem."""

    @property
    def origin(self) -> str:
        """The device and the version of JAX, as text for messages."""
        return f"{self.device} with jax {self.jax_version}"


def empty_table() -> TileTable:
    """Return a table without entries for the default device and the running version of JAX."""
    return TileTable(jax.devices()[0].device_kind, jax.__version__, {})


def table_path() -> Path | None:
    """Return the path of the table, whose file need not exist, or None if the environment disables the table."""
    value = os.environ.get(VARIABLE)
    if value is not None:
        return Path(value) if value else None
    return cache_folder() / "tile_sizes.json"


def read_table(path: Path) -> TileTable:
    """Read a table from a file.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not a table in this format.
    """
    try:
        content = json.loads(path.read_text())
        tiles = {key: TileSizes(**sizes) for key, sizes in content["tiles"].items()}
        return TileTable(content["device"], content["versions"]["jax"], tiles)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of tile sizes that this version can read: {error!r}"
        ) from error


def write_table(path: Path, table: TileTable) -> None:
    """Write a table with today's date to a file, atomically; create the folder if it does not exist."""
    content = {
        "device": table.device,
        "versions": {"jax": table.jax_version},
        "date": datetime.date.today().isoformat(),
        "tiles": {key: sizes._asdict() for key, sizes in table.tiles.items()},
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def measured_tile_sizes() -> Mapping[str, TileSizes]:
    """Return the measured tile sizes that apply to this device and version of JAX, by the key of the problem.

    Returns:
        The tile sizes; an empty mapping if there is no table for this device and version.

    Raises:
        ValueError: if the file is not a table, or if RELIBRA_TILE_SIZES names a file that does not exist.
    """
    path = table_path()
    if path is None or (VARIABLE not in os.environ and not path.exists()):
        return {}
    return _applicable_tile_sizes(path)


@functools.cache
def _applicable_tile_sizes(path: Path) -> Mapping[str, TileSizes]:
    """Return the entries of a file; warn and return none if another device or version of JAX measured them."""
    try:
        table = read_table(path)
    except FileNotFoundError:
        command = "python -m pallas_kernels.hopper.autotune"
        raise ValueError(f"{VARIABLE}={path} does not exist: write it with {command}") from None
    current = empty_table()
    if table.origin == current.origin:
        return table.tiles
    # The number of JAX frames up to the caller varies, so stacklevel cannot point to it: the message names the file.
    warnings.warn(
        f"tile sizes ignored: {path} was measured on {table.origin}, but this is {current.origin}",
        stacklevel=2,
    )
    return {}
