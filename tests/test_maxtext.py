"""Tests that reordering MaxText's experts changes only their order, bit for bit.

They use a small model with the names and layouts of MaxText 0.2.5. `experiments.examples.maxtext_reorder` runs MaxText
itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from relibra_jax.integrations.expert_order import logical_order, map_ids
from relibra_jax.integrations.maxtext import AXES, reorder_experts

LAYERS, EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH, TOKENS = 4, 8, 2, 16, 12, 24
SIZES = {"E": EXPERTS, "D": WIDTH, "F": EXPERT_WIDTH}
LEAVES = [name for name in AXES if name != "wi"]
LOGICAL = logical_order(LAYERS, EXPERTS)
RNG = np.random.default_rng(0)
FIRST, SECOND = (np.stack([RNG.permutation(EXPERTS) for _ in range(LAYERS)]) for _ in range(2))
TOKEN = RNG.normal(size=(TOKENS, WIDTH)).astype(np.float32)
IDS = np.stack([[RNG.choice(EXPERTS, TOP_K, replace=False) for _ in range(LAYERS)] for _ in range(TOKENS)])
IDS[3], IDS[5, :, 1] = -1, -1  # a token without routes, and a token with one route instead of two

# The MoE blocks that can replay routes, by prefix; SCANNED also has the number of layers in a scanned block.
UNSCANNED = [
    "layers_{layer}/MoeBlock_0",
    "layers_{layer}/mlp/routed_experts",
    "layers_{layer}/mlp/moe_block/MoeBlock_0",
]
SCANNED = [("layers/MoeBlock_0", 1), ("layers/layer_{layer}/mlp/routed_experts", 2)]
LAYOUTS = [(block, 0, 1) for block in UNSCANNED] + [
    (block, cycle, axis) for block, cycle in SCANNED for axis in (0, 1)
]


def random_layers():
    """Return random leaves ``[L, ...]`` by name."""
    return {
        name: RNG.normal(size=(LAYERS, *(SIZES[axis] for axis in AXES[name].split()))).astype(np.float32)
        for name in LEAVES
    }


def insert(tree, path, value):
    *parents, last = path.split("/")
    functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = value


def maxtext_tree(layers, block, cycle, scan_axis):
    """Return ``layers`` under MaxText's names. A scanned block has ``cycle`` layers; 0 stands for unscanned layers."""
    tree = {"token_embedder": {"embedding": TOKEN}, "decoder": {"decoder_norm": {"scale": np.ones(WIDTH)}}}
    for name, leaf in layers.items():
        for step in range(cycle or LAYERS):
            value = jnp.moveaxis(leaf[step::cycle], 0, scan_axis) if cycle else jnp.asarray(leaf[step])
            insert(tree, f"decoder/{block.format(layer=step)}/{name}", value)
    # A dense layer whose names resemble those of experts.
    insert(tree, "decoder/layers_0/mlp/shared_experts/wi_0/kernel", np.ones((WIDTH, EXPERTS)))
    return jax.tree.map(jnp.asarray, tree)


def layers_of(tree, block, cycle, scan_axis):
    """Return the layers of a tree; the inverse of `maxtext_tree`."""

    def stacked(name):
        parts = [
            functools.reduce(
                dict.__getitem__, f"{block.format(layer=step)}/{name}".split("/"), tree["decoder"]
            )
            for step in range(cycle or LAYERS)
        ]
        rows = (
            [jnp.moveaxis(part, scan_axis, 0) for part in parts] if cycle else [part[None] for part in parts]
        )
        return jnp.stack(rows, 1).reshape(LAYERS, *rows[0].shape[1:])

    return {name: stacked(name) for name in LEAVES}


def outputs(layers, ids):
    """Return the output of all layers. No sum runs over experts, since its rounding would depend on their order."""
    x = jnp.asarray(TOKEN)
    for layer in range(LAYERS):
        at = {name: leaf[layer] for name, leaf in layers.items()}
        real, chosen = ids[:, layer] >= 0, jnp.maximum(ids[:, layer], 0)
        logits = jnp.einsum("td,tkd->tk", x, at["gate/kernel"].T[chosen]) + at["gate/bias"][chosen]
        gates = jax.nn.softmax(jnp.where(real, logits, -1e9)) * real * at["per_expert_scale"][chosen]
        up = [
            jnp.einsum("td,tkdf->tkf", x, at[name][chosen]) + at[f"{name}_bias"][chosen]
            for name in ("wi_0", "wi_1")
        ]
        y = jnp.einsum("tkf,tkfd->tkd", jax.nn.silu(up[0]) * up[1], at["wo"][chosen]) + at["wo_bias"][chosen]
        x = x + 0.1 * jnp.einsum("tk,tkd->td", gates, y)
    return x


OPTIMIZER = optax.MultiSteps(optax.adamw(1e-2), 2)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def two_micro_steps(tree, opt_state, ids, *layout):
    """Run two micro-steps with accumulated gradients and one Adam step; return output, parameters and state."""

    def loss(tree):
        y = outputs(layers_of(tree, *layout), ids)
        return (y**2).sum(), y

    y = None
    for _ in range(2):
        (_, y), gradients = jax.value_and_grad(loss, has_aux=True)(tree)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
    return y, tree, opt_state


def assert_equal(result, expected):
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b), f"{jax.tree_util.keystr(path)}: {np.abs(a - b).max()}"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[0], marks=pytest.mark.slow),
        *(pytest.param(layout, marks=pytest.mark.long) for layout in LAYOUTS[1:]),
    ],
    ids=lambda layout: f"{layout[0]}-scan_axis={layout[2]}",
)
def test_reorder_experts_lets_training_go_on_bit_for_bit(layout):
    reorder = functools.partial(reorder_experts, scan_axis=layout[2])
    tree = maxtext_tree(random_layers(), *layout)
    expected = tree, OPTIMIZER.init(tree)
    result = reorder(expected, LOGICAL, FIRST)
    before = FIRST
    for after in (SECOND, LOGICAL):
        y, *expected = two_micro_steps(*expected, IDS, *layout)
        y_found, *result = two_micro_steps(*result, map_ids(IDS, LOGICAL, before), *layout)
        assert np.array_equal(y, y_found)
        result = reorder(result, before, after)
        assert_equal(reorder(result, after, LOGICAL), expected)
        before = after
    assert_equal(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-scan_axis={layout[2]}")
def test_reorder_experts_keeps_the_choices_of_the_live_router(layout):
    tree = maxtext_tree(random_layers(), *layout)
    chosen = [
        np.stack(
            [jax.lax.top_k(TOKEN @ kernel, TOP_K)[1] for kernel in layers_of(one, *layout)["gate/kernel"]], 1
        )
        for one in (tree, reorder_experts(tree, LOGICAL, FIRST, scan_axis=layout[2]))
    ]
    assert np.array_equal(map_ids(chosen[1], FIRST, LOGICAL), chosen[0])


@pytest.mark.parametrize(("cycle", "scan_axis"), [(0, 1), (1, 1), (1, 0)])
def test_reorder_experts_is_the_same_on_the_host_and_under_jit(cycle, scan_axis):
    tree = maxtext_tree(random_layers(), UNSCANNED[0] if not cycle else SCANNED[0][0], cycle, scan_axis)
    expected = reorder_experts(tree, LOGICAL, FIRST, scan_axis=scan_axis)
    on_host = reorder_experts(jax.tree.map(np.asarray, tree), LOGICAL, FIRST, scan_axis=scan_axis)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(on_host))
    assert_equal(on_host, expected)
    assert_equal(
        jax.jit(functools.partial(reorder_experts, scan_axis=scan_axis))(tree, LOGICAL, FIRST), expected
    )


@pytest.mark.parametrize("cycle", [0, 1])
def test_reorder_experts_keeps_the_expert_axis_sharded(cycle):
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    tree = maxtext_tree(random_layers(), SCANNED[0][0] if cycle else UNSCANNED[0], cycle, 1)

    def sharding(path, leaf):
        experts_first = "MoeBlock_0" in jax.tree_util.keystr(path) and leaf.shape[0] == EXPERTS
        return NamedSharding(mesh, PartitionSpec("expert") if experts_first else PartitionSpec())

    sharded = jax.device_put(tree, jax.tree.map_with_path(sharding, tree))
    result = reorder_experts(sharded, LOGICAL, FIRST)
    assert_equal(result, reorder_experts(tree, LOGICAL, FIRST))
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(sharded), strict=True):
        assert a.sharding == b.sharding


def test_reorder_experts_takes_a_flax_model_and_its_optimizer_together():
    class Block(nnx.Module):
        def __init__(self):
            self.wo = nnx.Param(jnp.arange(8.0).reshape(8, 1, 1))
            self.rngs = nnx.Rngs(0)

    class Model(nnx.Module):
        def __init__(self):
            self.decoder = nnx.Dict(layers_0=nnx.Dict(MoeBlock_0=Block()))

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)))
    state = nnx.state((model, optimizer))
    moved = reorder_experts(state, LOGICAL[:1], FIRST[:1])
    paths = [path for path, _ in jax.tree.leaves_with_path(state) if "wo" in jax.tree_util.keystr(path)]
    assert len(paths) == 3  # weights and two moments
    for path, leaf in jax.tree.leaves_with_path(moved):
        old = dict(jax.tree.leaves_with_path(state))[path]
        assert (leaf is old) == (path not in paths)
        if path in paths:
            assert np.array_equal(leaf[FIRST[0]], old)


SHAPE = (EXPERTS, WIDTH, EXPERT_WIDTH)


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [
        (
            "decoder/layers_0/MoeBlock_0/wi_0_scale",
            (8,),
            "layers_0/MoeBlock_0/wi_0_scale .*looks like expert weights",
        ),
        ("decoder/layers_0/GptOssMlp/wi_0", SHAPE, "GptOssMlp/wi_0 .*looks like expert weights"),
        ("decoder/layers_0/Llama4/gate/kernel", (WIDTH, 8), "Llama4/gate/kernel .*looks like expert weights"),
        ("decoder/moe_layers/MoeBlock_0/wo", SHAPE, "moe_layers/MoeBlock_0/wo .*looks like expert weights"),
        (
            "decoder/scanned_blocks/global_layer/mlp/moe_block/MoeBlock_0/wo",
            SHAPE,
            "global_layer/.* looks like expert weights",
        ),
        (
            "decoder/layers_7/MoeBlock_0/wi_0",
            SHAPE,
            "layers_7/MoeBlock_0/wi_0: layer 7 is outside .* 4 layers",
        ),
        ("decoder/layers_0/MoeBlock_0/wi_0", (8,), r"wi_0: expected \[E=8, D, F\], found \[8\]"),
        ("decoder/layers_0/MoeBlock_0/gate/kernel", (8, 16), r"kernel: expected \[D, E=8\], found \[8, 16\]"),
        (
            "decoder/layers/MoeBlock_0/wo",
            (8, 3, 2, 2),
            r"wo: expected \[E=8, L=4, F, D\], found \[8, 3, 2, 2\]",
        ),
        (
            "decoder/layers/layer_2/mlp/routed_experts/wo",
            (8, 1, 2, 2),
            "block has 3 layers, which does not divide the 4",
        ),
        ("elsewhere", (8,), "the tree has no experts of layer 0"),
    ],
)
def test_reorder_experts_names_what_it_does_not_understand(path, shape, message):
    tree = {}
    insert(tree, path, np.zeros(shape))
    with pytest.raises(ValueError, match=message):
        reorder_experts(tree, LOGICAL, FIRST)


def test_reorder_experts_refuses_moments_of_another_shape():
    tree = maxtext_tree(random_layers(), UNSCANNED[0], 0, 1)
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=4).init(tree)
    with pytest.raises(ValueError, match=r"v_row/decoder/layers_0/MoeBlock_0/.*: expected"):
        reorder_experts(state, LOGICAL, FIRST)


def test_reorder_experts_refuses_a_layer_without_experts():
    tree = maxtext_tree(random_layers(), UNSCANNED[0], 0, 1)
    del tree["decoder"]["layers_2"]["MoeBlock_0"]
    with pytest.raises(ValueError, match="the homes have 4 layers, but the tree has no experts of layer 2"):
        reorder_experts(tree, LOGICAL, FIRST)
