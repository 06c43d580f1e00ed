"""Tests of checkpoints: runs resume bit for bit on a different number of ranks, and interrupted saves lose nothing."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from relibra_jax.contract.types import Topology
from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS, expert_mesh
from relibra_jax.execution.migration import migrate_experts

LAYERS, EXPERTS = 3, 16
RNG = np.random.default_rng(0)
HOME, OTHER = (np.stack([RNG.permutation(EXPERTS) for _ in range(LAYERS)]) for _ in range(2))
IDENTITY = np.tile(np.arange(EXPERTS), (LAYERS, 1))
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
PARAMS = {"first": 0, "rest": range(1, 3), "router": None}


class Run:
    """A mesh and the state of a run on it, as shapes or with values."""

    def __init__(self, nodes, ranks, *, kind="device", behind=(), **others):
        self.topology = Topology(
            num_nodes=nodes, ranks_per_node=ranks, num_experts=EXPERTS, replica_slots=nodes
        )
        devices = jax.devices()[: nodes * ranks * int(np.prod([*others.values()]))]
        self.mesh = expert_mesh(self.topology, devices=devices, **others)
        slots = (nodes, ranks, self.topology.home_slots)

        def shape(dims, dtype, *spec, kind=kind):
            return jax.ShapeDtypeStruct(
                dims, dtype, sharding=NamedSharding(self.mesh, P(*spec), memory_kind=kind)
            )

        params = {
            "first": shape((*slots, 2, 4), jnp.float32, NODE, LOCAL, None, None, *behind),
            "rest": shape((2, *slots, 4), jnp.bfloat16, None, NODE, LOCAL, None, *behind),
            "router": shape((8, 3), jnp.float32, RANKS, kind="device"),
        }
        optimizer = optax.tree_map_params(
            TX,
            lambda leaf, param: leaf.update(sharding=param.sharding),
            jax.eval_shape(TX.init, params),
            params,
        )
        planner = {"key": jax.eval_shape(lambda: jax.random.key(0, impl="rbg")), "loads": np.zeros(5)}
        self.like = {"params": params, "optimizer": optimizer, "planner": planner, "batch": 0, "rate": 0.0}
        self.layers = {
            "params": PARAMS,
            "optimizer": optimizer_layers(TX, optimizer, PARAMS),
            "planner": {"key": None, "loads": None},
            "batch": None,
            "rate": None,
        }
        self.options = {"layers": self.layers, "mesh": self.mesh, "topology": self.topology}

    def filled(self):
        def fill(leaf):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.key(7, impl="rbg")
            values = RNG.integers(0, 256, (*leaf.shape, leaf.dtype.itemsize), np.uint8).view(leaf.dtype)[
                ..., 0
            ]
            return (
                jax.device_put(values, leaf.sharding, may_alias=False) if leaf.sharding else jnp.array(values)
            )

        planner = {"key": fill(self.like["planner"]["key"]), "loads": np.arange(5.0)}
        return jax.tree.map(fill, self.like) | {"planner": planner, "batch": 12, "rate": 0.25}

    def logical(self, tree, home):
        """Every leaf in logical expert order, computed in NumPy from the definition of homes."""

        def one(label, leaf):
            if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.dtype(int)), jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            leaf = np.array(leaf)
            if isinstance(label, range):
                slots = leaf.reshape(len(label), EXPERTS, *leaf.shape[4:])
                return np.stack([row[home[layer]] for row, layer in zip(slots, label, strict=True)])
            return leaf if label is None else leaf.reshape(EXPERTS, *leaf.shape[3:])[home[label]]

        return jax.tree.map(one, self.layers, tree, is_leaf=lambda label: label is None)


def same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def wide():
    return Run(2, 4)


@pytest.fixture(scope="module")
def saved(wide, tmp_path_factory):
    """Step 3 of a run on 2 x 4 with ``HOME``, whose arrays are donated or overwritten right after the save returns."""
    manager = ocp.CheckpointManager(tmp_path_factory.mktemp("run"))
    tree = wide.filled()
    logical = wide.logical(tree, HOME)
    tree = jax.tree.map(
        lambda x: x.copy() if isinstance(x, jax.Array) else x, tree
    )  # copies, not views of the fixture
    assert save_checkpoint(manager, 3, tree, HOME, **wide.options)
    migrate_experts(tree, HOME, OTHER, **wide.options)
    wipe = jax.jit(lambda leaves: jax.tree.map(lambda x: x * 0, leaves), donate_argnums=0)
    router, moments = tree["params"]["router"], tree["optimizer"][1][0].mu["router"]
    jax.block_until_ready(wipe((router, moments)))
    tree["planner"]["loads"][:] = -1
    assert tree["params"]["first"].is_deleted()
    manager.wait_until_finished()
    yield manager, logical
    manager.close()


def test_checkpoint_restores_the_same_ranks_bit_for_bit(wide, saved):
    manager, logical = saved
    step, tree, home = restore_checkpoint(manager, wide.like, **wide.options)
    assert step == 3
    np.testing.assert_array_equal(home, HOME)
    same_bits(wide.logical(tree, HOME), logical)
    assert (tree["batch"], tree["rate"], type(tree["batch"]), type(tree["rate"])) == (12, 0.25, int, float)
    assert tree["planner"]["key"] == jax.random.key(7, impl="rbg")
    assert isinstance(tree["planner"]["loads"], np.ndarray)
    for actual, like in zip(jax.tree.leaves(tree), jax.tree.leaves(wide.like), strict=True):
        if getattr(like, "sharding", None):
            assert actual.sharding == like.sharding
    # Restored scalars that were not on the mesh work together with arrays that are.
    assert (tree["params"]["router"] * tree["optimizer"][1][0].count).sharding.mesh == wide.mesh


@pytest.mark.parametrize(
    ("run", "home"),
    [
        ({"nodes": 1, "ranks": 4}, None),
        ({"nodes": 1, "ranks": 2, "kind": "pinned_host"}, OTHER),
        ({"nodes": 2, "ranks": 2, "fsdp": 2, "behind": ("fsdp",)}, OTHER[:, ::-1]),
    ],
    ids=["1x4", "1x2 in host memory", "2x2 with fsdp"],
)
def test_checkpoint_restores_other_ranks_and_back(run, home, wide, saved, tmp_path):
    manager, logical = saved
    narrow = Run(**run)
    restored = restore_checkpoint(manager, narrow.like, home=home, **narrow.options)
    np.testing.assert_array_equal(restored.home, HOME if home is None else home)
    same_bits(narrow.logical(restored.tree, restored.home), logical)
    assert restored.tree["params"]["rest"].sharding == narrow.like["params"]["rest"].sharding
    with ocp.CheckpointManager(tmp_path) as back:
        save_checkpoint(back, 4, restored.tree, restored.home, **narrow.options)
        back.wait_until_finished()
        again = restore_checkpoint(back, wide.like, home=OTHER, **wide.options)
    assert again.step == 4
    same_bits(wide.logical(again.tree, OTHER), logical)


def test_checkpoint_is_readable_with_orbax_alone(saved):
    """The checkpoint on disk is a flat dict of arrays with experts in logical order."""
    manager, logical = saved
    state = ocp.StandardCheckpointer().restore(
        manager.directory / "3" / "state",
    )
    np.testing.assert_array_equal(np.array(state["params.first"]), logical["params"]["first"])
    assert state["optimizer.1.0.nu.rest"].shape == (2, EXPERTS, 4)


def test_save_checkpoint_skips_steps_the_manager_skips(wide, saved, tmp_path):
    manager, _ = saved
    assert not save_checkpoint(manager, 2, wide.filled(), HOME, **wide.options)
    with (
        ocp.CheckpointManager(tmp_path) as empty,
        pytest.raises(ValueError, match=f"no checkpoint in {tmp_path}"),
    ):
        restore_checkpoint(empty, wide.like, **wide.options)


CHILD = """
    import os, signal, sys
    import jax, numpy as np, orbax.checkpoint as ocp
    from relibra_jax.execution.checkpoint import save_checkpoint
    from relibra_jax.execution.mesh import expert_mesh, rank_sharding
    from relibra_jax.contract.types import Topology

    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:4])
    home = np.arange(8)[None]

    def save(step):
        tree = {"experts": jax.device_put(np.full((2, 2, 2, 5), step, np.float32), rank_sharding(mesh))}
        save_checkpoint(manager, step, tree, home, layers=0, mesh=mesh, topology=topology)
        manager.wait_until_finished()

    manager = ocp.CheckpointManager(sys.argv[1])
    save(1)
    os.rename = os.replace = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
    save(2)
"""


def test_save_checkpoint_when_killed_keeps_the_previous_step(tmp_path):
    """If a process is killed after writing and before the commit, the previous step remains and the run resumes."""
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), tmp_path],
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert len(list(tmp_path.iterdir())) == 2, "the step that was killed should have left traces"
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:2])
    options = {"layers": 0, "mesh": mesh, "topology": topology}
    like = {
        "experts": jax.ShapeDtypeStruct(
            (1, 2, 4, 5), np.float32, sharding=NamedSharding(mesh, P(NODE, LOCAL))
        )
    }
    with ocp.CheckpointManager(tmp_path) as manager:
        last = restore_checkpoint(manager, like, **options)
        assert last.step == 1
        np.testing.assert_array_equal(last.tree["experts"], np.ones((1, 2, 4, 5)))
        save_checkpoint(manager, 2, {"experts": last.tree["experts"] + 1}, last.home, **options)
        manager.wait_until_finished()
        assert restore_checkpoint(manager, like, **options).tree["experts"].max() == 2


def test_restore_checkpoint_rejects_another_model(wide, saved):
    manager, _ = saved
    params = wide.like["params"]

    def with_params(**changed):
        return wide.like | {"params": params | changed}

    wider = jax.ShapeDtypeStruct((2, 4, 2, 2, 5), jnp.float32, sharding=params["first"].sharding)
    half = params["first"].update(dtype=jnp.float16)
    labels = wide.layers | {"params": PARAMS | {"bias": None}}
    for like, layers, message in (
        (with_params(first=wider), wide.layers,
         r"step 3: array 'params.first' is float32\[16, 2, 4\], but float32\[16, 2, 5\] in the model"),
        (with_params(first=half), wide.layers, r"'params.first' is float32\[16, 2, 4\], but float16"),
        (with_params(bias=np.zeros(3)), labels,
         "step 3 lacks 1 arrays of the model; the first is 'params.bias'"),
        ({"params": params}, {"params": PARAMS},
         "step 3 has 11 arrays that the model lacks; the first is 'batch'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            restore_checkpoint(manager, like, layers=layers, mesh=wide.mesh, topology=wide.topology)
    with pytest.raises(ValueError, match=r"no checkpoint of step 7 in .* which has the steps \[3\]"):
        restore_checkpoint(manager, wide.like, step=7, **wide.options)
    with pytest.raises(ValueError, match="step 3 has homes for 3 layers, but home has 2 layers"):
        restore_checkpoint(manager, wide.like, home=HOME[:2], **wide.options)
    more = dataclasses.replace(wide.topology, num_experts=32)
    with pytest.raises(ValueError, match="step 3 has 16 experts, but the model has num_experts=32"):
        restore_checkpoint(manager, wide.like, **(wide.options | {"topology": more}))


def test_save_checkpoint_rejects_what_it_cannot_save(wide, saved):
    manager, _ = saved
    tree = wide.filled()
    with pytest.raises(ValueError, match=r"expected integers \[L, 16\]"):
        save_checkpoint(manager, 4, tree, HOME[0], **wide.options)
    with pytest.raises(ValueError, match=r"two leaves of the tree have the name 'a.b'"):
        save_checkpoint(
            manager, 4, {"a": {"b": 1}, "a.b": 2}, HOME, layers=None, mesh=wide.mesh, topology=wide.topology
        )
