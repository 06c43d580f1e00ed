"""SwiGLU and its gradients on tiles in registers: what the kernels of several platforms apply to their sums."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

GATE, UP, DOWN = 0, 1, 2
"""The matrices of a slot, as indices of the weights' second axis."""


def swiglu(sums: Sequence[jax.Array], _: Any) -> tuple[list[jax.Array], None]:
    """Return the hidden values of gate and up."""
    gate, up = sums
    return [gate * jax.nn.sigmoid(gate) * up], None


def swiglu_gradients(sums: Sequence[jax.Array], scale: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return the gradients of gate and up and the scaled hidden values, and what each row adds to its scale's gradient.

    Args:
        sums: gate, up, and the gradient of the hidden values before the row scale.
        scale: the row scale, as an array that broadcasts against the sums.
    """
    gate, up, unscaled = (one.astype(jnp.float32) for one in sums)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    hidden, d_hidden = silu * up, unscaled * scale
    d_gate = d_hidden * up * (sigmoid + silu * (1 - sigmoid))
    return [d_gate, d_hidden * silu, hidden * scale], jnp.sum(unscaled * hidden, axis=1)
