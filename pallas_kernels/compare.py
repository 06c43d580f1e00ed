"""Comparison of kernel results with expected results."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

NORM_LIMIT: Final = 0.01
"""The largest allowed norm of the error, relative to the norm of the expected array. Rounding to bfloat16 alone gives
0.002."""
ENTRY_LIMIT: Final = 0.02
"""The largest allowed error of an entry, relative to the largest entry of the expected array."""


class Difference(NamedTuple):
    """The relative error of a result, in two measures."""

    norm: float
    """The norm of the error, divided by the norm of the expected array."""
    entry: float
    """The largest error of an entry, divided by the largest magnitude in the expected array."""


def check_close(name: str, result: Any, expected: Any) -> Difference:
    """Check that every array of a tree is close to the expected one, and return the largest difference.

    The arrays are compared where they are, on the device.

    Args:
        name: the name of the comparison in the error message.
        result: a tree of arrays.
        expected: the expected values, a tree with the same structure.

    Raises:
        ValueError: if the error of an array exceeds `NORM_LIMIT` or `ENTRY_LIMIT`, or an array is not finite.

    >>> check_close("sums", jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0]))
    Difference(norm=0.0, entry=0.0)
    """
    largest = Difference(0.0, 0.0)
    paths = jax.tree.leaves_with_path(result)
    errors = jax.device_get(_differences(jax.tree.leaves(result), jax.tree.leaves(expected)))
    for (path, array), measures in zip(paths, errors, strict=True):
        error = Difference(*map(float, measures))
        if not (error.norm <= NORM_LIMIT and error.entry <= ENTRY_LIMIT):
            raise ValueError(
                f"{name}, array {jax.tree_util.keystr(path)} of shape {list(array.shape)}: the error is"
                f" {error.norm:.3g} of the norm and {error.entry:.3g} of the largest entry;"
                f" the limits are {NORM_LIMIT} and {ENTRY_LIMIT}"
            )
        largest = Difference(*map(max, largest, error))
    return largest


@jax.jit
def _differences(results: list[Any], expected: list[Any]) -> list[jax.Array]:
    """Return the two measures of each array's error, which are NaN if a result is not finite."""

    def compare(result: Any, expected: Any) -> jax.Array:
        result, expected = (jnp.ravel(array).astype(jnp.float32) for array in (result, expected))
        error, smallest = jnp.abs(result - expected), jnp.float32(1e-30)
        norm = jnp.linalg.norm(error) / jnp.maximum(jnp.linalg.norm(expected), smallest)
        entry = error.max(initial=0) / jnp.maximum(jnp.abs(expected).max(initial=0), smallest)
        finite = jnp.isfinite(result).all()
        return jnp.where(finite, jnp.stack([norm, entry]), jnp.nan)

    return [compare(*pair) for pair in zip(results, expected, strict=True)]


@jax.jit
def same_bits(result: Any, expected: Any) -> jax.Array:
    """Return whether two trees of arrays are bitwise equal; a NaN equals a NaN with the same bits.

    >>> bool(same_bits(jnp.array([jnp.nan]), jnp.array([jnp.nan]))), bool(same_bits(jnp.zeros(2), -jnp.zeros(2)))
    (True, False)
    """

    def bits(array: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))

    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return jnp.stack([(bits(array) == bits(reference)).all() for array, reference in pairs]).all()
