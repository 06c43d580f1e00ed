"""Tests of all implementations of the grouped products, against loops over groups in NumPy float64.

The Hopper kernels run in bfloat16 in JAX's GPU interpreter, which detects races, at shapes small enough for it. The
Triton kernels run in Pallas's interpreter, at shapes that are not multiples of their block sizes.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter, sizes_of_every_pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from pallas_kernels import grouped_dot, grouped_outer, ragged_dot
from pallas_kernels.grouped_dot.api import IMPLEMENTATIONS

SLOTS = (3, 0, 2, 3)
"""The number of slots of each weight buffer."""


class Setting(NamedTuple):
    """The dtype and sizes with which an implementation is tested."""

    dtype: str
    rows: int
    k: int
    n: int
    sizes: tuple[int, ...]
    """The group sizes: 0, 1, and sizes around those of the tiles. Their sum leaves some padding."""
    examples: int = 100


PLAIN = Setting("float32", 700, 8, 12, (3, 64, 0, 65, 257, 63, 1, 130))
SETTINGS = {
    "reference": PLAIN,
    "xla": PLAIN,
    # Groups expect fewer than 64 rows, so tiles have one warpgroup; the columns need two tiles.
    "mosaic": Setting("bfloat16", 157, 64, 320, (3, 64, 0, 7, 41, 0, 1, 30), examples=2),
    # Blocks have 32 rows; there are two column blocks and two steps along k, and the last ones are partial.
    "triton": Setting("bfloat16", 157, 40, 150, (3, 64, 0, 7, 41, 0, 1, 30), examples=30),
}
# The allowed error, relative to the largest entry of each array.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-3, "bfloat16": 5e-3}

slowly = [pytest.param(name, marks=[pytest.mark.slow] * (name == "mosaic")) for name in IMPLEMENTATIONS]
"""All implementations, with those marked slow for which the GPU interpreter takes seconds per kernel."""
each_implementation = pytest.mark.parametrize("implementation", slowly)
rarely = [pytest.param(name, marks=[pytest.mark.long] * (name == "mosaic")) for name in IMPLEMENTATIONS]
each_but_mosaic_rarely = pytest.mark.parametrize("implementation", rarely)
"""For tests of what the Hopper kernels do at other operands, which have run on GPUs too."""


def inputs(setting, *, transposed=False, slots=SLOTS):
    """Return random rows, weight buffers and a gradient of the output."""
    rng = np.random.default_rng(0)
    matrix = (setting.n, setting.k) if transposed else (setting.k, setting.n)
    shapes = ((setting.rows, setting.k), (setting.rows, setting.n), (sum(slots), *matrix))
    rows, d_out, weights = (jnp.asarray(rng.normal(size=shape), setting.dtype) for shape in shapes)
    return rows, buffers(weights, slots), d_out


def buffers(weights, slots=SLOTS):
    """Cut weights into buffers."""
    return tuple(weights[end - count : end] for count, end in zip(slots, np.cumsum(slots), strict=True))


def oracle(rows, weights, group_sizes, d_out, transposed):
    """Return the output and the gradients of ``sum(out * d_out)``, computed group by group in float64."""
    slots = [len(buffer) for buffer in weights]
    rows, weights, d_out = (np.asarray(array, np.float64) for array in (rows, np.concatenate(weights), d_out))
    out, d_rows, d_weights = np.zeros_like(d_out), np.zeros_like(rows), np.zeros_like(weights)
    ends = np.cumsum(group_sizes)
    for slot, (start, end) in enumerate(zip(ends - group_sizes, ends, strict=True)):
        own = slice(start, end)
        matrix = weights[slot].T if transposed else weights[slot]
        out[own], d_rows[own] = rows[own] @ matrix, d_out[own] @ matrix.T
        d_matrix = rows[own].T @ d_out[own]
        d_weights[slot] = d_matrix.T if transposed else d_matrix
    return out, d_rows, buffers(d_weights, slots)


@functools.cache
def compiled(implementation, transposed=False, out_dtype=None):
    """Return a jitted function for the output and all gradients, which counts its traces."""

    @jax.jit
    def run(rows, weights, sizes, d_out):
        run.traces += 1

        def call(rows, weights):
            options = {"transposed": transposed, "out_dtype": out_dtype, "implementation": implementation}
            return grouped_dot(rows, weights, sizes, **options)

        out, pull = jax.vjp(call, rows, weights)
        return out, *pull(d_out.astype(out.dtype))

    run.traces = 0
    return run


def assert_close(result, expected, dtype):
    for value, expected_value in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert value.shape == expected_value.shape
        worst = np.abs(np.asarray(value, np.float64) - expected_value).max(initial=0)
        assert worst <= TOLERANCE[dtype] * np.abs(expected_value).max(initial=0)


def check(implementation, sizes, arrays, transposed=False, out_dtype=None):
    sizes = np.asarray(sizes, np.int32)
    run = compiled(implementation, transposed, out_dtype)
    rows, weights, d_out = arrays
    with gpu_interpreter(implementation):
        result = jax.block_until_ready(run(rows, weights, sizes, d_out))
    dtype, (out, *gradients) = str(rows.dtype), jax.tree.leaves(result)
    assert out.dtype == (out_dtype or dtype)
    assert {str(one.dtype) for one in gradients} == {dtype}
    assert_close(result, oracle(rows, weights, sizes, d_out, transposed), dtype)
    return result


@each_implementation
@pytest.mark.parametrize(
    ("slots", "transposed", "out_dtype"), [(SLOTS, False, None), ((0, 5, 3, 0), True, "float32")]
)
def test_grouped_dot_output_and_gradients_equal_loops_over_groups(
    implementation, slots, transposed, out_dtype
):
    setting = SETTINGS[implementation]
    arrays = inputs(setting, transposed=transposed, slots=slots)
    check(implementation, setting.sizes, arrays, transposed, out_dtype)


@each_but_mosaic_rarely
def test_grouped_dot_of_several_buffers_gives_the_same_bits_as_one(implementation):
    """The results are bitwise equal. `ragged_dot` passes a sequence of one buffer."""
    setting = SETTINGS[implementation]
    rows, weights, d_out = inputs(setting)
    joined = (jnp.concatenate(weights),)
    out, d_rows, d_weights = check(implementation, setting.sizes, (rows, weights, d_out))
    one = check(implementation, setting.sizes, (rows, joined, d_out))
    jax.tree.map(np.testing.assert_array_equal, (out, d_rows, (np.concatenate(d_weights),)), one)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_grouped_dot_is_accurate_in_other_dtypes(implementation, dtype):
    with jax.enable_x64(dtype == "float64"):
        check(implementation, PLAIN.sizes, inputs(PLAIN._replace(dtype=dtype)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_grouped_dot_is_accurate_in_other_dtypes_of_triton_kernels(dtype):
    setting = SETTINGS["triton"]
    check("triton", setting.sizes, inputs(setting._replace(dtype=dtype)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_grouped_dot_runs_every_pattern_of_empty_groups_in_one_compilation(implementation):
    arrays = inputs(PLAIN)
    run = compiled(implementation)
    check(implementation, PLAIN.sizes, arrays)
    traces = run.traces
    for pattern in itertools.product((0, 1), repeat=sum(SLOTS)):
        *_, d_weights = check(implementation, np.array(PLAIN.sizes) * pattern, arrays)
        assert not np.concatenate(d_weights)[np.array(pattern) == 0].any()
    assert run.traces == traces


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [pytest.param("mosaic", marks=pytest.mark.long), "triton"])
def test_grouped_dot_runs_every_pattern_of_empty_groups_in_one_launch(implementation):
    sizes = sizes_of_every_pattern()
    width = 64 if implementation == "mosaic" else 16
    setting = Setting("bfloat16", int(sizes.sum()) + 5, width, width, ())
    # The first buffer has only empty groups.
    *_, d_weights = check(implementation, sizes, inputs(setting, slots=(8, 192, len(sizes) - 200)))
    assert not np.concatenate(d_weights)[sizes == 0].any()


@each_implementation
@pytest.mark.parametrize("slot", [0, sum(SLOTS) - 1])
def test_grouped_dot_is_accurate_where_one_group_has_all_rows(implementation, slot):
    setting = SETTINGS[implementation]
    check(implementation, np.eye(sum(SLOTS))[slot] * setting.rows, inputs(setting))


@pytest.mark.slow
@each_but_mosaic_rarely
def test_grouped_dot_is_unaffected_by_padding_and_unused_weights(implementation):
    setting = SETTINGS[implementation]
    for sizes in (np.array(setting.sizes), np.zeros(8), [0, 0, 0, 0, 10, 0, 0, 0]):
        total = int(np.sum(sizes))
        sizes = np.asarray(sizes, np.int32)
        rows, weights, d_out = jax.tree.map(np.array, inputs(setting))
        rows[total:] = d_out[total:] = np.nan
        for buffer, own in zip(weights, buffers(sizes), strict=True):
            buffer[own == 0] = np.nan
        clean_rows, clean_weights, clean_d_out = jax.tree.map(np.nan_to_num, (rows, weights, d_out))
        with gpu_interpreter(implementation):
            result = jax.block_until_ready(compiled(implementation)(rows, weights, sizes, d_out))
        assert_close(result, oracle(clean_rows, clean_weights, sizes, clean_d_out, False), setting.dtype)
        assert not np.asarray(result[0])[total:].any()
        assert not np.asarray(result[1])[total:].any()


@pytest.mark.slow
@each_but_mosaic_rarely
@pytest.mark.parametrize("sizes", [(9, 9, 9, 9, 9, 9, 9, 2**31 - 1), (9, -40, 30, 0, 0, 0, 0, 1)])
def test_grouped_dot_clips_invalid_sizes(implementation, sizes):
    """Rows beyond the end are ignored, and negative sizes count as 0."""
    setting = SETTINGS[implementation]
    possible = np.maximum(sizes, 0)
    possible[-1] = min(possible[-1], setting.rows - possible[:-1].sum())
    rows, weights, d_out = inputs(setting)
    run = compiled(implementation)
    with gpu_interpreter(implementation):
        result, expected = (
            jax.block_until_ready(run(rows, weights, np.asarray(one, np.int32), d_out))
            for one in (sizes, possible)
        )
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.slow
@each_but_mosaic_rarely
def test_grouped_dot_is_accurate_for_any_sizes(implementation):
    setting = SETTINGS[implementation]

    @settings(max_examples=setting.examples)
    @given(st.lists(st.integers(0, setting.rows), min_size=8, max_size=8).map(sorted))
    def of_sizes(ends):
        check(implementation, np.diff(ends, prepend=0), inputs(setting))

    of_sizes()


@each_implementation
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_grouped_dot_is_accurate_for_few_rows_and_one_buffer(implementation, rows):
    setting = SETTINGS[implementation]._replace(rows=rows, n=64 if implementation == "mosaic" else PLAIN.n)
    check(implementation, [rows // 2, 0, rows - rows // 2], inputs(setting, slots=(3,)))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_grouped_outer_gradients_agree_with_finite_differences(implementation):
    with jax.enable_x64(True):
        lhs, _, rhs = inputs(PLAIN._replace(dtype="float64", rows=40))
        sizes, slots = jnp.array([10, 0, 20, 5]), (0, 2, 0, 2)

        def total(lhs, rhs):
            sums = grouped_outer(lhs, rhs, sizes, slots=slots, implementation=implementation)
            assert [one.shape for one in sums] == [(count, PLAIN.k, PLAIN.n) for count in slots]
            return sum(jnp.sum(jnp.sin(one + place)) for place, one in enumerate(sums))

        check_grads(jax.jit(total), (lhs, rhs), order=1, modes=["rev"])


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (((7, 4), "float32"), ((4, 6), "float32")),
        (((7, 4), "float32"), ((2, 4, 6), "bfloat16")),
        (((7, 4), "float32"), ((0, 4, 6), "float32")),
        (((7,), "float32"), ((2, 4, 6), "float32")),
    ],
)
def test_ragged_dot_names_its_own_arguments(lhs, rhs):
    with pytest.raises(
        ValueError, match=r"expected lhs \[r, k\] and rhs \[groups, k, n\] of one dtype, found"
    ):
        ragged_dot(jnp.zeros(*lhs), jnp.zeros(*rhs), jnp.zeros(2, jnp.int32))


def test_grouped_dot_and_grouped_outer_have_floating_results():
    rows, weights, d_out = inputs(PLAIN)
    sizes = jnp.asarray(PLAIN.sizes)
    with pytest.raises(ValueError, match="out_dtype: expected a floating dtype, found int32"):
        grouped_dot(rows, weights, sizes, out_dtype="int32")
    with pytest.raises(ValueError, match="out_dtype: expected a floating dtype, found bool"):
        grouped_outer(rows, d_out, sizes, slots=SLOTS, out_dtype=bool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_dot_agrees_with_jax_lax_ragged_dot(dtype):
    rows, (weights,), _ = inputs(PLAIN._replace(dtype=dtype), slots=(5,))
    sizes = jnp.array([100, 0, 50, 1, 400])
    for out_dtype in (None, jnp.float32):
        result = ragged_dot(rows, weights, sizes, preferred_element_type=out_dtype)
        expected = jax.lax.ragged_dot(rows, weights, sizes, preferred_element_type=out_dtype)
        assert result.dtype == expected.dtype
        assert_close([result], [np.asarray(expected, np.float64)], dtype)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": ((7,), "float32")}, r"rows: expected floating \[r, k\], found float32\[7\]"),
        (
            {"group_sizes": ((4,), "int32")},
            r"group_sizes: expected integers \[3\] for weights of 2 \+ 1 slots",
        ),
    ],
)
def test_grouped_dot_names_mismatched_operands(changed, message):
    shapes = {"rows": ((7, 4), "float32"), "group_sizes": ((3,), "int32")} | changed
    weights = [jnp.zeros((2, 4, 6)), jnp.zeros((0, 4, 6)), jnp.zeros((1, 4, 6))]
    with pytest.raises(ValueError, match=message):
        grouped_dot(jnp.zeros(*shapes["rows"]), weights, jnp.zeros(*shapes["group_sizes"]))


@pytest.mark.parametrize(
    ("transposed", "weights", "message"),
    [
        (
            False,
            [(2, 5, 6)],
            r"weights\[0\]: expected float32\[slots, 4, n\] for rows float32\[7, 4\], found",
        ),
        (
            True,
            [(2, 6, 4), (1, 4, 6)],
            r"weights\[1\]: expected float32\[slots, n, 4\] .* float32\[1, 4, 6\]",
        ),
        (False, [(2, 4, 6), (4, 6)], r"weights\[1\]: expected .* found float32\[4, 6\]"),
        (
            False,
            [(2, 4, 6), (0, 4, 6), (1, 4, 9)],
            r"weights\[2\]: expected matrices like those of weights\[0\] float32\[2, 4, 6\], found float32\[1, 4, 9",
        ),
        (
            False,
            [(0, 4, 6)] * 2,
            r"weights: expected at least one slot, found \[float32\[0, 4, 6\], float32\[0,",
        ),
        (False, [], r"weights: expected at least one slot, found \[\]"),
    ],
)
def test_grouped_dot_names_mismatched_weight_buffers(transposed, weights, message):
    weights = list(map(jnp.zeros, weights))
    with pytest.raises(ValueError, match=message):
        grouped_dot(jnp.zeros((7, 4)), weights, jnp.zeros(3, jnp.int32), transposed=transposed)


@pytest.fixture
def without_type_checks():
    """Disable type checks of annotations, as for users, so that the functions' own checks are tested."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_grouped_dot_rejects_a_single_array_of_weights(without_type_checks):
    for weights in (jnp.zeros((3, 4, 6)), np.zeros((1, 3, 4, 6))):
        with pytest.raises(
            ValueError, match=r"weights: expected a sequence of weight buffers, found one float"
        ):
            grouped_dot(jnp.zeros((7, 4)), weights, jnp.zeros(3, jnp.int32))


@pytest.mark.parametrize(
    ("lhs", "rhs", "slots", "message"),
    [
        ((7,), (7, 4), (3,), r"lhs: expected floating \[r, k\], found float32\[7\]"),
        (
            (7, 4),
            (6, 4),
            (3,),
            r"rhs: expected float32\[7, n\] for lhs float32\[7, 4\], found float32\[6, 4\]",
        ),
        ((7, 4), (7, 4), (0, 0), r"slots=\(0, 0\) must be non-negative and have a sum of at least 1"),
        ((7, 4), (7, 4), (4, -1), r"slots=\(4, -1\) must be"),
        ((7, 4), (7, 4), (3, 1), r"group_sizes: expected integers \[4\] .* 3 \+ 1 slots, found int32\[3\]"),
    ],
)
def test_grouped_outer_names_mismatched_operands(lhs, rhs, slots, message):
    with pytest.raises(ValueError, match=message):
        grouped_outer(jnp.zeros(lhs), jnp.zeros(rhs), jnp.zeros(3, jnp.int32), slots=slots)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (PLAIN._replace(k=64, n=64), "rows are float32, not bfloat16"),
        (PLAIN._replace(dtype="bfloat16", k=64, n=96), "n=96 is not a positive multiple of 64"),
        (PLAIN._replace(dtype="bfloat16", k=64, n=64), "cpu is not a Hopper GPU"),
    ],
)
def test_grouped_dot_says_why_hopper_kernels_cannot_run(setting, message):
    rows, weights, _ = inputs(setting)
    sizes = jnp.zeros(8, jnp.int32)
    with pytest.raises(
        ValueError, match=r"cannot run: (out_dtype=float8_e5m2 is not one of bfloat16, |rows are)"
    ):
        grouped_dot(rows, weights, sizes, out_dtype="float8_e5m2", implementation="mosaic")
    with pytest.raises(ValueError, match=f"implementation='mosaic' cannot run: {message}"):
        grouped_dot(rows, weights, sizes, implementation="mosaic")
    assert not grouped_dot(rows, weights, sizes).any()


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "message"),
    [
        ("bfloat16", "float8_e5m2", "out_dtype=float8_e5m2 is not one of bfloat16, float16, float32"),
        ("bfloat16", None, "cpu is not known to be an NVIDIA GPU of compute capability 8.0 or higher"),
        ("float64", None, "rows are float64, not one of bfloat16, float16, float32"),
    ],
)
def test_grouped_dot_says_why_triton_kernels_cannot_run(dtype, out_dtype, message):
    with jax.enable_x64(dtype == "float64"):
        rows, weights, _ = inputs(PLAIN._replace(dtype=dtype))
        with pytest.raises(ValueError, match=f"implementation='triton' cannot run: {message}"):
            grouped_dot(rows, weights, jnp.zeros(8, jnp.int32), out_dtype=out_dtype, implementation="triton")
