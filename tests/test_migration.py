"""Tests of migration: experts and their optimizer state, and nothing else, move bit for bit in bounded memory."""

import itertools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from relibra_jax.contract.types import Topology
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.execution.gating import Gating
from relibra_jax.execution.mesh import LOCAL, NODE, expert_mesh, rank_sharding
from relibra_jax.execution.migration import migrate_experts, migration_step, move_tables
from relibra_jax.nnx import MoELayer, reorder_experts
from relibra_jax.nnx.put_on_mesh import put_on_mesh

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=1)
RANKS = (2, 4)
ONE_LAYER, STACKED = P(NODE, LOCAL), P(None, NODE, LOCAL)
LAYERS, EXPERTS, HOMES = 3, 32, 4
RNG = np.random.default_rng(0)
OLD, NEW = (np.stack([RNG.permutation(EXPERTS) for _ in range(LAYERS)]) for _ in range(2))


@pytest.fixture(scope="module")
def mesh():
    return expert_mesh(TOPOLOGY)


@pytest.fixture(scope="module")
def migrate(mesh):
    def call(tree, layers, old=OLD, new=NEW):
        return migrate_experts(tree, old, new, layers=layers, mesh=mesh, topology=TOPOLOGY)

    return call


def bits(shape, dtype):
    """Values with random bits, including NaNs of all kinds."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return RNG.integers(0, 2, shape).astype(bool)
    return RNG.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8).view(dtype).reshape(shape)


def spread(values, mesh, *, kind="device", spec=ONE_LAYER):
    """Put a copy of an array on the devices, so that it can be donated."""
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    return jax.device_put(jnp.array(values), sharding, may_alias=False)


def moved(values, old, new, leading=0):
    """Return the expected result for a leaf ``[N, G, H, ...]`` after ``leading`` dimensions, in NumPy."""
    values = np.asarray(values)
    flat = values.reshape(*values.shape[:leading], EXPERTS, *values.shape[leading + 3 :])
    result = np.empty_like(flat)
    if leading:
        for row, (a, b) in enumerate(zip(old, new, strict=True)):
            result[row][b] = flat[row][a]
    else:
        result[new] = flat[old]
    return result.reshape(values.shape)


def same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool"])
def test_migrate_experts_there_and_back_keeps_all_bits(dtype, mesh, migrate):
    values = bits((*RANKS, HOMES, 3, 5), dtype)
    there = migrate(spread(values, mesh), 1)
    same_bits(there, moved(values, OLD[1], NEW[1]))
    same_bits(migrate(there, 1, NEW, OLD), values)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_migrate_experts_moves_stacked_and_single_layers(kind, mesh, migrate):
    single, stacked = bits((*RANKS, HOMES), "float32"), bits((2, *RANKS, HOMES, 2, 9), "float32")
    tree = {
        "single": spread(single, mesh, kind=kind),
        "stacked": spread(stacked, mesh, kind=kind, spec=STACKED),
        "router": {"same_shape": spread(single, mesh), "scale": 2.0, "empty": None},
    }
    result = migrate(tree, {"single": 1, "stacked": range(0, 3, 2), "router": None})
    same_bits(result["single"], moved(single, OLD[1], NEW[1]))
    same_bits(result["stacked"], moved(stacked, OLD[::2], NEW[::2], 1))
    assert result["router"]["same_shape"] is tree["router"]["same_shape"]
    assert result["router"]["scale"] == 2.0
    for name in ("single", "stacked"):
        assert tree[name].is_deleted()
        spec = STACKED if name == "stacked" else ONE_LAYER
        assert result[name].sharding == NamedSharding(mesh, spec, memory_kind=kind)


def test_migrate_experts_donates_only_what_moves(mesh, migrate):
    """A leaf whose homes stay is returned unchanged, and only experts that leave a rank count for the sizes."""
    new = OLD.copy()
    new[1] = (OLD[1] // HOMES) * HOMES + (OLD[1] + 1) % HOMES
    new[2, [OLD[2].argmin(), OLD[2].argmax()]] = OLD[2, [OLD[2].argmax(), OLD[2].argmin()]]
    tree = [spread(bits((*RANKS, HOMES, 2), "int32"), mesh) for _ in range(LAYERS)]
    values = [np.array(leaf) for leaf in tree]
    result = migrate(tree, [0, 1, 2], OLD, new)
    assert result[0] is tree[0]
    for layer in (1, 2):
        same_bits(result[layer], moved(values[layer], OLD[layer], new[layer]))
    sizes = [move_tables(OLD[layer], new[layer], TOPOLOGY).leave.shape for layer in range(LAYERS)]
    assert sizes == [(8, 0), (8, 0), (8, 1)]


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1)])
def test_migrate_experts_runs_on_other_meshes(shape):
    topology = Topology(num_nodes=shape[0], ranks_per_node=shape[1], num_experts=EXPERTS, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[: topology.num_ranks])
    values = bits((*shape, topology.home_slots, 3), "float32")
    leaf = jax.device_put(values, rank_sharding(mesh))
    result = migrate_experts([leaf], OLD, NEW, layers=2, mesh=mesh, topology=topology)
    same_bits(result[0], moved(values, OLD[2], NEW[2]))


def test_migrate_experts_runs_with_further_mesh_axes():
    """A leaf may be sharded over a further axis, or replicated over it."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=EXPERTS, replica_slots=0)
    mesh = expert_mesh(topology, fsdp=2)
    values = bits((LAYERS, 2, 2, 8, 3, 6, 5), "float32")
    specs = {"sharded": P(None, NODE, LOCAL, None, None, "fsdp"), "replicated": P(None, NODE, LOCAL)}
    tree = {name: spread(values, mesh, spec=spec) for name, spec in specs.items()}
    result = migrate_experts(tree, OLD, NEW, layers=range(LAYERS), mesh=mesh, topology=topology)
    for name, spec in specs.items():
        same_bits(result[name], moved(values, OLD, NEW, 1))
        assert result[name].sharding.spec == spec
        for shard in result[name].addressable_shards:
            same_bits(shard.data, np.asarray(result[name])[shard.index])


permutations = st.permutations(range(EXPERTS)).map(np.array)
nearby = st.lists(st.tuples(*[st.integers(0, EXPERTS - 1)] * 2), max_size=4)


@hypothesis.given(old=permutations, swaps=nearby | permutations)
@hypothesis.settings(max_examples=40)
def test_migrate_experts_compiles_few_programs_for_any_homes(mesh, old, swaps):
    new = old.copy()
    if isinstance(swaps, np.ndarray):
        new = swaps
    else:
        for a, b in swaps:
            new[[a, b]] = new[[b, a]]
    sharding = rank_sharding(mesh)
    values = np.arange(EXPERTS, dtype=np.int16).reshape(*RANKS, HOMES)
    leaf = jax.device_put(values, sharding)
    result = migrate_experts(leaf, old[None], new[None], layers=0, mesh=mesh, topology=TOPOLOGY)
    same_bits(result, moved(values, old, new))


def test_migration_step_takes_homes_as_data(mesh, migrate):
    """New homes with equally many departures run the same program."""
    sharding = NamedSharding(mesh, STACKED)
    step = migration_step(sharding, stacked=True)
    leaf = spread(bits((LAYERS, *RANKS, HOMES, 7), "uint8"), mesh, spec=sharding.spec)
    before = step._cache_size()
    homes = [OLD, NEW, NEW[::-1], OLD[::-1]]
    for old, new in itertools.pairwise(homes):
        leaf = migrate(leaf, range(LAYERS), old, new)
    assert step._cache_size() == before + 1


def test_migration_step_has_bounded_memory_and_collectives(mesh):
    """The program has two all-to-alls per chunk and no gather, and its temporary memory is about one rank's layer."""
    shape = (6, *RANKS, HOMES, 3, 64, 32)
    share = 4 * np.prod(shape[3:])
    for kind, most in (("device", 1.0), ("pinned_host", 2.0)):
        sharding = NamedSharding(mesh, STACKED, memory_kind=kind)
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        tables = move_tables(OLD[0], NEW[0], TOPOLOGY)
        program = migration_step(sharding, stacked=True).lower(leaf, np.int32(0), tables).compile()
        collectives = re.findall(r" (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\(", program.as_text())
        assert set(collectives) == {"all-to-all"}
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes <= most * share
        assert memory.alias_size_in_bytes == shape[0] * share


def partition(params):
    return {"experts": "adam", "router": "sgd", "twin": "frozen"}


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "chain": optax.chain(optax.clip(0.5), optax.trace(0.9), optax.adam(1e-2)),
    "masked": optax.masked(optax.adam(1e-2), {"experts": True, "router": False, "twin": True}),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9), "frozen": optax.set_to_zero()},
        partition,
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.constant_schedule(1e-2)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
}
EXPERT_STATE = {
    "adamw": 2, "chain": 3, "masked": 2, "multi_transform": 2, "inject_hyperparams": 2, "multi_steps": 3
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_step_commutes_with_migration(name, mesh, migrate):
    """Optimizer state moves with its experts. A parameter that only has the shape of an expert leaf does not move."""
    tx = OPTIMIZERS[name]
    layers = {"experts": 1, "router": None, "twin": None}

    def draw():
        values = {"experts": (*RANKS, HOMES, 3), "router": (5,), "twin": (*RANKS, HOMES, 3)}
        return {
            key: jnp.asarray(RNG.standard_normal(shape), jnp.float32)
            if key == "router"
            else spread(RNG.standard_normal(shape).astype(np.float32), mesh)
            for key, shape in values.items()
        }

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, gradients = draw(), [draw(), draw()]
    state = jax.jit(tx.init)(params)
    params, state = step(params, state, gradients[0])
    labels = optimizer_layers(tx, state, layers)
    assert len(jax.tree.leaves(labels)) == EXPERT_STATE[name]
    expected = step(params, state, gradients[1])
    expected = migrate(expected, (layers, labels))
    actual = step(*migrate((params, state), (layers, labels)), migrate(gradients[1], layers))
    jax.tree.map(same_bits, actual, expected)


def test_reorder_experts_moves_model_and_optimizer(mesh, migrate):
    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Param(bits((*RANKS, HOMES, 3), "float32")) for _ in range(2)])
            self.router = nnx.Param(jnp.ones(3))

    model = Model()
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: spread(x, mesh) if x.ndim > 1 else x, params))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)

    params = nnx.state(model, nnx.Param)
    layers = {"layers": {0: 2, 1: 0}, "router": None}
    labels = optimizer_layers(optimizer.tx, optimizer.opt_state, layers)
    before = jax.tree.map(np.array, (params, optimizer.opt_state))
    after, optimizer.opt_state = migrate((params, optimizer.opt_state), (layers, labels))
    nnx.update(model, after)
    for old, new in (
        (before[0], nnx.state(model, nnx.Param)),
        (before[1][0].mu, optimizer.opt_state[0].mu),
        (before[1][0].nu, optimizer.opt_state[0].nu),
    ):
        for index, layer in ((0, 2), (1, 0)):
            same_bits(new["layers"][index][...], moved(old["layers"][index][...], OLD[layer], NEW[layer]))
        same_bits(new["router"][...], old["router"][...])
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.lbfgs(),
            r"state\[0\].params.*experts.* of ScaleByLBFGSState, .*cannot tell which leaves.*IndexError",
        ),
        (
            optax.scale_by_lbfgs(),
            r"diff_params_memory.*expected \[N, G, H, ...\] = \[2, 2, 2, .*found \[10, 2",
        ),
        (optax.adafactor(1e-3), r"v_row.*expected \[N, G, H, ...\] = \[2, 2, 2, ...\], found \[1\]"),
    ],
    ids=["lbfgs", "memory of steps", "factored moments"],
)
def test_migrate_experts_rejects_optimizers_whose_state_cannot_move(tx, message):
    """The first reordering raises, and names the leaf, or the state if optax cannot tell the leaves apart."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:4])
    model = MoELayer(topology, 4, 2, Gating(scores="softmax", top_k=2), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def move():
        put_on_mesh(model, optimizer, mesh)
        reorder_experts(model, optimizer, np.arange(8)[None, ::-1], mesh=mesh, topology=topology)

    with pytest.raises(ValueError, match=message):
        move()


def test_migrate_experts_rejects_malformed_homes(mesh, migrate):
    leaf = spread(np.zeros((*RANKS, HOMES)), mesh)
    twice, outside = OLD.copy(), OLD.copy()
    twice[2, OLD[2] == 7] = 9
    outside[1, 4] = EXPERTS
    for homes, message in (
        ((OLD[:, :-1], NEW), r"old_home: expected integers \[L, 32\], found int64\[3, 31\]"),
        ((OLD, NEW[0]), r"new_home: expected integers \[L, 32\], found int64\[32\]"),
        ((OLD, NEW.astype(float)), r"new_home: expected integers \[L, 32\], found float64\[3, 32\]"),
        ((OLD, NEW[:2]), "old_home has 3 layers, but new_home has 2"),
        ((twice, NEW), "old_home, layer 2, home slot 7: owned by 0 experts, not by one"),
        ((OLD, outside), r"new_home, layer 1: home slot 32 is outside 0..31"),
    ):
        with pytest.raises(ValueError, match=message):
            migrate(leaf, 0, *homes)
    assert not leaf.is_deleted()


def test_migrate_experts_rejects_leaves_and_labels_that_do_not_fit(mesh, migrate):
    def leaf(*shape, spec=ONE_LAYER):
        return spread(np.zeros(shape or (*RANKS, HOMES), np.float32), mesh, spec=spec)

    good = leaf()
    for tree, layers, message in (
        ({"a": good, "b": {"c": leaf(4, 2, HOMES, spec=P())}}, 0, r"tree\['b'\]\['c'\]: expected \[N, G, H, ...\] = "
         r"\[2, 4, 4, ...\], found \[4, 2, 4\]"),
        ([good], [range(3)], r"tree\[0\]: expected \[layers, N, G, H, ...\] = \[3, 2, 4, 4, ...\], found \[2, 4, 4\]"),
        ([good], [3], r"tree\[0\]: layer 3 is outside the 3 layers"),
        ([good], [1.0], r"layers\[0\]: expected an int, a range or None, found 1.0"),
        ({"a": good}, {"b": 1, "a": 0}, r"layers\['b'\] = 1 belongs to no leaf"),
        ({"a": good, "b": good}, {"a": 0}, r"tree\['b'\] has no label"),
        ({"a": good, "b": good}, {"a": 0, "b": None}, r"tree\['a'\] and tree\['b'\] are the same array"),
        ([np.zeros((*RANKS, HOMES))], 0, r"tree\[0\]: expected an array over the ranks of the mesh, found ndarray"),
        ([jnp.zeros((*RANKS, HOMES))], 0, r"tree\[0\]: expected a sharding .*'node', 'local'.*found SingleDevice"),
        ([leaf(spec=P())], 0, r"tree\[0\]: expected a sharding .*'node', 'local'.*found .*spec=P\(\)"),
        ([leaf(*RANKS, HOMES, spec=P(NODE, None, LOCAL))], 0, r"tree\[0\]: expected a sharding"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            migrate(tree, layers)
    other = Topology(num_nodes=4, ranks_per_node=2, num_experts=EXPERTS, replica_slots=0)
    with pytest.raises(ValueError, match=r"mesh axis 'node': expected size 4 .* found 2"):
        migrate_experts(good, OLD, NEW, layers=0, mesh=mesh, topology=other)
    with pytest.raises(ValueError, match=r"tree: expected a sharding .* found .*'node': 2, 'local': 4"):
        migrate_experts(
            spread(np.zeros((4, 2, HOMES)), mesh, spec=P()),
            OLD, NEW, layers=0, mesh=expert_mesh(other), topology=other,
        )  # fmt: skip
    assert not good.is_deleted()
