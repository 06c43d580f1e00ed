"""The optimizer of a run: AdamW, whose moments may be stored in bfloat16, with clipped gradients."""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jaxtyping import DTypeLike, Float

from relibra_jax.support.limits import check_integer, check_not_negative, check_positive
from relibra_jax.support.suggestions import suggest_names

SCHEDULES: Final = ("constant", "cosine", "linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    """The settings of AdamW and of its learning rate after the supervised warm-up.

    Raises:
        ValueError: if a name is unknown, or a number is out of its range.
    """

    largest_gradient: float = 1.0
    """The norm to which larger gradients are clipped."""
    skipped_in_a_row: int = 3
    """The largest number of steps in a row that change nothing because a loss or the gradient is not finite.
    One more ends the run."""
    b1: float = 0.9
    """The decay of the first moment."""
    b2: float = 0.95
    """The decay of the second moment. 0.95 forgets the larger gradients of the warm-up within a few updates."""
    eps: float = 1e-8
    """The number that is added to the root of the second moment."""
    weight_decay: float = 1e-4
    """The factor of parameters that an update subtracts, times the learning rate."""
    schedule: str = "constant"
    """How the learning rate changes until the last update: constant, cosine or linear."""
    rising_updates: int = 0
    """The first updates from responses, over which the learning rate rises from 0."""
    final_share: float = 0.0
    """The share of the learning rate that is left at the last update, for cosine and linear."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"adamw.schedule {self.schedule!r} must be one of {', '.join(SCHEDULES)}"
                f"{suggest_names(self.schedule, SCHEDULES)}"
            )
        check_positive("adamw.largest_gradient", self.largest_gradient)
        check_positive("adamw.eps", self.eps)
        check_not_negative("adamw.weight_decay", self.weight_decay)
        for name in ("skipped_in_a_row", "rising_updates"):
            check_integer(f"adamw.{name}", getattr(self, name), least=0)
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"adamw.final_share={self.final_share} must be at least 0 and at most 1")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"adamw.{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.schedule == "constant" and self.final_share:
            raise ValueError(f"adamw.final_share={self.final_share} is not for a constant learning rate")


@functools.cache
def make_optimizer(
    supervised: float,
    reinforced: float,
    warmup_steps: int,
    settings: AdamW = AdamW(),
    *,
    updates: int = 1,
    moments: str,
) -> optax.GradientTransformation:
    """Make the optimizer of an agent, for gradients that `clip_factor` has clipped.

    Equal arguments give the same object, so that runs share compiled programs.

    Args:
        supervised: the learning rate of the warm-up.
        reinforced: the learning rate after it.
        warmup_steps: the number of updates of the warm-up.
        settings: the settings of AdamW.
        updates: the number of updates after the warm-up.
        moments: the dtype in which AdamW's moments are stored.
    """
    rates = [optax.constant_schedule(supervised), learning_rate(reinforced, settings, updates)]
    schedule = optax.join_schedules(rates, [warmup_steps])
    options = {name: getattr(settings, name) for name in ("b1", "b2", "eps", "weight_decay")}
    return store_state_in(moments, optax.adamw(schedule, **options))


def learning_rate(highest: float, settings: AdamW, updates: int) -> optax.Schedule:
    """Return the learning rate of the updates from responses.

    Args:
        highest: the largest learning rate.
        settings: how it rises and falls.
        updates: the number of updates.

    >>> rate = learning_rate(1.0, AdamW(schedule="linear", rising_updates=2, final_share=0.5), 6)
    >>> [float(rate(update)) for update in range(7)]
    [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    rising, falling = settings.rising_updates, max(updates - settings.rising_updates, 1)
    if settings.schedule == "cosine":
        rest = optax.cosine_decay_schedule(highest, falling, settings.final_share)
    else:
        last = highest * (settings.final_share if settings.schedule == "linear" else 1)
        rest = optax.linear_schedule(highest, last, falling)
    if not rising:
        return rest
    return optax.join_schedules([optax.linear_schedule(0.0, highest, rising), rest], [rising])


def clip_factor(norm: Float[jax.Array, ""], largest: float = 1.0) -> Float[jax.Array, ""]:
    """Return the factor that clips gradients of this global norm: NaN, which skips the step, for NaN and infinity.

    >>> [clip_factor(jnp.float32(norm)).tolist() for norm in (4.0, 0.5, jnp.inf)]
    [0.25, 1.0, nan]
    """
    return jnp.where(jnp.isfinite(norm), jnp.where(norm < largest, 1.0, largest / norm), jnp.nan)


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
