"""How results of kernels are held to what they must be."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NORM_LIMIT: Final = 0.01
"""The largest error as a part of the result's norm; rounding to bfloat16 takes 0.002."""
ENTRY_LIMIT: Final = 0.02
"""The largest error of an entry as a part of the largest entry."""


class Difference(NamedTuple):
    """How far a result is off."""

    norm: float
    """The norm of the error over the norm of what is wanted."""
    entry: float
    """The largest error of an entry over the largest entry of what is wanted."""


def difference(found: Any, wanted: Any) -> Difference:
    """Compare two arrays; NaN if the result is not finite.

    >>> difference(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    Difference(norm=0.0, entry=0.0)
    """
    found, wanted = (np.asarray(one, np.float32).reshape(-1) for one in (found, wanted))
    if not np.isfinite(found).all():
        return Difference(float("nan"), float("nan"))
    error, smallest = np.abs(found - wanted), np.float32(1e-30)
    return Difference(
        float(np.linalg.norm(error) / max(np.linalg.norm(wanted), smallest)),
        float(error.max(initial=0) / max(np.abs(wanted).max(initial=0), smallest)),
    )


def check_close(name: str, found: Any, wanted: Any) -> Difference:
    """Compare two trees of arrays, and return their largest difference.

    Args:
        name: what is compared, for the error message.
        found: the result, a tree of arrays.
        wanted: what it must be, a tree of the same arrays.

    Raises:
        ValueError: if an array is off by more than `NORM_LIMIT` or `ENTRY_LIMIT`, or is not finite.
    """
    largest = Difference(0.0, 0.0)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, one), other in pairs:
        off = difference(one, other)
        if not (off.norm <= NORM_LIMIT and off.entry <= ENTRY_LIMIT):
            raise ValueError(
                f"{name}, array {jax.tree_util.keystr(path)} of shape {list(one.shape)}: the error is {off.norm:.3g}"
                f" of the norm and {off.entry:.3g} of the largest entry, allowed are {NORM_LIMIT} and {ENTRY_LIMIT}"
            )
        largest = Difference(*map(max, largest, off))
    return largest


@jax.jit
def same_bits(found: Any, wanted: Any) -> jax.Array:
    """Return whether two trees of the same arrays are equal bit for bit, NaN among them.

    >>> bool(same_bits(np.float32([np.nan]), np.float32([np.nan]))), bool(same_bits(np.zeros(2), -np.zeros(2)))
    (True, False)
    """

    def bits(array: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return jnp.stack([(bits(one) == bits(other)).all() for one, other in pairs]).all()
