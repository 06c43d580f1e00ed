"""Tests of all implementations of attention, against attention over all pairs in NumPy float64.

The Triton kernels run in Pallas's interpreter, at shapes that are not multiples of their block sizes.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import flash_attention
from pallas_kernels import implementation as implementation_module
from pallas_kernels.flash_attention.api import IMPLEMENTATIONS

BLOCK = 16
# The allowed error, relative to the largest entry of each array.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def inputs(queries, keys, heads, key_heads, width, *, samples=6):
    """Return random operands, a cotangent, and the ranges of queries spread over packed samples, some without keys."""
    rng = np.random.default_rng(0)
    shapes = [(queries, heads), (keys, key_heads), (keys, key_heads), (queries, heads)]
    arrays = [rng.normal(size=(*shape, width)) for shape in shapes]
    last = np.sort(rng.choice(keys, queries, replace=queries > keys)).astype(np.int32)
    starts = np.append(0, np.sort(rng.choice(keys, samples - 1, replace=False))).astype(np.int32)
    first = starts[np.searchsorted(starts, last, side="right") - 1]
    return arrays, first, np.where(rng.random(queries) < 0.1, first - 1, last)


def oracle(query, key, value, first, last, cotangent, sinks=None):
    """Return the output and the gradients of ``(output * cotangent).sum()`` in float64, with that of sinks if given."""
    groups, scale = query.shape[1] // key.shape[1], query.shape[2] ** -0.5
    keys, values = (np.repeat(array, groups, axis=1) for array in (key, value))
    at = np.arange(len(key))
    visible = (first[:, None] <= at) & (at <= last[:, None])
    weights = np.where(visible, np.exp(np.einsum("qhd,khd->hqk", query, keys) * scale), 0)
    of_sink = 0 if sinks is None else np.exp(sinks)[:, None, None]
    total = np.maximum(weights.sum(-1, keepdims=True) + of_sink, 1e-300)
    weights /= total
    of_weights = np.einsum("qhd,khd->hqk", cotangent, values)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    of_key, of_value = (
        np.einsum("hqk,qhd->khd", of_keys, rows).reshape(len(key), -1, groups, key.shape[2]).sum(2)
        for of_keys, rows in ((of_scores, query), (weights, cotangent))
    )
    output, of_query = np.einsum("hqk,khd->qhd", weights, values), np.einsum("hqk,khd->qhd", of_scores, keys)
    if sinks is None:
        return output, of_query, of_key, of_value
    of_sinks = -(of_sink / total * (weights * of_weights).sum(-1, keepdims=True)).sum((1, 2))
    return output, of_query, of_key, of_value, of_sinks


def with_gradients(implementation, query, key, value, first, last, cotangent):
    attend = functools.partial(flash_attention, block=BLOCK, implementation=implementation)
    output, pull = jax.vjp(lambda *arrays: attend(*arrays, first, last), query, key, value)
    return output, *pull(cotangent)


def run(implementation, *operands):
    with gpu_interpreter(implementation):
        # Another function for each call: a program that the interpreter does not run must not be reused.
        return jax.jit(lambda *operands: with_gradients(implementation, *operands))(*operands)


def check(implementation, arrays, first, last, dtype="float32"):
    query, key, value, cotangent = (jnp.asarray(array, dtype) for array in arrays)
    actual = run(implementation, query, key, value, first, last, cotangent)
    exact = [np.asarray(array, np.float64) for array in (query, key, value)]
    desired = oracle(*exact, first, last, np.asarray(cotangent, np.float64))
    for array, other in zip(actual, desired, strict=True):
        assert array.dtype == dtype
        largest = np.abs(other).max()
        np.testing.assert_allclose(np.asarray(array, np.float64), other, atol=TOLERANCE[dtype] * largest)


@each_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [(150, 270, 4, 2, 24), (300, 140, 3, 1, 16), (29, 29, 2, 2, 6), (1, 9, 1, 1, 1)],
    ids=["several tiles", "more queries than keys", "one tile", "one query"],
)
def test_flash_attention_equals_attention_over_all_pairs(implementation, sizes, dtype):
    """There are several tiles and blocks, the last ones are partial, and some queries have no key."""
    check(implementation, *inputs(*sizes), dtype)


@each_implementation
def test_sinks_take_their_share_of_the_weights_and_get_gradients(implementation):
    arrays, first, last = inputs(150, 270, 4, 2, 24)
    sinks = np.array([-40.0, 0.5, 6.0, 40.0])
    query, key, value, cotangent, of_sinks = (jnp.asarray(array, "float32") for array in (*arrays, sinks))

    def attend(query, key, value, sinks):
        return flash_attention(
            query, key, value, first, last, sinks=sinks, block=BLOCK, implementation=implementation
        )

    with gpu_interpreter(implementation):
        output, pull = jax.vjp(jax.jit(attend), query, key, value, of_sinks)
        actual = output, *pull(cotangent)
    for array, other in zip(actual, oracle(*arrays[:3], first, last, arrays[3], sinks), strict=True):
        np.testing.assert_allclose(array, other, atol=2e-6 * np.abs(other).max())


@each_implementation
def test_flash_attention_is_right_for_ranges_in_any_order(implementation):
    arrays, first, last = inputs(150, 270, 2, 1, 8)
    order = np.random.default_rng(1).permutation(150)
    check(implementation, arrays, first[order], last[order])


@each_implementation
def test_queries_without_keys_get_zeros_and_ranges_are_cut_at_the_keys(implementation):
    arrays, *_ = inputs(4, 6, 1, 1, 8)
    first, last = np.array([-3, 2, 6, 5], np.int32), np.array([1, 9, 9, 2], np.int32)
    cut = np.maximum(first, 0), np.minimum(last, 5)
    check(implementation, arrays, *cut)
    query, key, value, cotangent = (array.astype(np.float32) for array in arrays)
    actual, desired = (
        run(implementation, query, key, value, *ranges, cotangent) for ranges in ((first, last), cut)
    )
    for array, other in zip(actual, desired, strict=True):
        np.testing.assert_array_equal(array, other)
    assert not np.any(actual[0][2:])
    assert not np.any(actual[1][2:])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_ranges_may_have_any_integer_dtype(dtype):
    query, key = jnp.zeros((1, 1, 8)), jnp.zeros((300, 1, 8))
    value = jnp.broadcast_to(jnp.arange(300.0)[:, None, None], key.shape)
    output = flash_attention(query, key, value, jnp.zeros(1, dtype), jnp.full(1, 100, dtype))
    np.testing.assert_allclose(output, 50, rtol=1e-6)


@each_implementation
def test_tiles_out_of_range_are_not_read(implementation):
    """What is NaN in one sample does not reach another, if no block has tokens of both."""
    arrays, *_ = inputs(512, 512, 2, 1, 8)
    last = np.arange(512, dtype=np.int32)
    first = last // 256 * 256
    query, key, value, cotangent = (array.astype(np.float32) for array in arrays)
    desired = run(implementation, query, key, value, first, last, cotangent)
    own = last < 256
    query[own] = np.nan
    key[:256] = value[:256] = np.nan
    output, of_query, of_key, of_value = run(implementation, query, key, value, first, last, cotangent)
    for array, other, kept in zip(
        (output, of_query, of_key, of_value),
        desired,
        (~own, ~own, slice(256, None), slice(256, None)),
        strict=True,
    ):
        np.testing.assert_array_equal(array[kept], other[kept])


@each_implementation
@pytest.mark.parametrize("shared", [False, True])
def test_flash_attention_is_right_inside_shard_map(implementation, shared):
    """Every device has its own queries. Keys are either its own, or replicated with their gradients summed."""
    devices, own = 8, PartitionSpec("rank")
    mesh = jax.make_mesh((devices,), ("rank",), axis_types=(AxisType.Auto,))
    arrays, first, last = inputs(5 * devices, 30, 2, 1, 8)
    if not shared:
        arrays[1], arrays[2] = (np.tile(array, (devices, 1, 1)) for array in arrays[1:3])
    of_keys = PartitionSpec() if shared else own
    # The interpreter of the Triton kernels does not support checks of varying axes, but the kernels do.
    run = functools.partial(
        jax.shard_map,
        functools.partial(with_gradients, implementation),
        mesh=mesh,
        in_specs=(own, of_keys, of_keys, own, own, own),
        out_specs=(own, own, of_keys, of_keys),
    )
    query, key, value, cotangent = (array.astype(np.float32) for array in arrays)
    operands = query, key, value, first, last, cotangent
    with gpu_interpreter(implementation):
        shapes = jax.eval_shape(run(), *operands)
        assert [leaf.shape for leaf in shapes] == [query.shape, query.shape, key.shape, value.shape]
        if implementation == "triton" and shared:
            return
        result = jax.block_until_ready(jax.jit(run(check_vma=implementation != "triton"))(*operands))
    keys = (array[:30] for array in arrays[1:3])
    output, of_query, *of_keys = oracle(arrays[0], *keys, first, last, arrays[3])
    for array, other in zip(result[:2], (output, of_query), strict=True):
        np.testing.assert_allclose(array, other, atol=2e-6 * np.abs(other).max())
    for array, other in zip(result[2:], of_keys, strict=True):
        total = array if shared else array.reshape(devices, 30, 1, 8).sum(0)
        np.testing.assert_allclose(total, other, atol=2e-6 * np.abs(other).max())


def test_flash_attention_of_no_tokens_is_empty():
    none, some, number = jnp.zeros((0, 2, 8)), jnp.ones((3, 2, 8)), jnp.zeros(3, jnp.int32)
    assert flash_attention(none, some, some, number[:0], number[:0]).shape == (0, 2, 8)
    assert not np.any(flash_attention(some, none, none, number, number))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": np.ones((3, 8))}, "query: expected floating [T, heads, d], found float32[3, 8]"),
        ({"key": np.ones((4, 2, 6))}, "key: expected float32[S, key heads, 8], found float32[4, 2, 6]"),
        ({"key": np.ones((4, 3, 8))}, "key: 3 heads do not divide the 4 heads of the queries"),
        (
            {"value": np.ones((5, 2, 8))},
            "value: expected float32[4, 2, 8] like the keys, found float32[5, 2, 8]",
        ),
        ({"first": np.ones(3)}, "first: expected integer [3] for queries float32[3, 4, 8], found float32[3]"),
        (
            {"last": np.ones(4, int)},
            "last: expected integer [3] for queries float32[3, 4, 8], found int32[4]",
        ),
    ],
)
def test_flash_attention_names_mismatched_operands(changed, message):
    operands = {"query": np.ones((3, 4, 8)), "key": np.ones((4, 2, 8)), "value": np.ones((4, 2, 8))}
    operands |= {"first": np.zeros(3, int), "last": np.zeros(3, int)}
    operands |= changed
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(**{name: jnp.asarray(array) for name, array in operands.items()})


HOPPER = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def kernels_of(dtype, width, trusted, monkeypatch):
    """Return the number of kernels in a program for an H100 on which these checks have passed."""
    monkeypatch.setattr(implementation_module, "is_trusted", lambda check, _: check in trusted)
    x, number = jax.ShapeDtypeStruct((64, 1, width), dtype), jax.ShapeDtypeStruct((64,), "int32")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=HOPPER)):
        return str(
            jax.make_jaxpr(lambda *operands: flash_attention(*operands))(x, x, x, number, number)
        ).count("pallas_call")


@pytest.mark.parametrize(
    ("dtype", "width", "kernels"),
    [
        ("bfloat16", 128, 1),
        ("float16", 512, 1),
        ("float32", 256, 1),
        ("bfloat16", 520, 0),
        ("float32", 260, 0),
    ],
)
def test_none_chooses_the_kernels_that_have_passed_their_check_and_fit(dtype, width, kernels, monkeypatch):
    assert kernels_of(dtype, width, {"attention"}, monkeypatch) == kernels
    assert kernels_of(dtype, width, {"mosaic", "triton"}, monkeypatch) == 0


def test_flash_attention_says_which_implementations_there_are():
    x, number = jnp.ones((3, 1, 8)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="implementation='mosaic' is not one of xla, triton"):
        flash_attention(x, x, x, number, number, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation='triton' cannot run: cpu"):
        flash_attention(x, x, x, number, number, implementation="triton")
    wide = jnp.ones((3, 1, 300))
    with pytest.raises(
        ValueError, match="cannot run: float32 heads of 300 take 2048 bytes in blocks, more than 1024"
    ):
        flash_attention(wide, wide, wide, number, number, implementation="triton")
    with pytest.raises(ValueError, match="block=0 must be at least 1"):
        flash_attention(x, x, x, number, number, block=0)
