"""The dense reference: a mixture of experts on one device, which gathers the weights of each token's experts."""

import jax
import jax.numpy as jnp
import numpy as np

from relibra_jax.contract.types import EMPTY


def mixture(x, ids, gates, experts):
    """Run every token's experts and sum their outputs, weighted by the gates.

    Args:
        x: the tokens ``[..., D]``.
        ids: the expert ids of each token ``[..., K]``, EMPTY for none.
        gates: the weights of the experts, ``[..., K]``.
        experts: the weights ``[E, 3, D, F]`` (gate, up, down transposed) in logical order.

    Returns:
        The outputs ``[..., D]``.
    """
    weights = experts[jnp.maximum(ids, 0)]
    gate, up, down = (weights[..., part, :, :] for part in range(3))
    hidden = jax.nn.silu(jnp.einsum("...d,...kdf->...kf", x, gate)) * jnp.einsum("...d,...kdf->...kf", x, up)
    out = jnp.einsum("...kf,...kdf->...kd", hidden, down)
    return (out * jnp.where(ids == EMPTY, 0, gates)[..., None]).sum(-2)


def assert_close(actual, expected, tolerance):
    """Assert that all leaves of two trees are close, relative to the largest value of each leaf."""
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
