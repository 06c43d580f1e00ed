"""Tests of float8 rounding in blocks against ml_dtypes, and of the float8 grouped MLP against NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.float8.grouped_mlp import grouped_mlp_float8
from experiments.float8.rounding import round_to_float8
from pallas_kernels import grouped_mlp

SLOTS, WIDTH, HIDDEN = (2, 0, 1), 160, 136  # neither is a multiple of a block
SIZES = [np.array(sizes, np.int32) for sizes in ((5, 0, 7), (0, 0, 0), (0, 16, 0), (4, 4, 4))]
ROWS = 16
BLOCK = 128


@functools.partial(jax.jit, static_argnames="block")
def rounded(array, block):
    """Return the rounded numbers times their scales, in the dtype of the array."""
    values, scales = round_to_float8(array, block)
    for axis, size in zip((-2, -1), block, strict=True):
        scales = jnp.repeat(scales, size, axis=axis)
    whole = values.astype(scales.dtype) * scales
    return whole[..., : array.shape[-2], : array.shape[-1]].astype(array.dtype)


def oracle(array, block):
    """Round each block in float64, with the smallest scale exponent that fits."""
    out = np.array(array, np.float64)
    rows, columns = block
    for place in np.ndindex(*out.shape[:-2], -(-out.shape[-2] // rows), -(-out.shape[-1] // columns)):
        *stack, m, n = place
        own = (*stack, slice(m * rows, (m + 1) * rows), slice(n * columns, (n + 1) * columns))
        largest = np.abs(out[own]).max()
        exponent = next(e for e in range(-117, 130) if largest <= 448 * 2.0**e)
        rounded_block = (out[own] / 2.0**exponent).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        out[own] = rounded_block.astype(np.float64) * 2.0**exponent
    return out


def mlp_oracle(rows, weights, sizes, scale):
    """Return the MLP of rounded operands, computed group by group in float64."""
    out = np.zeros(rows.shape)
    x, matrices = oracle(rows, (1, BLOCK)), oracle(np.concatenate(weights), (BLOCK, BLOCK))
    ends = np.cumsum(sizes)
    for slot, own in enumerate(map(slice, ends - sizes, ends)):
        gate, up, down = matrices[slot]
        g = x[own] @ gate
        hidden = oracle(g / (1 + np.exp(-g)) * (x[own] @ up), (1, BLOCK)) if sizes[slot] else g
        out[own] = scale[own, None] * (hidden @ down.T)
    return out


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    rows, scale = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=ROWS)
    weights = [rng.normal(size=(slots, 3, WIDTH, HIDDEN)) / 8 for slots in SLOTS]
    cast = functools.partial(jnp.asarray, dtype=dtype)
    return cast(rows), list(map(cast, weights)), jnp.asarray(scale, jnp.float32)


@functools.cache
def compiled(implementation="xla"):
    return jax.jit(functools.partial(grouped_mlp_float8, implementation=implementation))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [(1, 128), (4, 3)])
def test_round_to_float8_agrees_with_ml_dtypes(dtype, block):
    """Magnitudes range from the smallest normal number to the largest, and differ by row and column."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(2, 9, 200)) * 2.0 ** rng.integers(-120, 125, (2, 9, 1))
    values = jnp.asarray(values * 2.0 ** -rng.integers(0, 12, (2, 1, 200)), dtype)
    result = rounded(values, block=block)
    assert result.dtype == dtype
    normal = np.abs(np.asarray(values, np.float64)) >= 2.0**-126  # a CPU may flush subnormal numbers to zero
    expected = oracle(np.where(normal, np.asarray(values, np.float64), 0), block)
    np.testing.assert_array_equal(np.where(normal, np.asarray(result, np.float64), 0), expected * normal)


@given(st.lists(st.tuples(st.integers(-4095, 4095), st.integers(-120, 100)), min_size=1, max_size=32))
@settings(deadline=None, max_examples=200)
def test_round_to_float8_errors_are_at_most_half_of_the_last_place(values):
    """Half of the last place is ``2**-4`` of a normal number, or ``2**-10`` of the scale.

    The scale is below ``largest / 224``.
    """
    row = np.zeros((1, 32), np.float32)
    row[0, : len(values)] = [mantissa * 2.0**exponent for mantissa, exponent in values]
    error = np.abs(np.asarray(rounded(row, block=(1, 32)), np.float64) - row)
    tiny = max(np.abs(row).max() / 224, 2.0**-117) * 2.0**-10
    assert (error <= np.maximum(np.abs(row.astype(np.float64)) / 16, tiny)).all()


def test_round_to_float8_keeps_float8_numbers():
    """All e4m3 numbers are exact, for scales from the smallest to the largest."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    for exponent in (-117, -40, 0, 30, 119):
        for dtype in ("float32", "bfloat16"):
            values = jnp.asarray(numbers * 2.0**exponent, dtype)[None]
            np.testing.assert_array_equal(rounded(values, block=(1, 256)), values)


def test_round_to_float8_makes_only_the_block_of_a_nonfinite_number_nan():
    values = np.ones((3, 8), np.float32)
    values[0, 1], values[2, 6] = np.inf, np.nan
    result = np.asarray(rounded(values, block=(2, 4)))
    np.testing.assert_array_equal(np.isnan(result), np.repeat([[1, 0], [1, 0], [0, 1]], 4, axis=1))
    assert (result[~np.isnan(result)] == 1).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_mlp_float8_is_the_mlp_of_rounded_numbers(sizes):
    """Sizes include empty groups and padding. A hidden number halfway between float8 numbers may round either way."""
    rows, weights, scale = operands()
    result = compiled()(rows, weights, sizes, scale)
    expected = mlp_oracle(rows, weights, sizes, np.asarray(scale))
    assert np.abs(result - expected).max() <= 1e-3 * np.abs(expected).max(initial=1)
    assert not np.asarray(result[sizes.sum() :]).any()
    exact = grouped_mlp(rows, weights, sizes, scale)
    if sizes.any():  # an error of a few percent shows that float8 rounding was applied
        error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
        assert 0.01 < error < 0.1


def test_grouped_mlp_float8_agrees_between_dtypes():
    """Gate and up in bfloat16 round some hidden numbers to the next float8 number."""
    rows, weights, scale = operands("bfloat16")
    result = compiled()(rows, weights, SIZES[0], scale)
    wide = [array.astype(jnp.float32) for array in (rows, *weights)]
    expected = compiled()(wide[0], wide[1:], SIZES[0], scale)
    assert result.dtype == jnp.bfloat16
    assert np.linalg.norm(result.astype(jnp.float32) - expected) <= 0.02 * np.linalg.norm(expected)


def test_grouped_mlp_float8_is_exact_for_float8_numbers():
    """The numbers have few bits, and gates are so large that their sigmoid is 1 and hidden numbers are powers of 2."""
    rows = jnp.asarray(2.0 ** np.arange(ROWS) * np.ones((4, ROWS))).T.astype(jnp.float32)
    weights = [jnp.ones((3, 3, 4, 8)) * jnp.array([64.0, 0.5, 3.0])[None, :, None, None]]
    sizes, scale = np.array([6, 0, 8], np.int32), jnp.full(ROWS, 0.3, jnp.float32)
    exact = grouped_mlp(rows, weights, sizes, scale)
    np.testing.assert_array_equal(compiled()(rows, weights, sizes, scale), exact)


def test_grouped_mlp_float8_spreads_nonfinite_numbers_only_over_their_rows():
    """A NaN in a row affects only that row, a NaN in weights the rows of their group, and a NaN in padding nothing."""
    rows, weights, scale = operands()
    sizes = np.array([5, 4, 3], np.int32)
    spoilt = rows.at[2, 0].set(jnp.inf).at[13].set(jnp.nan)
    result = np.asarray(compiled()(spoilt, weights, sizes, scale.at[14].set(jnp.nan)))
    np.testing.assert_array_equal(np.isnan(result).any(1), np.arange(ROWS) == 2)
    buffer = weights[0].at[1, 2, 3, 3].set(jnp.nan)
    result = np.asarray(compiled()(rows, [buffer, *weights[1:]], sizes, scale))
    np.testing.assert_array_equal(np.isnan(result).any(1), (np.arange(ROWS) >= 5) & (np.arange(ROWS) < 9))


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad, jax.jacfwd])
def test_grouped_mlp_float8_refuses_gradients_in_one_line(differentiate):
    rows, weights, scale = operands()

    def loss(rows):
        return grouped_mlp_float8(rows, weights, SIZES[0], scale).sum()

    refusal = "grouped_dot_float8 has no gradient: float8 is for rollout and recompute, not for updates"
    with pytest.raises(ValueError, match=f"^{refusal}\n"):
        jax.jit(differentiate(loss))(rows)


def test_grouped_mlp_float8_checks_operands_as_the_exact_mlp():
    rows, weights, scale = operands()
    with pytest.raises(ValueError, match=r"row_scale: expected floating \[16\]"):
        grouped_mlp_float8(rows, weights, SIZES[0], scale[1:])
    with pytest.raises(ValueError, match="group_sizes: expected integers"):
        grouped_mlp_float8(rows, weights, SIZES[0][1:], scale)
    half = [each.astype(jnp.float16) for each in (rows, *weights)]
    with pytest.raises(ValueError, match="the exponent range of float16 is too small"):
        grouped_mlp_float8(half[0], half[1:], SIZES[0], scale)
    assert grouped_mlp_float8(rows[:0], weights, SIZES[0], scale[:0]).shape == (0, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [pytest.param("mosaic", marks=pytest.mark.long), "triton"])
def test_grouped_mlp_float8_runs_float8_kernels(kernels):
    """The kernels run in interpreters, with widths that are not multiples of a block."""
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.normal(size=(24, 192)), jnp.bfloat16)
    weights = [jnp.asarray(rng.normal(size=(2, 3, 192, 64)) / 8, jnp.bfloat16)]
    sizes = np.array([9, 11], np.int32)
    with gpu_interpreter(kernels):
        result = jax.block_until_ready(compiled(kernels)(rows, weights, sizes)).astype(jnp.float32)
    expected = compiled()(rows, weights, sizes).astype(jnp.float32)
    assert np.abs(result - expected).max() <= 2e-2 * np.abs(expected).max()
