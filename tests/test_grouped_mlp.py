"""One suite for all implementations of the grouped MLP, against loops over groups in NumPy float64.

The Hopper kernels run in JAX's GPU interpreter, which detects races, in bfloat16 and at shapes that it can bear.
"""

import functools
import itertools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter, sizes_of_every_pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import grouped_mlp
from pallas_kernels.grouped_mlp.api import IMPLEMENTATIONS
from pallas_kernels.hopper import tile_sizes
from pallas_kernels.implementation import choose_implementation


class Setting(NamedTuple):
    """What an implementation is tested on."""

    dtype: str
    rows: int
    width: int
    hidden: int
    homes: int
    replicas: int
    sizes: tuple[int, ...]
    """Of no group, of one row, and around the sizes of its tiles, with padding behind."""
    examples: int = 100

    @property
    def slots(self):
        return self.homes + self.replicas


# None, one, a small tile and one more or less, several small, a large tile and one more or less.
PLAIN = Setting("float32", 700, 8, 12, 5, 3, (3, 64, 0, 65, 257, 63, 1, 130))
SETTINGS = {
    "reference": PLAIN,
    "xla": PLAIN,
    # As many rows a group, and as wide, as takes tiles of two warpgroups, of which one finds nothing at an end.
    "mosaic": Setting("bfloat16", 201, 192, 128, 2, 1, (67, 0, 130), examples=2),
}
NAMES = ("out", "rows", "home", "replica", "row_scale")
# Of the largest entry of each array. In bfloat16 the hidden row is rounded before the next product.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-2}

slowly = [pytest.param(name, marks=[pytest.mark.slow] * (name == "mosaic")) for name in IMPLEMENTATIONS]
"""The GPU interpreter takes seconds for every kernel."""
each_implementation = pytest.mark.parametrize("implementation", slowly)
# Many compilations or many calls: more than the interpreter can bear.
each_compiled = pytest.mark.parametrize("implementation", ["reference", "xla"])


def oracle(rows, home, replica, group_sizes, row_scale, d_out):
    """Output and gradients of ``sum(out * d_out)``, group by group in float64."""
    exact = [np.asarray(array, np.float64) for array in (rows, home, replica, row_scale, d_out)]
    rows, home, replica, row_scale, d_out = exact
    weights = np.concatenate([home, replica])
    out, d_rows, d_weights, d_scale = (np.zeros_like(a) for a in (rows, rows, weights, row_scale))
    ends = np.cumsum(group_sizes)
    for slot, (start, end) in enumerate(zip(ends - group_sizes, ends, strict=True)):
        own = slice(start, end)
        x, dy, scale = rows[own], d_out[own], row_scale[own, None]
        gate, up, down = weights[slot]
        g, u = x @ gate, x @ up
        sigmoid = 1 / (1 + np.exp(-g))
        hidden = g * sigmoid * u
        out[own] = scale * (hidden @ down.T)
        d_scale[own] = np.sum(dy * (hidden @ down.T), -1)
        d_hidden = (dy * scale) @ down
        dg, du = d_hidden * u * sigmoid * (1 + g * (1 - sigmoid)), d_hidden * g * sigmoid
        d_rows[own] = dg @ gate.T + du @ up.T
        d_weights[slot] = x.T @ dg, x.T @ du, (dy * scale).T @ hidden
    return out, d_rows, d_weights[: len(home)], d_weights[len(home) :], d_scale


def inputs(setting=PLAIN, *, seed=0):
    """Rows, both weight buffers, scale and the gradient of the output."""
    rng = np.random.default_rng(seed)
    rows, matrices = (setting.rows, setting.width), (3, setting.width, setting.hidden)
    shapes = (rows, (setting.homes, *matrices), (setting.replicas, *matrices), rows[:1], rows)
    x, home, replica, scale, d_out = (rng.normal(size=shape) for shape in shapes)
    cast = functools.partial(jnp.asarray, dtype=setting.dtype)
    scale_dtype = "float64" if setting.dtype == "float64" else "float32"
    # Hidden values of the size that trained models have: rounding is what differs between implementations.
    shrink = np.sqrt(8 / setting.width)
    return cast(x), cast(home * shrink), cast(replica * shrink), jnp.asarray(scale, scale_dtype), cast(d_out)


def out_and_gradients(implementation, rows, home, replica, group_sizes, row_scale, d_out):
    def call(rows, home, replica, row_scale):
        return grouped_mlp(rows, home, replica, group_sizes, row_scale, implementation=implementation)

    out, pull = jax.vjp(call, rows, home, replica, row_scale)
    return out, *pull(d_out)


@functools.cache
def compiled(implementation):
    """`out_and_gradients` under jit; counts its traces."""

    @jax.jit
    def run(*arrays):
        run.traces += 1
        return out_and_gradients(implementation, *arrays)

    run.traces = 0
    return run


def assert_close(found, expected, dtype="float32"):
    for name, value, wanted in zip(NAMES, found, expected, strict=True):
        scale = np.abs(wanted).max(initial=0)
        worst = np.abs(np.asarray(value, np.float64) - wanted).max(initial=0)
        assert worst <= TOLERANCE[dtype] * scale, f"{name}: {worst} of {scale}"


def check(implementation, sizes, arrays):
    sizes = np.asarray(sizes, np.int32)
    *operands, scale, d_out = arrays
    with gpu_interpreter(implementation):
        found = jax.block_until_ready(compiled(implementation)(*operands, sizes, scale, d_out))
    assert [a.dtype for a in found] == [operands[0].dtype] * 4 + [scale.dtype]
    assert_close(found, oracle(*operands, sizes, scale, d_out), str(operands[0].dtype))
    return found


@pytest.fixture(scope="module", autouse=True)
def two_warpgroups():
    """On a chip of one multiprocessor large tiles pay even for these few rows: two warpgroups share them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_sizes, "multiprocessors", lambda: 1)
        setting = SETTINGS["mosaic"]
        expected, slots = setting.rows // setting.slots, setting.slots
        for problem in (
            tile_sizes.Problem(2, setting.width, setting.hidden, expected, slots),
            tile_sizes.Problem(0, expected, setting.hidden, setting.width, 3 * slots),
        ):
            assert tile_sizes.choose_tile_sizes(problem).height == 128
        yield


@each_implementation
def test_output_and_gradients(implementation):
    setting = SETTINGS[implementation]
    check(implementation, setting.sizes, inputs(setting))


@each_compiled
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(implementation, dtype):
    with jax.enable_x64(dtype == "float64"):
        check(implementation, PLAIN.sizes, inputs(PLAIN._replace(dtype=dtype)))


@pytest.mark.parametrize(
    "implementation",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "mosaic")) for name in IMPLEMENTATIONS],
)
def test_another_dtype_for_the_output(implementation):
    setting = SETTINGS[implementation]._replace(dtype="bfloat16")
    rows, home, replica, scale, d_out = inputs(setting)
    sizes = np.asarray(setting.sizes, np.int32)

    @jax.jit
    def run(*operands):
        def call(*operands):
            return grouped_mlp(
                *operands[:3], sizes, operands[3], out_dtype="float32", implementation=implementation
            )

        out, pull = jax.vjp(call, *operands)
        return out, *pull(d_out.astype("float32"))

    with gpu_interpreter(implementation):
        found = jax.block_until_ready(run(rows, home, replica, scale))
    out, d_rows, d_home, d_replica, d_scale = oracle(rows, home, replica, sizes, scale, d_out)
    assert [one.dtype for one in found] == ["float32", *["bfloat16"] * 3, "float32"]
    assert_close(found, (out, d_rows, d_home, d_replica, d_scale), "bfloat16")


@each_compiled
def test_every_pattern_of_empty_groups_in_one_compilation(implementation):
    run, arrays = compiled(implementation), inputs()
    check(implementation, PLAIN.sizes, arrays)
    traces = run.traces
    for pattern in itertools.product((0, 1), repeat=PLAIN.slots):
        sizes = np.array([3, 64, 40, 65, 257, 63, 1, 130]) * pattern
        *_, d_home, d_replica, _ = check(implementation, sizes, arrays)
        empty = np.array(pattern) == 0
        assert not np.concatenate([d_home, d_replica])[empty].any()
    assert run.traces == traces


@pytest.mark.slow
def test_every_pattern_of_empty_groups_in_one_launch():
    sizes = sizes_of_every_pattern()
    setting = Setting("bfloat16", int(sizes.sum()) + 5, 64, 64, 200, len(sizes) - 200, ())
    *_, d_home, d_replica, _ = check("mosaic", sizes, inputs(setting))
    assert not np.concatenate([d_home, d_replica])[sizes == 0].any()


@pytest.mark.slow
@each_implementation
@pytest.mark.parametrize("slot", [0, -1])
def test_one_group_has_all_rows(implementation, slot):
    setting = SETTINGS[implementation]
    check(implementation, np.eye(setting.slots)[slot] * setting.rows, inputs(setting))


@each_compiled
@pytest.mark.parametrize("slot", [0, PLAIN.homes - 1, PLAIN.slots - 1])
@pytest.mark.parametrize("rows", [512, 1])
def test_one_group_has_rows(implementation, slot, rows):
    check(implementation, np.eye(PLAIN.slots)[slot] * rows, inputs())


@each_implementation
def test_padding_reaches_nothing(implementation):
    setting = SETTINGS[implementation]
    none, one = np.zeros(setting.slots, np.int32), np.eye(setting.slots, dtype=np.int32)
    for sizes in (np.array(setting.sizes, np.int32), none, one[-2] * 10, one[-1] * 64):
        rows, home, replica, scale, d_out = (np.array(array) for array in inputs(setting))
        for array in (rows, scale, d_out):
            array[sizes.sum() :] = np.nan
        with gpu_interpreter(implementation):
            run = compiled(implementation)
            found = jax.block_until_ready(run(rows, home, replica, sizes, scale, d_out))
        rows, scale, d_out = map(np.nan_to_num, (rows, scale, d_out))
        assert_close(found, oracle(rows, home, replica, sizes, scale, d_out), setting.dtype)
        for array in (found[0], found[1], found[4]):
            assert not np.asarray(array)[sizes.sum() :].any()


@pytest.mark.slow
@each_implementation
def test_any_sizes(implementation):
    setting = SETTINGS[implementation]
    ends = st.lists(st.integers(0, setting.rows), min_size=setting.slots, max_size=setting.slots).map(sorted)

    @settings(max_examples=setting.examples)
    @given(ends, st.integers(0, 9))
    def of_sizes(ends, seed):
        check(implementation, np.diff(ends, prepend=0), inputs(setting, seed=seed))

    of_sizes()


@each_compiled
@pytest.mark.parametrize("rows", [0, 1, 40, 100])
def test_few_rows_and_no_replica_slots(implementation, rows):
    sizes = [rows // 2, 0, rows - rows // 2]
    check(implementation, sizes, inputs(PLAIN._replace(rows=rows, homes=3, replicas=0)))


@each_compiled
def test_no_scale_is_a_scale_of_one(implementation):
    rows, home, replica, _, _ = inputs(PLAIN._replace(dtype="bfloat16"))
    run = functools.partial(
        grouped_mlp, rows, home, replica, jnp.asarray(PLAIN.sizes), implementation=implementation
    )
    np.testing.assert_array_equal(run(), run(jnp.ones(PLAIN.rows)))


@each_compiled
@pytest.mark.parametrize("shared", [False, True])
def test_inside_shard_map(implementation, shared):
    """Every device has its own sizes; weights are its own, or the same on all and their gradient a sum."""
    devices = 8
    mesh = jax.make_mesh((devices,), ("rank",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(90, np.ones(5) / 5, size=devices).astype(np.int32)
    setting = PLAIN._replace(rows=100, homes=3, replicas=2)
    arrays = [inputs(setting, seed=0 if shared else rank) for rank in range(devices)]
    rows, home, replica, scale, d_out = (jnp.concatenate(parts) for parts in zip(*arrays, strict=True))
    home, replica = (arrays[0][1], arrays[0][2]) if shared else (home, replica)
    split, weights = PartitionSpec("rank"), PartitionSpec() if shared else PartitionSpec("rank")

    run = jax.shard_map(
        functools.partial(out_and_gradients, implementation),
        mesh=mesh,
        in_specs=(split, weights, weights, split, split, split),
        out_specs=(split, split, weights, weights, split),
    )
    found = jax.jit(run)(rows, home, replica, sizes.ravel(), scale, d_out)
    ranks = [oracle(x, w, c, n, s, dy) for (x, w, c, s, dy), n in zip(arrays, sizes, strict=True)]
    out, d_rows, d_home, d_replica, d_scale = (list(parts) for parts in zip(*ranks, strict=True))
    join = np.add.reduce if shared else np.concatenate
    expected = (np.concatenate(out), np.concatenate(d_rows), join(d_home), join(d_replica))
    assert_close(found, (*expected, np.concatenate(d_scale)))


def test_nothing_is_stored_but_the_arguments():
    *operands, scale, _ = inputs()
    arguments = (*operands, jnp.asarray(PLAIN.sizes, jnp.int32), scale)
    _, pull = jax.vjp(functools.partial(grouped_mlp, implementation="xla"), *arguments)
    assert sum(array.nbytes for array in jax.tree.leaves(pull)) <= sum(array.nbytes for array in arguments)


def test_xla_repeats_itself_bit_for_bit():
    *operands, scale, d_out = inputs()
    first, second = (
        compiled("xla")(*operands, np.array(PLAIN.sizes, np.int32), scale, d_out) for _ in range(2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "chosen"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 64, "mosaic"),
        ("NVIDIA H200", "bfloat16", 2048, "mosaic"),
        ("NVIDIA GH200 480GB", "bfloat16", 64, "mosaic"),
        ("NVIDIA H200", "float32", 64, "xla"),
        ("NVIDIA H200", "bfloat16", 96, "xla"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 64, "xla"),
        ("NVIDIA B200", "bfloat16", 64, "xla"),
        ("TPU v5p", "bfloat16", 64, "xla"),
        ("cpu", "bfloat16", 64, "xla"),
    ],
)
def test_none_chooses_by_platform_and_shape(monkeypatch, kind, dtype, width, chosen):
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(device_kind=kind)])
    found = []

    def trace(rows):
        found.append(choose_implementation(None, IMPLEMENTATIONS, rows, rows.dtype, D=width))

    jax.eval_shape(trace, jnp.zeros((8, width), dtype))
    assert found == [chosen]
    # Rows that are there say where they are: on a CPU.
    assert (
        choose_implementation(None, IMPLEMENTATIONS, jnp.zeros((8, width), dtype), jnp.dtype(dtype), D=width)
        == "xla"
    )


def test_none_runs_and_a_name_must_exist():
    *operands, _, _ = inputs()
    chosen = grouped_mlp(*operands, jnp.asarray(PLAIN.sizes))
    np.testing.assert_array_equal(
        chosen, grouped_mlp(*operands, jnp.asarray(PLAIN.sizes), implementation="xla")
    )
    with pytest.raises(ValueError, match="implementation='cuda' is not one of reference, xla, mosaic"):
        grouped_mlp(*operands, jnp.asarray(PLAIN.sizes), implementation="cuda")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (PLAIN._replace(width=64, hidden=64), "rows are float32, not bfloat16"),
        (PLAIN._replace(dtype="bfloat16", width=64, hidden=96), "F=96 is no multiple of 64"),
        (PLAIN._replace(dtype="bfloat16", width=32, hidden=64), "D=32 is no multiple of 64"),
        (PLAIN._replace(dtype="bfloat16", width=64, hidden=64), "cpu is no Hopper GPU"),
    ],
)
def test_hopper_kernels_say_why_they_cannot_run(setting, message):
    *operands, _, _ = inputs(setting)
    with pytest.raises(ValueError, match=f"implementation='mosaic' cannot run: {message}"):
        grouped_mlp(*operands, jnp.asarray(setting.sizes), implementation="mosaic")


def shapes(**changed):
    shape = {
        "rows": ((7, 4), "float32"),
        "home": ((2, 3, 4, 6), "float32"),
        "replica": ((1, 3, 4, 6), "float32"),
        "group_sizes": ((3,), "int32"),
        "row_scale": ((7,), "float32"),
    }
    return [jnp.zeros(*shape) for shape in (shape | changed).values()]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": ((7,), "float32")}, r"rows: expected floating \[r, D\], found float32\[7\]"),
        ({"rows": ((7, 4), "int32")}, r"rows: expected floating \[r, D\], found int32\[7, 4\]"),
        (
            {"home": ((2, 3, 5, 6), "float32")},
            r"home: expected float32\[slots, 3, 4, F\] for rows float32\[7, 4\], found float32\[2, 3, 5, 6\]",
        ),
        (
            {"replica": ((1, 2, 4, 6), "float32")},
            r"replica: expected float32\[slots, 3, 4, F\] .* found float32\[1, 2, 4, 6\]",
        ),
        ({"home": ((2, 3, 4, 6), "bfloat16")}, r"home: expected float32\[.* found bfloat16\[2, 3, 4, 6\]"),
        (
            {"replica": ((1, 3, 4, 9), "float32")},
            r"home float32\[2, 3, 4, 6\], replica float32\[1, 3, 4, 9\]",
        ),
        ({"home": ((0, 3, 4, 6), "float32")}, r"home float32\[0, 3, 4, 6\].* at least one home slot"),
        (
            {"group_sizes": ((4,), "int32")},
            r"group_sizes: expected integers \[3\] for 2 home and 1 replica slots, found int32\[4\]",
        ),
        ({"group_sizes": ((3,), "float32")}, r"group_sizes: expected integers \[3\] .* found float32\[3\]"),
        (
            {"row_scale": ((6,), "float32")},
            r"row_scale: expected floating \[7\] for rows float32\[7, 4\], found float32\[6\]",
        ),
        ({"row_scale": ((7,), "int32")}, r"row_scale: expected floating \[7\] .* found int32\[7\]"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        grouped_mlp(*shapes(**changed))
