"""The public functions for grouped products: they check shapes, choose an implementation, and define gradients.

With ``y = x W`` for the rows of each group, the gradient ``dx = dy W^T`` is the same product with transposed weights,
and ``dW = x^T dy`` is a sum over the rows of a group. So each product is a gradient of the others. To add an
implementation, write the two functions of an `Implementation` and add it to `IMPLEMENTATIONS`; the tests run every
entry. An implementation can rely on checked shapes and dtypes, and on operands that are not empty. Groups may be empty,
but weight buffers without slots are removed before the call.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_dot.mosaic import grouped_dot_mosaic, grouped_outer_mosaic
from pallas_kernels.grouped_dot.reference import grouped_dot_reference, grouped_outer_reference
from pallas_kernels.grouped_dot.triton import grouped_dot_triton, grouped_outer_triton
from pallas_kernels.grouped_dot.xla import grouped_dot_xla, grouped_outer_xla
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.operands import (
    Array,
    as_arrays,
    check_group_sizes,
    check_weights,
    describe,
    resolve_out_dtype,
)
from pallas_kernels.varying_axes import match_varying_axes


class Implementation(NamedTuple):
    """The two functions of an implementation of the grouped products."""

    dot: Callable[..., jax.Array]
    """The product, a function ``(rows, weights, group_sizes, transposed, out_dtype) -> [r, n]``."""
    outer: Callable[..., Sequence[jax.Array]]
    """The weight gradients, a function ``(lhs, rhs, group_sizes, slots, out_dtype)`` that returns ``[slots, k, n]`` for
    each weight buffer."""


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
    """Multiply each group of rows by the matrix of its weight slot.

    Group sizes are data, so one compilation serves every split of the rows. Products are summed in float32 (float64 for
    float64 rows). The weights may be in any number of buffers, which are read in place, without a copy. The function
    works under `jax.jit`, `jax.grad` and `jax.shard_map`. In the backward pass, the gradient of the result is rounded
    to the dtype of the rows.

    Args:
        rows: the row operand, floating-point ``[r, k]``, sorted by group: first the rows of each slot of the first
            weight buffer, then those of the next buffer. Rows after the last group are padding and may have any value.
        weights: the weight buffers, each ``[slots, k, n]``, or ``[slots, n, k]`` if transposed, in the dtype of the
            rows. A buffer may have no slots, but there must be at least one slot in total.
        group_sizes: the number of rows of each slot, in the order of the buffers, integer ``[all slots]``. The sum
            should be at most r. Sizes below 0 count as 0, and rows beyond r are ignored.
        transposed: whether to multiply the rows by the transposed matrices.
        out_dtype: the floating-point dtype of the result. None stands for the dtype of the rows.
        implementation: the name of the implementation to run, a key of `IMPLEMENTATIONS`. None chooses "mosaic" on
            Hopper GPUs for bfloat16 rows if k and n are multiples of 64; it copies the rows if their number is not a
            multiple of 8. Else None chooses "triton" on NVIDIA GPUs of compute capability 8.0 or higher for bfloat16,
            float16 and float32 rows. Else None chooses "xla", which runs on every platform of JAX and is fast on CPUs.
            None skips a kernel that has not passed `pallas_kernels.self_check` on this machine.

    Returns:
        The products, ``[r, n]``, with zeros in the padding. The gradients of padding and of the weights of empty groups
        are zero. The gradient of the weights is a sequence of buffers with the shapes of ``weights``.

    Raises:
        ValueError: if shapes or dtypes do not match, if no implementation has the given name, or if the named
            implementation cannot run on this device with these operands.

    >>> rows, homes, replicas = jnp.ones((4, 2)), jnp.ones((2, 2, 3)), 5 * jnp.ones((1, 2, 3))
    >>> grouped_dot(rows, (homes, replicas), jnp.array([1, 0, 2]))[:, 0].tolist()
    [2.0, 10.0, 10.0, 0.0]
    """
    rows, group_sizes = as_arrays(rows=rows, group_sizes=group_sizes)
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
    """Sum the outer products of two row operands over each group, which is the weight gradient of `grouped_dot`.

    Args:
        lhs: the first row operand, floating-point ``[r, k]``, sorted by group as in `grouped_dot`. Padding may have any
            value.
        rhs: the second row operand, ``[r, n]``, in the order and dtype of lhs.
        group_sizes: the number of rows of each slot, integer ``[sum(slots)]``. The sum should be at most r. Sizes below
            0 count as 0, and rows beyond r are ignored.
        slots: the number of slots of each weight buffer. Some may be 0, but not all.
        out_dtype: the floating-point dtype of the results. None stands for the dtype of lhs.
        implementation: the name of the implementation to run. None chooses one as in `grouped_dot`.

    Returns:
        One array ``[slots, k, n]`` for each weight buffer: ``lhs^T rhs`` over the rows of each slot, and zeros for
        empty groups.

    Raises:
        ValueError: if shapes or dtypes do not match, if no implementation has the given name, or if the named
            implementation cannot run on this device with these operands.

    >>> homes, replicas = grouped_outer(jnp.ones((4, 2)), jnp.ones((4, 3)), jnp.array([1, 0, 2]), slots=(2, 1))
    >>> homes[:, 0, 0].tolist(), replicas[:, 0, 0].tolist()
    ([1.0, 0.0], [2.0])
    """
    lhs, rhs, group_sizes = as_arrays(lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    if lhs.ndim != 2 or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"lhs: expected floating [r, k], found {describe(lhs)}")
    if rhs.ndim != 2 or rhs.shape[0] != lhs.shape[0] or rhs.dtype != lhs.dtype:
        raise ValueError(
            f"rhs: expected {lhs.dtype}[{lhs.shape[0]}, n] for lhs {describe(lhs)}, found {describe(rhs)}"
        )
    if not isinstance(slots, Sequence) or not all(isinstance(count, Integral) for count in slots):
        raise TypeError(f"slots={slots!r} must be a sequence of integers")
    slots = tuple(slots)
    if sum(slots) < 1 or min(slots) < 0:
        raise ValueError(f"slots={slots} must be non-negative and have a sum of at least 1")
    check_group_sizes(group_sizes, slots)
    dtype = resolve_out_dtype(out_dtype, lhs)
    name = choose_implementation(implementation, IMPLEMENTATIONS, lhs, dtype, k=lhs.shape[1], n=rhs.shape[1])
    if lhs.size == 0 or rhs.size == 0:
        return tuple(jnp.zeros((count, lhs.shape[1], rhs.shape[1]), dtype) for count in slots)
    positive_slots = tuple(count for count in slots if count)
    sums = _outer(name, positive_slots, dtype, *match_varying_axes(lhs, rhs, group_sizes))
    sums_iterator = iter(sums)
    return tuple(next(sums_iterator) if count else sums[0][:0] for count in slots)


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each group of rows by its own matrix, with the main arguments of `jax.lax.ragged_dot`.

    This is `grouped_dot` with one weight buffer.

    Args:
        lhs: the row operand, floating-point ``[r, k]``, sorted by group.
        rhs: the matrix of each group, ``[groups, k, n]``, in the dtype of lhs.
        group_sizes: the number of rows of each group, integer ``[groups]``. The sum should be at most r.
        preferred_element_type: the floating-point dtype of the result. None stands for the dtype of lhs.
        implementation: the name of the implementation to run. None chooses one as in `grouped_dot`.

    Returns:
        The products, ``[r, n]``, with zeros after the last group.

    Raises:
        ValueError: if shapes or dtypes do not match, if no implementation has the given name, or if the named
            implementation cannot run on this device with these operands.

    >>> ragged_dot(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 1]))[:, 0].tolist()
    [2.0, 2.0, 0.0]
    """
    lhs, rhs = as_arrays(lhs=lhs, rhs=rhs)
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
    weights = tuple(gradient.astype(lhs.dtype) for gradient in d_out)
    d_lhs = _dot(name, True, lhs.dtype, rhs, weights, group_sizes)
    return d_lhs, _dot(name, False, rhs.dtype, lhs, weights, group_sizes), None


_outer.defvjp(_outer_forward, _outer_backward)
