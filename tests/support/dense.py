"""The dense oracle: a mixture of experts with all of them in one place, a token's weights gathered for it."""

import jax
import jax.numpy as jnp
import numpy as np

from relibra_jax.types import EMPTY


def mixture(x, ids, gates, experts):
    """Every token's experts, weighted by their gates and summed.

    Args:
        x: tokens ``[..., D]``.
        ids: their experts ``[..., K]``, EMPTY for none.
        gates: the weight of each, ``[..., K]``.
        experts: ``[E, 3, D, F]``, gate, up and down transposed, in logical order.

    Returns:
        ``[..., D]``.
    """
    chosen = experts[jnp.maximum(ids, 0)]
    gate, up, down = (chosen[..., part, :, :] for part in range(3))
    hidden = jax.nn.silu(jnp.einsum("...d,...kdf->...kf", x, gate)) * jnp.einsum("...d,...kdf->...kf", x, up)
    out = jnp.einsum("...kf,...kdf->...kd", hidden, down)
    return (out * jnp.where(ids == EMPTY, 0, gates)[..., None]).sum(-2)


def assert_close(actual, expected, tolerance):
    """Every leaf of a tree, relative to the largest value of the leaf."""
    actual, expected = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (actual, expected)
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        value = np.asarray(value, np.float64)
        scale = max(np.abs(value).max(), 1e-3)
        error = np.abs(np.asarray(actual[name], np.float64) - value).max() / scale
        assert error <= tolerance, f"{name}: {error}"
