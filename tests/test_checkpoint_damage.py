"""Tests of damaged checkpoints: a restore raises an error of one line, and never returns wrong values."""

import gc
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.damage import cut_in_half, files_under, flip_bit_of, flip_middle_bit

from relibra_jax.contract.types import Topology
from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.execution.mesh import LOCAL, NODE, expert_mesh

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=0)
HOME = np.array([[3, 1, 0, 2, 7, 6, 5, 4]])
LABELS = {
    "params": {"experts": 0, "router": None},
    "moments": {"experts": 0, "router": None},
    "planner": None,
}
LAST = 3
"""The newest of the steps 1, 2 and 3."""


def options():
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[:2])
    return {"layers": LABELS, "mesh": mesh, "topology": TOPOLOGY}


@pytest.fixture(scope="module")
def tree():
    """Random bits, which do not compress, and too many for Orbax to store them in its metadata."""
    mesh, rng = options()["mesh"], np.random.default_rng(0)

    def noise(*shape, dtype=np.float32):
        return np.frombuffer(rng.bytes(np.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)

    def weights():
        return {
            "experts": jax.device_put(noise(1, 2, 4, 3, 128), NamedSharding(mesh, P(NODE, LOCAL))),
            "router": jax.device_put(noise(64, 32), NamedSharding(mesh, P())),
        }

    return {"params": weights(), "moments": weights(), "planner": {"loads": noise(500), "batch": 7}}


@pytest.fixture(scope="module")
def saved(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with ocp.CheckpointManager(folder) as manager:
        for step in range(1, LAST + 1):
            save_checkpoint(manager, step, tree, HOME, **options())
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the checkpoints that a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def restore(folder, tree, **others):
    with ocp.CheckpointManager(folder) as manager:
        return restore_checkpoint(manager, tree, **options(), **others)


def same(actual, tree):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(tree), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def message_of(folder, tree, step=None):
    """Return the error message of a restore of the last step."""
    with pytest.raises(ValueError, match=rf"step {LAST} in ") as raised:
        restore(folder, tree, step=step)
    assert is_advice(str(raised.value), folder)
    return str(raised.value)


def is_advice(line, folder):
    """Return whether ``line`` is one line that has the step and the step before it."""
    advice = f"; to try step 2, the newest before it, move {folder / str(LAST)} away"
    return line.startswith(f"step {LAST} in {folder}: ") and line.endswith(advice) and "\n" not in line


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (("params", "experts"), "params.experts"),
        (("params", "router"), "params.router"),
        (("moments", "experts"), "moments.experts"),
        (("planner", "loads"), "planner.loads"),
    ],
)
def test_restore_detects_one_flipped_bit(place, name, folder, tree):
    array = tree[place[0]][place[1]]
    flip_bit_of(array, folder / str(LAST))
    assert f": array {name!r} has changed since it was saved; " in message_of(folder, tree)
    # Without verification the damaged values are restored.
    actual = restore(folder, tree, verify=False).tree
    assert not same(actual, tree)
    actual[place[0]][place[1]] = array
    assert same(actual, tree)
    # The advice in the message works.
    shutil.rmtree(folder / str(LAST))
    restored = restore(folder, tree)
    assert restored.step == 2
    assert same(restored.tree, tree)


def test_restore_counts_the_arrays_with_flipped_bits(folder, tree):
    for weights in (tree["moments"], tree["params"]):
        flip_bit_of(weights["router"], folder / str(LAST))
    message = message_of(folder, tree, LAST)
    assert "array 'moments.router' has changed since it was saved (the first of 2 such arrays);" in message


def test_restore_on_another_mesh_detects_damage(folder, tree):
    flip_bit_of(tree["params"]["experts"], folder / str(LAST))
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:4])

    def there(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        experts = leaf.ndim == 5
        sharding = NamedSharding(mesh, P(NODE, LOCAL) if experts else P(None, NODE))
        shape = (2, 2, 2, *leaf.shape[3:]) if experts else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    like, there = jax.tree.map(there, tree), {"layers": LABELS, "mesh": mesh, "topology": topology}
    with ocp.CheckpointManager(folder) as manager:
        with pytest.raises(ValueError, match=r"step 3 in .*: array 'params.experts' has changed since it"):
            restore_checkpoint(manager, like, **there)
        restored = restore_checkpoint(manager, like, **there, step=2)
    actual = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(restored.tree)]
    assert same(actual, [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    "harm",
    [cut_in_half, *(pytest.param(harm, marks=pytest.mark.slow) for harm in (flip_middle_bit, Path.unlink))],
)
def test_restore_never_returns_wrong_values_from_a_damaged_file(harm, folder, tree, capfd):
    messages = {}
    for path, content in files_under(folder / str(LAST)).items():
        harm(folder / str(LAST) / path)
        try:
            restored = restore(folder, tree)
        except ValueError as error:
            messages[path] = str(error)
        else:
            # Orbax writes some data twice, and some that a restore does not read.
            assert restored.step == LAST
            assert same(restored.tree, tree), path
        (folder / str(LAST) / path).write_bytes(content)
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err
    assert all(is_advice(line, folder) for line in messages.values())
    assert any(": the layout cannot be read: " in line for line in messages.values())
    assert any(": array 'p" in line or ": array 'm" in line for line in messages.values())
    if harm is cut_in_half:
        assert any(path.name == "_METADATA" for path in messages)
        assert any(
            "/d/" in str(path) and "cannot be read: OUT_OF_RANGE" in line for path, line in messages.items()
        )


def test_restore_finds_steps_with_prefixes_and_zeros(tree, tmp_path):
    names = ocp.CheckpointManagerOptions(step_prefix="run", step_format_fixed_length=4)
    with ocp.CheckpointManager(tmp_path, options=names) as manager:
        for step in (1, 2):
            save_checkpoint(manager, step, tree, HOME, **options())
        manager.wait_until_finished()
        flip_bit_of(tree["params"]["router"], tmp_path / "run_0002")
        with pytest.raises(ValueError, match=r"to try step 1, the newest before it, move .*/run_0002 away"):
            restore_checkpoint(manager, tree, **options())
        assert same(restore_checkpoint(manager, tree, **options(), step=1).tree, tree)


@pytest.mark.parametrize("item", ["state", "layout"])
def test_restore_names_a_missing_item(item, folder, tree):
    shutil.rmtree(folder / str(LAST) / item)
    assert f": the {item} cannot be read: " in message_of(folder, tree)


def test_restore_detects_a_changed_layout(folder, tree):
    path = folder / str(LAST) / "layout" / "metadata"
    layout = json.loads(path.read_text())
    layout["home"][0].reverse()
    path.write_text(json.dumps(layout))
    assert ": the layout cannot be read: it has changed since it was saved; " in message_of(folder, tree)


def test_restore_names_an_earlier_step_only_with_a_valid_layout(folder, tree):
    for step in (2, LAST):
        cut_in_half(folder / str(step) / "layout" / "metadata")
    with pytest.raises(ValueError, match="; to try step 1, the newest before it, move"):
        restore(folder, tree)
    cut_in_half(folder / "1" / "layout" / "metadata")
    with pytest.raises(ValueError, match=r"step 3 in .*; no earlier step has a valid layout"):
        restore(folder, tree)


def test_restore_of_an_earlier_version_needs_verify_false(folder, tree):
    for step in range(1, LAST + 1):
        path = folder / str(step) / "layout" / "metadata"
        layout = json.loads(path.read_text())
        del layout["sha256"], layout["digests"]
        path.write_text(json.dumps(layout))
    with pytest.raises(
        ValueError, match="it has no digests because an earlier version wrote it; use verify=False"
    ):
        restore(folder, tree)
    assert same(restore(folder, tree, verify=False).tree, tree)
