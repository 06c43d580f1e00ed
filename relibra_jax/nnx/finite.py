"""Whether a model is still a model: steps under wrong plans, or with rows of another batch, leave NaN in it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def check_finite(model: nnx.Module) -> None:
    """Raise unless all parameters are finite.

    Args:
        model: any module.

    Raises:
        ValueError: if one is not; names it.
    """
    params = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    finite = jax.device_get(_all_finite([leaf for _, leaf in params]))
    for (path, _), good in zip(params, finite, strict=True):
        if not good:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"parameter {name} is not finite: a step before ran with rows of another batch, or under a wrong plan,"
                " or the training diverged; go on from an earlier checkpoint"
            )


@jax.jit
def _all_finite(leaves: list[Any]) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in leaves]
