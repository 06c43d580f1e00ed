"""The optimizer of a run: AdamW, whose moments may be stored in bfloat16, with clipped gradients."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jaxtyping import DTypeLike, Float

LARGEST_GRADIENT: Final = 1.0
"""The norm to which larger gradients are clipped."""
SECOND_MOMENT: Final = 0.95
"""The decay of AdamW's second moment. It forgets the larger gradients of the warm-up within a few updates."""


@functools.cache
def make_optimizer(
    supervised: float, reinforced: float, warmup_steps: int, *, critic_rate: float | None, moments: str
) -> optax.GradientTransformation:
    """Make the optimizer of an agent, for gradients that `clip_factor` has clipped.

    Equal arguments give the same object, so that runs share compiled programs.

    Args:
        supervised: the learning rate of the warm-up.
        reinforced: the learning rate after it.
        warmup_steps: the number of updates of the warm-up.
        critic_rate: the factor of the critic's learning rate. None for an agent without a critic.
        moments: the dtype in which AdamW's moments are stored.
    """
    rates = [optax.constant_schedule(supervised), optax.constant_schedule(reinforced)]
    schedule = optax.join_schedules(rates, [warmup_steps])
    adamw = store_state_in(moments, optax.adamw(schedule, b2=SECOND_MOMENT))
    if critic_rate is None:
        return adamw
    return optax.chain(adamw, optax.masked(optax.scale(critic_rate), _of_critic))


def clip_factor(norm: Float[jax.Array, ""]) -> Float[jax.Array, ""]:
    """Return the factor that clips gradients of this global norm. NaN and infinity stay NaN.

    >>> clip_factor(jnp.float32(4.0)).tolist(), clip_factor(jnp.float32(0.5)).tolist()
    (0.25, 1.0)
    """
    return jnp.where(norm < LARGEST_GRADIENT, 1.0, LARGEST_GRADIENT / norm)


def store_state_in(dtype: DTypeLike, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Make a transformation that stores its floating-point state in a dtype, and computes with it in float32.

    `optax.adamw` has ``mu_dtype`` for the first moment alone. Values are rounded to the nearest when they are stored. A
    moment with decay b changes by 1 - b of its difference from the gradient, and bfloat16 loses changes below 0.4% of
    it. So moments follow the gradients for decays of 0.9 and 0.95, and stand still for one of 0.999.

    Args:
        dtype: the dtype of the stored state. Integers, such as step numbers, stay as they are.
        tx: the transformation.

    >>> tx = store_state_in("bfloat16", optax.scale_by_adam(b2=0.95))
    >>> tx.init(jnp.zeros(3)).nu.dtype
    dtype(bfloat16)
    """

    def cast(state: Any, dtype: DTypeLike) -> Any:
        def cast_leaf(leaf: jax.Array) -> jax.Array:
            return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

        return jax.tree.map(cast_leaf, state)

    def init(params: Any) -> Any:
        return cast(tx.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _of_critic(params: Any) -> Any:
    """Mark the parameters of an agent that belong to its critic."""
    return jax.tree.map_with_path(lambda path, _: path[0].key == "critic", params)
