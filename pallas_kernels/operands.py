"""The checks of the operands that callers pass, shared by all functions of this package."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array | np.ndarray


def as_arrays(**operands: Any) -> tuple[jax.Array, ...]:
    """Return operands, by their names, as JAX arrays.

    Raises:
        TypeError: if one is not an array of numbers.

    >>> as_arrays(rows="many")
    Traceback (most recent call last):
    TypeError: rows: expected an array, found str
    """
    arrays = []
    for name, operand in operands.items():
        try:
            arrays.append(jnp.asarray(operand))
        except (TypeError, ValueError):
            raise TypeError(f"{name}: expected an array, found {type(operand).__name__}") from None
    return tuple(arrays)


def check_weights(weights: Sequence[Any], rows: jax.Array, *matrix: int | str) -> tuple[jax.Array, ...]:
    """Check the weight buffers, and return those that have at least one slot.

    Args:
        weights: the buffers that the caller passed.
        rows: the row operand. The weights must have its dtype.
        matrix: the required dimensions of one slot's weights. A string is the name of a dimension that may have any
            size.

    Returns:
        The buffers that have slots, in their order.

    Raises:
        TypeError: if the weights are not a sequence of arrays.
        ValueError: if the weights are one array, if the shape or dtype of a buffer does not match the rows or the first
            buffer, or if no buffer has a slot.
    """
    if isinstance(weights, jax.Array | np.ndarray):
        raise ValueError(f"weights: expected a sequence of weight buffers, found one {describe(weights)}")
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise TypeError(f"weights: expected a sequence of weight buffers, found {type(weights).__name__}")
    buffers = as_arrays(**{f"weights[{index}]": buffer for index, buffer in enumerate(weights)})
    for index, buffer in enumerate(buffers):
        shape = tuple(
            actual if isinstance(size, str) else size
            for size, actual in zip(matrix, buffer.shape[1:], strict=False)
        )
        if len(shape) != len(matrix) or buffer.shape[1:] != shape or buffer.dtype != rows.dtype:
            raise ValueError(
                f"weights[{index}]: expected {rows.dtype}[slots, {', '.join(map(str, matrix))}]"
                f" for rows {describe(rows)}, found {describe(buffer)}"
            )
        if buffer.shape[1:] != buffers[0].shape[1:]:
            raise ValueError(
                f"weights[{index}]: expected matrices like those of weights[0] {describe(buffers[0])},"
                f" found {describe(buffer)}"
            )
    if not any(buffer.shape[0] for buffer in buffers):
        raise ValueError(f"weights: expected at least one slot, found [{', '.join(map(describe, buffers))}]")
    return tuple(buffer for buffer in buffers if buffer.shape[0])


def check_group_sizes(group_sizes: jax.Array, slots: Sequence[int]) -> None:
    """Check that there is one integer size for each weight slot.

    Args:
        group_sizes: the group sizes that the caller passed.
        slots: the number of slots of each weight buffer.

    Raises:
        ValueError: if the shape is not ``[sum(slots)]`` or the dtype is not an integer type.
    """
    if group_sizes.shape != (sum(slots),) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes: expected integers [{sum(slots)}] for weights of {' + '.join(map(str, slots))} slots,"
            f" found {describe(group_sizes)}"
        )


def resolve_out_dtype(out_dtype: Any, rows: jax.Array) -> Any:
    """Return the dtype of a result: ``out_dtype``, or the dtype of the rows if it is None.

    Raises:
        ValueError: if the dtype is not a floating-point type.
    """
    dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"out_dtype: expected a floating dtype, found {dtype}")
    return dtype


def describe(array: jax.Array | np.ndarray) -> str:
    """Return the dtype and shape of an array, for error messages.

    >>> describe(jnp.zeros((2, 3)))
    'float32[2, 3]'
    """
    return f"{array.dtype}{list(array.shape)}"
