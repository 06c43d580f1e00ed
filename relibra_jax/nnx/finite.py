"""A check for NaN in a model, which steps with a wrong plan or with rows of another batch leave in its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def check_finite(model: nnx.Module) -> None:
    """Raise unless all parameters are finite.

    Args:
        model: any module.

    Raises:
        ValueError: if a parameter is not finite. The message has its name.
    """
    params = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    finite = jax.device_get(_all_finite([leaf for _, leaf in params]))
    for (path, _), is_finite in zip(params, finite, strict=True):
        if not is_finite:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"parameter {name} is not finite: an earlier step ran with rows of another batch or with a wrong plan,"
                " or the training diverged; resume from an earlier checkpoint"
            )


@jax.jit
def _all_finite(leaves: list[Any]) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in leaves]
