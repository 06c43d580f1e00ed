"""The calls for grouped products: they check shapes, choose an implementation, and define gradients.

With ``y = x W`` for the rows of each group, the gradient ``dx = dy W^T`` is the same product with transposed weights,
and ``dW = x^T dy`` sums over the rows of a group; so each product is a gradient of the others. To add an
implementation, write the two functions of an `Implementation` and add it to `IMPLEMENTATIONS`: the tests run every
entry. An implementation is called with shapes and dtypes that have been checked, and nothing is empty but groups:
weight buffers without slots are left out.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_dot.mosaic import grouped_dot_mosaic, grouped_outer_mosaic
from pallas_kernels.grouped_dot.reference import grouped_dot_reference, grouped_outer_reference
from pallas_kernels.grouped_dot.triton import grouped_dot_triton, grouped_outer_triton
from pallas_kernels.grouped_dot.xla import grouped_dot_xla, grouped_outer_xla
from pallas_kernels.implementation import (
    check_group_sizes,
    check_weights,
    choose_implementation,
    describe,
    resolve_out_dtype,
)
from pallas_kernels.varying_axes import match_varying_axes

type Array = jax.Array | np.ndarray


class Implementation(NamedTuple):
    """The two functions that an implementation of the grouped products consists of."""

    dot: Callable[..., jax.Array]
    """The product ``(rows, weights, group_sizes, transposed, out_dtype) -> [r, n]``."""
    outer: Callable[..., Sequence[jax.Array]]
    """The weight gradient ``(lhs, rhs, group_sizes, slots, out_dtype)`` of each buffer, ``[slots, k, n]``."""


IMPLEMENTATIONS: Final[Mapping[str, Implementation]] = {
    "reference": Implementation(grouped_dot_reference, grouped_outer_reference),
    "xla": Implementation(grouped_dot_xla, grouped_outer_xla),
    "mosaic": Implementation(grouped_dot_mosaic, grouped_outer_mosaic),
    "triton": Implementation(grouped_dot_triton, grouped_outer_triton),
}
"""All implementations of the grouped products, by name."""


def grouped_dot(
    rows: Array,
    weights: Sequence[Array],
    group_sizes: Array,
    *,
    transposed: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group of rows by the matrix of its own weight slot.

    Group sizes are data: one compilation serves every split of the rows. Products are summed in float32 (float64 for
    float64 rows). Weights may lie in any number of buffers, which are read where they are. The call works under
    `jax.jit`, `jax.grad` and `jax.shard_map`. A gradient of the result in another dtype than that of the rows is
    rounded to theirs.

    Args:
        rows: ``[r, k]`` floating, the row operand, sorted by group: first the rows of each slot of the first weight
            buffer, then those of the next buffer. Rows beyond the last group are padding and may hold anything.
        weights: the weight buffers, ``[slots, k, n]`` each, in the dtype of rows; ``[slots, n, k]`` if transposed. Any
            of them may have no slots; together they have at least one.
        group_sizes: ``[all slots]`` integer, the number of rows of each slot, buffer after buffer; together at most r.
            Sizes below 0 count as 0, and rows beyond r are left out.
        transposed: whether rows are multiplied by the transposed matrices.
        out_dtype: the dtype of the result, floating; None stands for that of rows.
        implementation: the name in `IMPLEMENTATIONS` of the implementation to run. None stands for "mosaic" where
            that can run, which is on Hopper GPUs, in bfloat16, with k and n multiples of 64; it copies rows whose
            number is no multiple of 8. Else it stands for "triton" on NVIDIA GPUs from compute capability 8.0 on, in
            bfloat16, float16 and float32. Elsewhere None stands for "xla", which runs on every platform of JAX and is
            fast on CPUs.

    Returns:
        ``[r, n]``, zero in padding. Gradients of padding and of the weights of empty groups are zero; those of the
        weights come as a sequence of buffers like ``weights``.

    Raises:
        ValueError: if shapes or dtypes do not fit together, if no implementation has the name, or if the named
            implementation cannot run here.

    >>> rows, homes, replicas = jnp.ones((4, 2)), jnp.ones((2, 2, 3)), 5 * jnp.ones((1, 2, 3))
    >>> grouped_dot(rows, (homes, replicas), jnp.array([1, 0, 2]))[:, 0].tolist()
    [2.0, 10.0, 10.0, 0.0]
    """
    rows, group_sizes = jnp.asarray(rows), jnp.asarray(group_sizes)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"rows: expected floating [r, k], found {describe(rows)}")
    matrix = ("n", rows.shape[1]) if transposed else (rows.shape[1], "n")
    buffers = check_weights(weights, rows, *matrix)
    check_group_sizes(group_sizes, [buffer.shape[0] for buffer in buffers])
    dtype = resolve_out_dtype(out_dtype, rows)
    columns = buffers[0].shape[1 if transposed else 2]
    name = choose_implementation(implementation, IMPLEMENTATIONS, rows, dtype, k=rows.shape[1], n=columns)
    if rows.size == 0:
        return jnp.zeros((rows.shape[0], columns), dtype)
    rows, group_sizes, *varying = match_varying_axes(rows, group_sizes, *buffers)
    return _dot(name, transposed, dtype, rows, tuple(varying), group_sizes)


def grouped_outer(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    slots: Sequence[int],
    out_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Sum the outer products of two row operands over each group: the weight gradient of `grouped_dot`.

    Args:
        lhs: ``[r, k]`` floating, the first row operand, sorted by group as in `grouped_dot`; padding may hold anything.
        rhs: ``[r, n]``, the second row operand, in the dtype of lhs and in the same order.
        group_sizes: ``[sum(slots)]`` integer, the number of rows of each slot; together at most r. Sizes below 0 count
            as 0, and rows beyond r are left out.
        slots: the number of slots of each weight buffer; some may be 0, but not all.
        out_dtype: the dtype of the results, floating; None stands for that of lhs.
        implementation: the name of the implementation to run, or None, as in `grouped_dot`.

    Returns:
        For each weight buffer, ``[slots, k, n]``: ``lhs^T rhs`` over the rows of each slot, zero for empty groups.

    Raises:
        ValueError: if shapes or dtypes do not fit together, if no implementation has the name, or if the named
            implementation cannot run here.

    >>> homes, replicas = grouped_outer(jnp.ones((4, 2)), jnp.ones((4, 3)), jnp.array([1, 0, 2]), slots=(2, 1))
    >>> homes[:, 0, 0].tolist(), replicas[:, 0, 0].tolist()
    ([1.0, 0.0], [2.0])
    """
    lhs, rhs, group_sizes = map(jnp.asarray, (lhs, rhs, group_sizes))
    if lhs.ndim != 2 or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"lhs: expected floating [r, k], found {describe(lhs)}")
    if rhs.ndim != 2 or rhs.shape[0] != lhs.shape[0] or rhs.dtype != lhs.dtype:
        raise ValueError(
            f"rhs: expected {lhs.dtype}[{lhs.shape[0]}, n] for lhs {describe(lhs)}, found {describe(rhs)}"
        )
    slots = tuple(slots)
    if sum(slots) < 1 or min(slots) < 0:
        raise ValueError(f"slots={slots} must be numbers of at least 0, and at least 1 in all")
    check_group_sizes(group_sizes, slots)
    dtype = resolve_out_dtype(out_dtype, lhs)
    name = choose_implementation(implementation, IMPLEMENTATIONS, lhs, dtype, k=lhs.shape[1], n=rhs.shape[1])
    if lhs.size == 0 or rhs.size == 0:
        return tuple(jnp.zeros((count, lhs.shape[1], rhs.shape[1]), dtype) for count in slots)
    some = tuple(count for count in slots if count)
    sums = _outer(name, some, dtype, *match_varying_axes(lhs, rhs, group_sizes))
    of_buffers = iter(sums)
    return tuple(next(of_buffers) if count else sums[0][:0] for count in slots)


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group of rows by its own matrix, with the arguments of `jax.lax.ragged_dot`.

    This is `grouped_dot` with one weight buffer.

    Args:
        lhs: ``[r, k]`` floating, the row operand, sorted by group.
        rhs: ``[groups, k, n]``, the matrix of each group, in the dtype of lhs.
        group_sizes: ``[groups]`` integer, the number of rows of each group; together at most r.
        preferred_element_type: the dtype of the result, floating; None stands for that of lhs.
        implementation: the name of the implementation to run, or None, as in `grouped_dot`.

    Returns:
        ``[r, n]``, zero beyond the last group.

    Raises:
        ValueError: if shapes or dtypes do not fit together, if no implementation has the name, or if the named
            implementation cannot run here.

    >>> ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 1]))[:, 0].tolist()
    [2.0, 2.0, 0.0]
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if (
        lhs.ndim != 2
        or rhs.ndim != 3
        or rhs.shape[0] < 1
        or rhs.shape[1] != lhs.shape[1]
        or rhs.dtype != lhs.dtype
    ):
        raise ValueError(
            f"expected lhs [r, k] and rhs [groups, k, n] of one dtype, found {describe(lhs)} and {describe(rhs)}"
        )
    return grouped_dot(
        lhs, [rhs], group_sizes, out_dtype=preferred_element_type, implementation=implementation
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _dot(
    name: str,
    transposed: bool,
    dtype: Any,
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
) -> jax.Array:
    return IMPLEMENTATIONS[name].dot(rows, weights, group_sizes, transposed, dtype)


def _dot_forward(
    name: str, transposed: bool, dtype: Any, *operands: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
    return _dot(name, transposed, dtype, *operands), operands


def _dot_backward(
    name: str, transposed: bool, _: Any, saved: tuple[Any, ...], d_out: jax.Array
) -> tuple[Any, ...]:
    rows, weights, group_sizes = saved
    d_out = d_out.astype(rows.dtype)
    d_rows = _dot(name, not transposed, rows.dtype, d_out, weights, group_sizes)
    lhs, rhs = (d_out, rows) if transposed else (rows, d_out)
    slots = tuple(buffer.shape[0] for buffer in weights)
    return d_rows, _outer(name, slots, rows.dtype, lhs, rhs, group_sizes), None


_dot.defvjp(_dot_forward, _dot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _outer(
    name: str, slots: tuple[int, ...], dtype: Any, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, ...]:
    return tuple(IMPLEMENTATIONS[name].outer(lhs, rhs, group_sizes, slots, dtype))


def _outer_forward(name: str, slots: tuple[int, ...], dtype: Any, *operands: jax.Array) -> tuple[Any, Any]:
    return _outer(name, slots, dtype, *operands), operands


def _outer_backward(
    name: str, _: tuple[int, ...], __: Any, saved: tuple[jax.Array, ...], d_out: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    lhs, rhs, group_sizes = saved
    weights = tuple(one.astype(lhs.dtype) for one in d_out)
    d_lhs = _dot(name, True, lhs.dtype, rhs, weights, group_sizes)
    return d_lhs, _dot(name, False, rhs.dtype, lhs, weights, group_sizes), None


_outer.defvjp(_outer_forward, _outer_backward)
