"""SwiGLU and its gradients on tiles in registers, as epilogues for the Hopper and the Triton kernels."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

GATE, UP, DOWN = 0, 1, 2
"""The indices of a slot's matrices on the second axis of the weights."""


def swiglu(sums: Sequence[jax.Array], _: Any) -> tuple[list[jax.Array], None]:
    """Return the hidden values computed from gate and up."""
    gate, up = sums
    return [gate * jax.nn.sigmoid(gate) * up], None


def swiglu_gradients(sums: Sequence[jax.Array], scale: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Compute the gradients of SwiGLU.

    Args:
        sums: gate, up, and the gradient of the hidden values before the row scale.
        scale: the row scale, in a shape that broadcasts against the sums.

    Returns:
        The gradients of gate and up and the scaled hidden values; and for each row the contribution of these columns to
        the gradient of its scale.
    """
    gate, up, unscaled = (values.astype(jnp.float32) for values in sums)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    hidden, d_hidden = silu * up, unscaled * scale
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return [d_gate, d_hidden * silu, hidden * scale], jnp.sum(unscaled * hidden, axis=1)
