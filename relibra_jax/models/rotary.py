"""Rotary position embeddings (RoFormer, arXiv 2104.09864), and their stretching to longer contexts by YaRN.

Element i of the first rotary half of a head is rotated with element i of the second, by the position times ``rate_i``,
where ``rate_i = theta^(-i / half)``. YaRN (arXiv 2309.00071, section 3) divides the rates of slow rotations by a factor
and leaves those of fast ones as they are, with a linear ramp between them, and multiplies queries and keys by a number.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.types import Array


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """The settings of YaRN; the names in comments are those of Hugging Face's ``rope_scaling``.

    Raises:
        ValueError: if ``factor`` is below 1, or ``fast_turns`` is not above ``slow_turns``.
    """

    factor: float
    """The factor by which the context grows (``factor``)."""
    first_context: int
    """The context of the model before it grows, in tokens (``original_max_position_embeddings``)."""
    fast_turns: float = 32.0
    """Elements that turn at least this often in the first context keep their rates (``beta_fast``)."""
    slow_turns: float = 1.0
    """The rates of elements that turn at most this often are divided by the factor (``beta_slow``)."""
    whole: bool = True
    """Whether the ends of the ramp are rounded to whole elements, outwards (``truncate``)."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} must be at least 1")
        if self.fast_turns <= self.slow_turns:
            raise ValueError(f"beta_fast={self.fast_turns} must be above beta_slow={self.slow_turns}")

    @property
    def amplitude(self) -> float:
        """The factor of queries and keys."""
        return 0.1 * math.log(self.factor) + 1

    def scale_rates(self, rates: Float[np.ndarray, " half"], theta: float) -> Float[np.ndarray, " half"]:
        """Divide the rates of slow rotations by the factor.

        Args:
            rates: the rates of all elements.
            theta: the base of the rates.

        >>> yarn = Yarn(factor=4.0, first_context=100, fast_turns=2.0, slow_turns=0.5)
        >>> rates = 100.0 ** -(np.arange(4) / 4)
        >>> (yarn.scale_rates(rates, 100.0) / rates).round(3).tolist()
        [1.0, 1.0, 0.75, 0.5]
        """
        half = len(rates)

        def element(turns: float) -> float:
            return half * math.log(self.first_context / (turns * 2 * math.pi)) / math.log(theta)

        low, high = element(self.fast_turns), element(self.slow_turns)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        slow = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
        return rates * (slow / self.factor + 1 - slow)


def rotate(
    x: Float[Array, "B t heads width"],
    positions: Int[Array, "B t"],
    *,
    width: int,
    theta: float,
    yarn: Yarn | None = None,
) -> Float[jax.Array, "B t heads width"]:
    """Rotate queries or keys by their positions, in float32.

    Args:
        x: the queries or keys.
        positions: the position of each token in its sample.
        width: the number of elements of a head that are rotated, from its start.
        theta: the base of the rates.
        yarn: the settings of YaRN. None leaves the rates as they are.
    """
    rotary, rest = jnp.split(x, [width], axis=-1)
    half = width // 2
    if yarn is None:
        rates, amplitude = theta ** (-jnp.arange(half, dtype=jnp.float32) / half), 1.0
    else:
        scaled = yarn.scale_rates(theta ** (-np.arange(half) / half), theta)
        rates, amplitude = jnp.asarray(scaled, jnp.float32), yarn.amplitude
    angles = jnp.multiply.outer(positions.astype(jnp.float32), rates)[..., None, :]
    first, second = jnp.split(rotary.astype(jnp.float32), 2, axis=-1)
    cos, sin = amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)
    halves = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(half.astype(x.dtype) for half in halves), rest], axis=-1)
