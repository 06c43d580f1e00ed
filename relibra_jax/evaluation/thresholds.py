"""Thresholds from which balancing pays: a number of tokens per rank, and a skew of the routing."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.traces.trace import Trace

PAYS: Final = 0.01
"""The gain from which a strategy pays: modelled time without balancing over time with the strategy, less 1."""
EVEN_SHARES: Final = (0.0, 0.5, 0.75, 0.9, 1.0)
"""The shares of tokens that are routed evenly, to lower the skew of a trace."""


class Point(NamedTuple):
    """The strategy with the largest gain in one setting."""

    at: float
    """The value that is varied: the tokens per rank, or the imbalance under static placement."""
    gain: float
    """The modelled time without balancing divided by the time with the strategy, less 1. It is 0 if no strategy takes
    less time than to do nothing, and never negative."""
    strategy: str
    """The label of the strategy; ``nothing`` if none takes less time."""


def route_some_evenly(trace: Trace, share: float, *, seed: int = 0) -> Trace:
    """Make a trace less skewed by routing a share of its tokens to experts drawn with equal probability.

    Args:
        trace: the trace.
        share: the share of tokens whose experts are drawn, in all layers.
        seed: the seed of the draw.

    Returns:
        The changed trace. It is marked as synthetic unless ``share`` is 0.
    """
    rng = np.random.default_rng(seed)
    ids, mask = np.array(trace.replay.expert_ids), np.asarray(trace.replay.mask)
    drawn = mask & (rng.random(mask.shape) < share)
    for layer in range(ids.shape[2]):
        keys = rng.random((int(drawn.sum()), trace.num_experts), dtype=np.float32)
        ids[drawn, layer] = np.argpartition(keys, ids.shape[3] - 1, axis=-1)[:, : ids.shape[3]]
    return trace._replace(
        replay=trace.replay._replace(expert_ids=ids),
        note=f"{share:.0%} of the tokens routed evenly",
        synthetic=trace.synthetic or share > 0,
    )


def threshold(points: Sequence[Point]) -> float | None:
    """Find the value from which the gain is at least `PAYS`, interpolated over the logarithm of the value.

    Args:
        points: the best strategy at each value, in ascending order of the values.

    Returns:
        The value from which every later point pays: the first value if all points pay, None if the last does not.

    >>> threshold([Point(10, 0.0, ""), Point(100, 0.02, ""), Point(1000, 0.3, "")])
    31.62...
    >>> threshold([Point(10, 0.05, ""), Point(100, 0.0, "")]) is None
    True
    """
    paying = [point.gain >= PAYS for point in points]
    if not paying[-1]:
        return None
    last = max((number for number, pays in enumerate(paying) if not pays), default=-1)
    if last < 0:
        return points[0].at
    before, after = points[last], points[last + 1]
    way = (PAYS - before.gain) / (after.gain - before.gain)
    return float(before.at * (after.at / before.at) ** way)
