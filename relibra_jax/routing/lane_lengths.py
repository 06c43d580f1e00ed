"""The lengths of lanes among which a fitted exchange chooses.

A fitted exchange sends, in each layer and micro-batch, only the least of at most ten lengths that suffices for the
longest lane. Each length is a compiled branch, so they are few, and they are fitted to a batch when its buffers are
counted: of all sets of `FITTED` lengths, those with which the batch sends the fewest rows. Lengths for other batches
are beside them: none, half of the least, and two above the longest, the last of which is the whole buffer.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num

from relibra_jax.contract.types import Array

FITTED: Final = 6
"""The number of lengths that are fitted to a batch."""
UNFITTED: Final = (0,) * FITTED
"""The lengths of a buffer that was not counted."""
POINTS: Final = 64
"""The most lanes of a batch from whose lengths the fitted ones are chosen, evenly spread in ascending order."""
UNCOUNTED_SIXTEENTHS: Final = (0, 3, 6, 8, 9, 10, 11, 12, 13, 16)
"""The lengths of buffers that were not counted, and of layers in pieces, in sixteenths of the buffers' lanes. Those of
`relibra_jax.routing.sizes.LAYER_SIXTEENTHS` are among them."""


@jax.jit
def fitted_lengths(longest: Num[Array, "*lanes"]) -> Num[jax.Array, " lengths"]:
    """Choose the `FITTED` lengths with which lanes are sent in the fewest rows, ascending, if each lane is sent in the
    least length that suffices.

    Lanes without rows need no length; if fewer lengths are enough, the first are 0. They are exact for up to `POINTS`
    lanes, of less than 16 million rows. Works under jit.

    Args:
        longest: the rows of the longest lane of each layer and micro-batch.

    >>> fitted_lengths(jnp.array([10, 11, 20, 21, 40, 41, 80, 81])).tolist()
    [10, 11, 20, 21, 41, 81]
    """
    values = jnp.sort(jnp.asarray(longest).ravel())
    number = min(len(values), POINTS)
    ends = np.ceil(np.arange(1, number + 1) * len(values) / number).astype(int) - 1
    points = jnp.concatenate([jnp.zeros_like(values[:1]), values[ends]])
    index = jnp.arange(number + 1, dtype=points.dtype)
    # The rows of the points from one to another if their lanes are all as long as the last.
    covered = index[None] - index[:, None]
    too_many = points[-1] * (number + 1)
    rows = jnp.where(covered >= 0, points[None] * covered, too_many)

    def with_one_more(least, _):
        total = least[:, None] + rows
        return total.min(0), total.argmin(0)

    _, begins = jax.lax.scan(with_one_more, jnp.where(points == 0, 0, too_many), length=FITTED)

    def before(end, begin):
        return begin[end], points[end]

    return jax.lax.scan(before, jnp.int32(number), begins.astype(jnp.int32), reverse=True)[1]


def lane_lengths(pair: int, fitted: tuple[int, ...]) -> tuple[int, ...]:
    """Return all lengths that a fitted exchange can send, ascending.

    Args:
        pair: the lane of the buffer, `relibra_jax.routing.sizes.ExchangeSizes.pair`.
        fitted: the lengths that were fitted to a batch; `UNFITTED` for a buffer that was not counted, or for pieces.

    >>> lane_lengths(160, (100, 104, 110, 120, 124, 128))
    (0, 50, 100, 104, 110, 120, 124, 128, 136, 160)
    >>> lane_lengths(160, UNFITTED)
    (0, 30, 60, 80, 90, 100, 110, 120, 130, 160)
    """
    if not any(fitted):
        return tuple(sorted({-(-pair * part // 16) for part in UNCOUNTED_SIXTEENTHS}))
    above = fitted[-1] + -(-(pair - fitted[-1]) // 4)
    least = min(length for length in fitted if length)
    return tuple(sorted({0, -(-least // 2), *fitted, above, pair}))


def sent_lanes(longest: Num[Array, "*lanes"]) -> Num[jax.Array, "*lanes"]:
    """Return the rows that a fitted exchange sends of each lane of the batch to which it is fitted, under jit.

    >>> sent_lanes(jnp.array([[0, 10, 11, 20], [40, 80, 160, 320]])).tolist()
    [[0, 11, 11, 20], [40, 80, 160, 320]]
    """
    longest = jnp.asarray(longest)
    fitted = fitted_lengths(longest)
    least = jnp.where(fitted > 0, fitted, fitted[-1]).min()
    half = jnp.ceil(least / 2).astype(fitted.dtype)
    lengths = jnp.concatenate([jnp.zeros_like(fitted[:1]), half[None], jnp.maximum(fitted, half)])
    return lengths[jnp.searchsorted(lengths, longest)]
