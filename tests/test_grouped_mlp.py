"""Tests of all implementations of the grouped MLP, against loops over groups in NumPy float64.

The Hopper kernels run in bfloat16 in JAX's GPU interpreter, which detects races, at shapes small enough for it. The
Triton kernels run in Pallas's interpreter, at shapes that are not multiples of their block sizes.
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
from pallas_kernels.implementation import choose_implementation, why_not_ampere


class Setting(NamedTuple):
    """The dtype and sizes with which an implementation is tested."""

    dtype: str
    rows: int
    width: int
    hidden: int
    slots: tuple[int, ...]
    """The number of slots of each weight buffer."""
    sizes: tuple[int, ...]
    """The group sizes: 0, 1, and sizes around those of the tiles. Their sum leaves some padding."""
    examples: int = 100

    @property
    def groups(self):
        return sum(self.slots)


# The sizes are 0, 1, several small tiles, and around one small and one large tile.
PLAIN = Setting("float32", 700, 8, 12, (3, 0, 2, 3), (3, 64, 0, 65, 257, 63, 1, 130))
SETTINGS = {
    "reference": PLAIN,
    "xla": PLAIN,
    # Tiles have two warpgroups at these sizes; in the last tile of a group, one warpgroup has no rows.
    "mosaic": Setting("bfloat16", 201, 192, 128, (1, 0, 1, 1), (67, 0, 130), examples=2),
    # There are several blocks of rows, blocks of columns and steps, and the last ones are partial.
    "triton": Setting("bfloat16", 201, 72, 140, (1, 0, 1, 1), (67, 0, 130), examples=5),
}
NAMES = ("out", "rows", "weights", "row_scale")
# The allowed error, relative to the largest entry of each array. In bfloat16, hidden rows are rounded as well.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2e-2}

slowly = [pytest.param(name, marks=[pytest.mark.slow] * (name == "mosaic")) for name in IMPLEMENTATIONS]
"""All implementations, with those marked slow for which the GPU interpreter takes seconds per kernel."""
each_implementation = pytest.mark.parametrize("implementation", slowly)
rarely = [pytest.param(name, marks=[pytest.mark.long] * (name == "mosaic")) for name in IMPLEMENTATIONS]
each_but_mosaic_rarely = pytest.mark.parametrize("implementation", rarely)
"""For tests of what the Hopper kernels do at other operands, which have run on GPUs too."""
# Tests with many compilations or many calls would take too long in the interpreter.
each_compiled = pytest.mark.parametrize("implementation", ["reference", "xla"])


def oracle(rows, weights, group_sizes, row_scale, d_out):
    """Return the output and the gradients of ``sum(out * d_out)``, computed group by group in float64."""
    slots = [len(buffer) for buffer in weights]
    arrays = (rows, np.concatenate(weights), row_scale, d_out)
    rows, weights, row_scale, d_out = (np.asarray(array, np.float64) for array in arrays)
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
    return out, d_rows, buffers(d_weights, slots), d_scale


def buffers(weights, slots):
    """Cut weights into buffers."""
    return tuple(weights[end - count : end] for count, end in zip(slots, np.cumsum(slots), strict=True))


def inputs(setting=PLAIN, *, seed=0):
    """Return random rows, weight buffers, a row scale and a gradient of the output."""
    rng = np.random.default_rng(seed)
    rows = (setting.rows, setting.width)
    shapes = (rows, (setting.groups, 3, setting.width, setting.hidden), rows[:1], rows)
    x, weights, scale, d_out = (rng.normal(size=shape) for shape in shapes)
    cast = functools.partial(jnp.asarray, dtype=setting.dtype)
    scale_dtype = "float64" if setting.dtype == "float64" else "float32"
    # Hidden values have the magnitude of trained models, since implementations differ in their rounding.
    shrink = np.sqrt(8 / setting.width)
    weights = buffers(cast(weights * shrink), setting.slots)
    return cast(x), weights, jnp.asarray(scale, scale_dtype), cast(d_out)


def out_and_gradients(implementation, rows, weights, group_sizes, row_scale, d_out):
    def call(rows, weights, row_scale):
        return grouped_mlp(rows, weights, group_sizes, row_scale, implementation=implementation)

    out, pull = jax.vjp(call, rows, weights, row_scale)
    return out, *pull(d_out)


@functools.cache
def compiled(implementation):
    """Return the jitted `out_and_gradients`, which counts its traces."""

    @jax.jit
    def run(*arrays):
        run.traces += 1
        return out_and_gradients(implementation, *arrays)

    run.traces = 0
    return run


def assert_close(result, expected, dtype="float32"):
    for name, *pair in zip(NAMES, result, expected, strict=True):
        for value, expected_value in zip(*map(jax.tree.leaves, pair), strict=True):
            assert value.shape == expected_value.shape, name
            scale = np.abs(expected_value).max(initial=0)
            worst = np.abs(np.asarray(value, np.float64) - expected_value).max(initial=0)
            assert worst <= TOLERANCE[dtype] * scale, f"{name}: {worst} of {scale}"


def check(implementation, sizes, arrays):
    sizes = np.asarray(sizes, np.int32)
    rows, weights, scale, d_out = arrays
    with gpu_interpreter(implementation):
        result = jax.block_until_ready(compiled(implementation)(rows, weights, sizes, scale, d_out))
    dtypes = [str(one.dtype) for one in jax.tree.leaves(result)]
    assert dtypes == [str(rows.dtype)] * (2 + len(weights)) + [str(scale.dtype)]
    assert_close(result, oracle(rows, weights, sizes, scale, d_out), str(rows.dtype))
    return result


@pytest.fixture(scope="module", autouse=True)
def two_warpgroups():
    """Assume a GPU with one multiprocessor, so that the heuristic chooses tiles of two warpgroups for few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_sizes, "multiprocessors", lambda: 1)
        setting = SETTINGS["mosaic"]
        expected, groups = setting.rows // setting.groups, setting.groups
        for problem in (
            tile_sizes.Problem(2, setting.width, setting.hidden, expected, groups),
            tile_sizes.Problem(0, expected, setting.hidden, setting.width, 3 * groups),
        ):
            assert tile_sizes.choose_tile_sizes(problem).height == 128
        yield


@each_implementation
def test_grouped_mlp_output_and_gradients_equal_loops_over_groups(implementation):
    setting = SETTINGS[implementation]
    check(implementation, setting.sizes, inputs(setting))


@each_but_mosaic_rarely
def test_grouped_mlp_of_several_buffers_gives_the_same_bits_as_one(implementation):
    """The results are bitwise equal, however the weights are split into buffers."""
    setting = SETTINGS[implementation]
    cuts = [(0, 5, 3), PLAIN.slots, (1, 7, 0)]
    if implementation == "mosaic":
        setting, cuts = Setting("bfloat16", 40, 64, 64, (3,), (17, 0, 20)), [(1, 0, 1, 1)]
    elif implementation == "triton":
        cuts = [setting.slots]
    rows, weights, *others = inputs(setting._replace(slots=(setting.groups,)))
    one = check(implementation, setting.sizes, (rows, weights, *others))
    for slots in cuts:
        arrays = (rows, buffers(*weights, slots), *others)
        out, d_rows, d_weights, d_scale = check(implementation, setting.sizes, arrays)
        result = (out, d_rows, (np.concatenate(d_weights),), d_scale)
        jax.tree.map(np.testing.assert_array_equal, result, one)


@each_compiled
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_grouped_mlp_is_accurate_in_other_dtypes(implementation, dtype):
    with jax.enable_x64(dtype == "float64"):
        check(implementation, PLAIN.sizes, inputs(PLAIN._replace(dtype=dtype)))


@pytest.mark.parametrize(
    "implementation",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "mosaic")) for name in IMPLEMENTATIONS],
)
def test_grouped_mlp_gives_the_output_in_another_dtype(implementation):
    setting = SETTINGS[implementation]._replace(dtype="bfloat16")
    setting = setting._replace(slots=(0, setting.groups - 1, 1))
    rows, weights, scale, d_out = inputs(setting)
    sizes = np.asarray(setting.sizes, np.int32)

    @jax.jit
    def run(*operands):
        def call(rows, weights, scale):
            options = {"out_dtype": "float32", "implementation": implementation}
            return grouped_mlp(rows, weights, sizes, scale, **options)

        out, pull = jax.vjp(call, *operands)
        return out, *pull(d_out.astype("float32"))

    with gpu_interpreter(implementation):
        result = jax.block_until_ready(run(rows, weights, scale))
    dtypes = [str(one.dtype) for one in jax.tree.leaves(result)]
    assert dtypes == ["float32", *["bfloat16"] * (1 + len(weights)), "float32"]
    assert_close(result, oracle(rows, weights, sizes, scale, d_out), "bfloat16")


@each_compiled
def test_grouped_mlp_runs_every_pattern_of_empty_groups_in_one_compilation(implementation):
    run, arrays = compiled(implementation), inputs()
    check(implementation, PLAIN.sizes, arrays)
    traces = run.traces
    for pattern in itertools.product((0, 1), repeat=PLAIN.groups):
        sizes = np.array([3, 64, 40, 65, 257, 63, 1, 130]) * pattern
        *_, d_weights, _ = check(implementation, sizes, arrays)
        assert not np.concatenate(d_weights)[np.array(pattern) == 0].any()
    assert run.traces == traces


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_grouped_mlp_runs_every_pattern_of_empty_groups_in_one_launch(implementation):
    sizes = sizes_of_every_pattern()
    width = 64 if implementation == "mosaic" else 16
    # The first buffer has only empty groups.
    setting = Setting("bfloat16", int(sizes.sum()) + 5, width, width, (8, 192, len(sizes) - 200), ())
    *_, d_weights, _ = check(implementation, sizes, inputs(setting))
    assert not np.concatenate(d_weights)[sizes == 0].any()


@pytest.mark.slow
@each_implementation
@pytest.mark.parametrize("slot", [0, -1])
def test_grouped_mlp_is_accurate_where_one_group_has_all_rows(implementation, slot):
    setting = SETTINGS[implementation]
    check(implementation, np.eye(setting.groups)[slot] * setting.rows, inputs(setting))


@each_compiled
@pytest.mark.parametrize("slot", [0, PLAIN.groups // 2, PLAIN.groups - 1])
@pytest.mark.parametrize("rows", [512, 1])
def test_grouped_mlp_is_accurate_where_only_one_group_has_rows(implementation, slot, rows):
    check(implementation, np.eye(PLAIN.groups)[slot] * rows, inputs())


@each_but_mosaic_rarely
def test_grouped_mlp_is_unaffected_by_padding(implementation):
    setting = SETTINGS[implementation]
    none, one = np.zeros(setting.groups, np.int32), np.eye(setting.groups, dtype=np.int32)
    for sizes in (np.array(setting.sizes, np.int32), none, one[-2] * 10, one[-1] * 64):
        rows, weights, scale, d_out = jax.tree.map(np.array, inputs(setting))
        for array in (rows, scale, d_out):
            array[sizes.sum() :] = np.nan
        with gpu_interpreter(implementation):
            run = compiled(implementation)
            result = jax.block_until_ready(run(rows, weights, sizes, scale, d_out))
        rows, scale, d_out = map(np.nan_to_num, (rows, scale, d_out))
        assert_close(result, oracle(rows, weights, sizes, scale, d_out), setting.dtype)
        for array in (result[0], result[1], result[3]):
            assert not np.asarray(array)[sizes.sum() :].any()


@pytest.mark.slow
@each_but_mosaic_rarely
def test_grouped_mlp_is_accurate_for_any_sizes(implementation):
    setting = SETTINGS[implementation]
    ends = st.lists(st.integers(0, setting.rows), min_size=setting.groups, max_size=setting.groups).map(
        sorted
    )

    @settings(max_examples=setting.examples)
    @given(ends, st.integers(0, 9))
    def of_sizes(ends, seed):
        check(implementation, np.diff(ends, prepend=0), inputs(setting, seed=seed))

    of_sizes()


@each_compiled
@pytest.mark.parametrize("rows", [0, 1, 40, 100])
def test_grouped_mlp_is_accurate_for_few_rows_and_one_buffer(implementation, rows):
    sizes = [rows // 2, 0, rows - rows // 2]
    check(implementation, sizes, inputs(PLAIN._replace(rows=rows, slots=(3,))))


@each_compiled
def test_grouped_mlp_without_a_scale_has_a_scale_of_one(implementation):
    rows, weights, _, _ = inputs(PLAIN._replace(dtype="bfloat16"))
    run = functools.partial(
        grouped_mlp, rows, weights, jnp.asarray(PLAIN.sizes), implementation=implementation
    )
    np.testing.assert_array_equal(run(), run(jnp.ones(PLAIN.rows)))


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("shared", [False, True])
def test_grouped_mlp_is_accurate_inside_shard_map(implementation, shared):
    """Every device has its own sizes. Weights are either its own, or replicated with their gradient summed."""
    devices = 8
    mesh = jax.make_mesh((devices,), ("rank",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(90, np.ones(5) / 5, size=devices).astype(np.int32)
    setting = PLAIN._replace(rows=100, slots=(3, 0, 2))
    arrays = [inputs(setting, seed=0 if shared else rank) for rank in range(devices)]
    rows, weights, scale, d_out = jax.tree.map(lambda *parts: jnp.concatenate(parts), *arrays)
    weights = arrays[0][1] if shared else weights
    split, of_weights = PartitionSpec("rank"), PartitionSpec() if shared else PartitionSpec("rank")

    # The interpreter of the Triton kernels does not support checks of varying axes, but the kernels do.
    run = functools.partial(
        jax.shard_map,
        functools.partial(out_and_gradients, implementation),
        mesh=mesh,
        in_specs=(split, of_weights, split, split, split),
        out_specs=(split, split, of_weights, split),
    )
    arguments = rows, weights, sizes.ravel(), scale, d_out
    with gpu_interpreter(implementation):
        shapes = jax.eval_shape(run(), *arguments)
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, (rows, rows, weights, scale))
        if implementation == "triton" and shared:
            return
        result = jax.block_until_ready(jax.jit(run(check_vma=implementation != "triton"))(*arguments))
    ranks = [oracle(x, w, n, s, dy) for (x, w, s, dy), n in zip(arrays, sizes, strict=True)]
    out, d_rows, d_weights, d_scale = jax.tree.map(lambda *parts: np.concatenate(parts), *ranks)
    if shared:
        d_weights = jax.tree.map(lambda *parts: sum(parts), *(rank[2] for rank in ranks))
    assert_close(result, (out, d_rows, d_weights, d_scale))


def test_grouped_mlp_saves_only_its_arguments_for_the_backward_pass():
    *operands, scale, _ = inputs()
    arguments = (*operands, jnp.asarray(PLAIN.sizes, jnp.int32), scale)
    _, pull = jax.vjp(functools.partial(grouped_mlp, implementation="xla"), *arguments)
    stored, passed = (sum(array.nbytes for array in jax.tree.leaves(tree)) for tree in (pull, arguments))
    assert stored <= passed


def test_grouped_mlp_with_xla_repeats_itself_bit_for_bit():
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
        ("NVIDIA H200", "float32", 64, "triton"),
        ("NVIDIA H200", "bfloat16", 96, "triton"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 64, "triton"),
        ("NVIDIA A10G", "float16", 64, "triton"),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 64, "triton"),
        ("NVIDIA L40S", "bfloat16", 64, "triton"),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 64, "triton"),
        ("NVIDIA RTX 6000 Ada Generation", "bfloat16", 64, "triton"),
        ("NVIDIA B200", "bfloat16", 64, "triton"),
        ("NVIDIA GB300", "bfloat16", 64, "triton"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bfloat16", 64, "triton"),
        ("Tesla V100-SXM2-16GB", "bfloat16", 64, "xla"),
        ("Tesla T4", "bfloat16", 64, "xla"),
        ("NVIDIA GeForce RTX 2080 Ti", "bfloat16", 64, "xla"),
        ("AMD Instinct MI300X", "bfloat16", 64, "xla"),
        ("TPU v5p", "bfloat16", 64, "xla"),
        ("cpu", "bfloat16", 64, "xla"),
    ],
)
def test_choose_implementation_decides_by_platform_and_shape(monkeypatch, kind, dtype, width, chosen):
    """This assumes that the kernels have passed their check; tests/test_self_check.py tests those that have not."""
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr("pallas_kernels.implementation.is_trusted", lambda *_: True)
    names = []

    def trace(rows):
        names.append(choose_implementation(None, IMPLEMENTATIONS, rows, rows.dtype, D=width))

    jax.eval_shape(trace, jnp.zeros((8, width), dtype))
    assert names == [chosen]
    # Rows that are not traced are on a device, here on a CPU.
    assert (
        choose_implementation(None, IMPLEMENTATIONS, jnp.zeros((8, width), dtype), jnp.dtype(dtype), D=width)
        == "xla"
    )


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("8.0", None),
        ("12.1", None),
        ("7.5", "some kind has compute capability 7.5, but NVIDIA's 8.0 or higher is required"),
        ("gfx942", "some kind has compute capability gfx942, but NVIDIA's 8.0 or higher is required"),
    ],
)
def test_why_not_ampere_decides_by_the_compute_capability(capability, reason):
    """The capability decides, not the kind. For the description of a device, the kind decides."""
    device = types.SimpleNamespace(device_kind="some kind", compute_capability=capability)
    assert why_not_ampere(device) == reason


def test_grouped_mlp_chooses_an_implementation_and_rejects_unknown_names():
    *operands, _, _ = inputs()
    chosen = grouped_mlp(*operands, jnp.asarray(PLAIN.sizes))
    np.testing.assert_array_equal(
        chosen, grouped_mlp(*operands, jnp.asarray(PLAIN.sizes), implementation="xla")
    )
    with pytest.raises(
        ValueError, match="implementation='cuda' is not one of reference, xla, mosaic, triton"
    ):
        grouped_mlp(*operands, jnp.asarray(PLAIN.sizes), implementation="cuda")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (PLAIN._replace(width=64, hidden=64), "rows are float32, not bfloat16"),
        (PLAIN._replace(dtype="bfloat16", width=64, hidden=96), "F=96 is not a positive multiple of 64"),
        (PLAIN._replace(dtype="bfloat16", width=32, hidden=64), "D=32 is not a positive multiple of 64"),
        (PLAIN._replace(dtype="bfloat16", width=64, hidden=64), "cpu is not a Hopper GPU"),
    ],
)
def test_grouped_mlp_says_why_hopper_kernels_cannot_run(setting, message):
    *operands, _, _ = inputs(setting)
    with pytest.raises(ValueError, match=f"implementation='mosaic' cannot run: {message}"):
        grouped_mlp(*operands, jnp.asarray(setting.sizes), implementation="mosaic")


def arguments(weights=((2, 3, 4, 6), (0, 3, 4, 6), (1, 3, 4, 6)), **changed):
    shape = {"rows": ((7, 4), "float32"), "group_sizes": ((3,), "int32"), "row_scale": ((7,), "float32")}
    arrays = {name: jnp.zeros(*shape) for name, shape in (shape | changed).items()}
    return arrays | {"weights": list(map(jnp.zeros, weights))}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": ((7,), "float32")}, r"rows: expected floating \[r, D\], found float32\[7\]"),
        ({"rows": ((7, 4), "int32")}, r"rows: expected floating \[r, D\], found int32\[7, 4\]"),
        (
            {"weights": [(2, 3, 5, 6)]},
            r"weights\[0\]: expected float32\[slots, 3, 4, F\] for rows float32\[7, 4\], found float32\[2, 3, 5, 6\]",
        ),
        (
            {"weights": [(2, 3, 4, 6), (1, 2, 4, 6)]},
            r"weights\[1\]: expected float32\[slots, 3, 4, F\] .* found float32\[1, 2, 4, 6\]",
        ),
        ({"rows": ((7, 4), "bfloat16")}, r"weights\[0\]: expected bfloat16\[.* found float32\[2, 3, 4, 6\]"),
        (
            {"weights": [(2, 3, 4, 6), (1, 3, 4, 6), (0, 3, 4, 9)]},
            r"weights\[2\]: expected matrices like those of weights\[0\] .* found float32\[0, 3, 4, 9\]",
        ),
        (
            {"weights": [(0, 3, 4, 6)]},
            r"weights: expected at least one slot, found \[float32\[0, 3, 4, 6\]\]",
        ),
        (
            {"group_sizes": ((4,), "int32")},
            r"group_sizes: expected integers \[3\] for weights of 2 \+ 1 slots, found int32\[4\]",
        ),
        ({"group_sizes": ((3,), "float32")}, r"group_sizes: expected integers \[3\] .* found float32\[3\]"),
        (
            {"row_scale": ((6,), "float32")},
            r"row_scale: expected floating \[7\] for rows float32\[7, 4\], found float32\[6\]",
        ),
        ({"row_scale": ((7,), "int32")}, r"row_scale: expected floating \[7\] .* found int32\[7\]"),
    ],
)
def test_grouped_mlp_names_mismatched_operands(changed, message):
    with pytest.raises(ValueError, match=message):
        grouped_mlp(**arguments(**changed))
