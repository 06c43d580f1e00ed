"""Tests of the table of measured tile sizes: its path, its format, and when it is ignored."""

import json
import types
import warnings
from pathlib import Path

import jax
import pytest

from pallas_kernels.hopper import autotune
from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.tile_table import (
    VARIABLE,
    empty_table,
    measured_tile_sizes,
    read_table,
    table_path,
    write_table,
)

TILES = {"1-2-3-4-5": TileSizes(128, 256, 4), "0-2-3-4-5": TileSizes(64, 128, 3)}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Return the path of the table in the environment variable, in a folder that does not exist yet."""
    path = tmp_path / "folder" / "tiles.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_read_table_restores_a_table_of_write_table(path):
    table = empty_table()._replace(tiles=TILES)
    write_table(path, table)
    assert read_table(path) == table
    assert measured_tile_sizes() == TILES
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_table_path_is_set_by_the_environment(monkeypatch, tmp_path, path):
    assert table_path() == path
    monkeypatch.setenv(VARIABLE, "")
    assert table_path() is None
    assert measured_tile_sizes() == {}
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert table_path() == tmp_path / "relibra_jax" / "tile_sizes.json"
    assert measured_tile_sizes() == {}
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert table_path() == Path.home() / ".cache" / "relibra_jax" / "tile_sizes.json"


@pytest.mark.parametrize(
    ("changed", "origin"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, f"NVIDIA H100 80GB HBM3 with jax {jax.__version__}"),
        ({"jax_version": "0.9.0"}, "cpu with jax 0.9.0"),
    ],
)
def test_measured_tile_sizes_ignores_and_names_a_table_of_elsewhere_once(path, changed, origin):
    write_table(path, empty_table()._replace(tiles=TILES, **changed))
    with pytest.warns(UserWarning, match="tile sizes ignored") as warned:
        assert measured_tile_sizes() == {}
    assert [str(one.message) for one in warned] == [
        f"tile sizes ignored: {path} was measured on {origin}, but this is cpu with jax {jax.__version__}"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured_tile_sizes() == {}


def test_measured_tile_sizes_needs_a_named_file_to_exist_and_be_a_table(path):
    with pytest.raises(
        ValueError, match=f"{VARIABLE}={path} does not exist: write it with python -m pallas_"
    ):
        measured_tile_sizes()
    write_table(path, empty_table())
    sound = json.loads(path.read_text())
    for damaged in ("{", "[]", "{}", json.dumps(sound | {"tiles": {"1-2-3-4-5": {"depth": 3}}})):
        path.write_text(damaged)
        with pytest.raises(
            ValueError, match=f"{path} is not a table of tile sizes that this version can read"
        ):
            measured_tile_sizes()


def test_autotune_adds_to_its_own_table_and_leaves_others_alone(monkeypatch, capsys, path):
    hopper = types.SimpleNamespace(device_kind="NVIDIA H200", core_count=132)
    monkeypatch.setattr(jax, "devices", lambda *_: [hopper])
    tuned = []
    monkeypatch.setattr(autotune, "tune", lambda problem: tuned.append(problem.key) or TileSizes(64, 64, 2))
    monkeypatch.setattr(autotune, "ROWS_PER_GROUP", (32,))
    assert autotune.main(["GPT-OSS-120B"]) == 0
    first, *_ = tuned
    table = read_table(path)
    assert table.device == "NVIDIA H200"
    assert table.tiles.keys() == set(tuned)
    write_table(path, table._replace(tiles={first: TileSizes(128, 64, 3)}))
    assert autotune.main(["GPT-OSS-120B"]) == 0
    assert read_table(path).tiles[first] == TileSizes(128, 64, 3)
    assert read_table(path).tiles.keys() == set(tuned)

    write_table(path, table._replace(jax_version="0.9.0"))
    assert autotune.main([]) == 1
    assert (
        f"{path} was measured on NVIDIA H200 with jax 0.9.0, but this is NVIDIA H200 with"
        in capsys.readouterr().err
    )
    assert read_table(path).jax_version == "0.9.0"
    monkeypatch.setenv(VARIABLE, "")
    assert autotune.main([]) == 1
    assert f"{VARIABLE} is set but empty, so there is no file to write" in capsys.readouterr().err
