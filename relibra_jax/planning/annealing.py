"""Simulated annealing in heat-bath form: the driver that the searches of this package share.

A step proposes several changes of the state and their prices, and draws one of them or none, with probability
proportional to ``exp(-price / temperature)`` (the Gumbel-max trick). A problem is two functions: ``propose`` draws and
prices changes, and ``apply`` makes the chosen one. ReLibra (arXiv 2605.08639) searches by annealing, too; the heat-bath
form, which prices many swaps in one step, is ours.

All random numbers of a search are drawn in one call. XLA compiles every call of a `jax.random` function separately, and
threefry is large: with one call for each kind of random number, they were most of the compiled code of a plan.
"""

import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray, UInt32

REFINING: Final = 3e-4
"""The initial temperature of a search that starts from homes that suit the batch. A higher one would lose them."""


def anneal[State, Draw, Changes](
    state: State,
    draws: Draw,
    noise: Float[jax.Array, "steps choices #problems"],
    *,
    propose: Callable[[State, Draw], tuple[Float[jax.Array, "choices problems"], Changes]],
    apply: Callable[[State, Draw, Changes, Int[jax.Array, " problems"]], State],
) -> State:
    """Run the steps of a search for several problems at once.

    Args:
        state: the state at the start.
        draws: the random numbers that ``propose`` takes, with a leading axis of steps.
        noise: Gumbel noise times the temperature of each step, as `scaled_noise` returns it.
        propose: the function that returns the price of no change, then those of the proposed changes, and the data that
            ``apply`` needs.
        apply: the function that makes the chosen change of each problem; the choice -1 is no change.

    Returns:
        The state after the last step.
    """

    def step(state: State, inputs: tuple[Draw, jax.Array]) -> tuple[State, None]:
        draw, noise = inputs
        prices, changes = propose(state, draw)
        return apply(state, draw, changes, jnp.argmin(prices - noise, axis=0) - 1), None

    return jax.lax.scan(step, state, (draws, noise))[0]


def scaled_noise(
    bits: UInt32[jax.Array, "steps choices *#problems"], temperature: Float[jax.Array, "steps *#problems"]
) -> Float[jax.Array, "steps choices *problems"]:
    """Convert random bits to Gumbel noise times the temperature of each step, for `anneal`."""
    between = [1] * (bits.ndim - temperature.ndim)
    return gumbel(bits) * temperature.reshape(len(temperature), *between, *temperature.shape[1:])


def cooling(
    hottest: Float[jax.Array, "*problems"] | float, coldest: float, steps: int
) -> Float[jax.Array, "steps *problems"]:
    """Return the temperature of every annealing step: geometric, and 0 in the last tenth of the steps.

    Args:
        hottest: the temperature of the first step, of all problems or of each.
        coldest: the temperature at the end of the geometric sequence.
        steps: the number of steps.

    Returns:
        The temperatures, float32.

    >>> [round(value, 3) for value in cooling(1.0, 0.1, 11).tolist()]
    [1.0, 0.794, 0.631, 0.501, 0.398, 0.316, 0.251, 0.2, 0.158, 0.126, 0.0]
    """

    def of_one(hottest: Float[jax.Array, ""]) -> Float[jax.Array, " steps"]:
        temperature = jnp.geomspace(hottest, jnp.float32(coldest), steps, dtype=jnp.float32)
        return jnp.where(jnp.arange(steps) < 0.9 * steps, temperature, 0)

    each = jnp.asarray(hottest, jnp.float32)
    return jax.vmap(of_one, 0, 1)(each.ravel()).reshape(steps, *each.shape)


def draw_bits(key: PRNGKeyArray, *shapes: tuple[int, ...]) -> list[UInt32[jax.Array, "..."]]:
    """Draw random bits in arrays of the given shapes.

    Args:
        key: random key, consumed.
        *shapes: the shape of each array.

    Returns:
        One array of independent uint32 for each shape.

    >>> [bits.shape for bits in draw_bits(jax.random.key(0), (2, 3), (4,))]
    [(2, 3), (4,)]
    """
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + math.prod(shape))
    # The bits are drawn flat, because LLVM would unroll the short inner loops of other shapes, with 20 threefry rounds
    # in each iteration.
    flat = jax.random.bits(key, (ends[-1],), jnp.uint32)
    return [flat[a:b].reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


def integers(bits: UInt32[jax.Array, "*shape"], bound: int) -> Int[jax.Array, "*shape"]:
    """Convert random bits to integers below a bound.

    Args:
        bits: independent random bits.
        bound: the number of different integers.

    Returns:
        Integers from 0 to ``bound - 1``, int32. Lower integers are more probable by at most ``bound`` in 2**32.
    """
    return (bits % jnp.uint32(bound)).astype(jnp.int32)


def gumbel(bits: UInt32[jax.Array, "*shape"]) -> Float[jax.Array, "*shape"]:
    """Convert random bits to standard Gumbel noise, float32.

    With it, ``argmax(x + gumbel)`` samples from ``softmax(x)``.
    """
    # 23 bits plus one half are strictly between 0 and 1 after scaling, and exact in float32.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))
