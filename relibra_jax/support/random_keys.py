"""Random keys among other arrays."""

from typing import Any

import jax


def is_key(leaf: Any) -> bool:
    """Return whether a leaf of a tree is a random key of the new style, as `jax.random.key` makes it.

    >>> is_key(jax.random.key(0)), is_key(jax.random.key_data(jax.random.key(0))), is_key(None)
    (True, False, False)
    """
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
