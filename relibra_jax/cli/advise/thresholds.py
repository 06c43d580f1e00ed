"""From which tokens a rank, and from which skew of the routing, balancing pays."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from relibra_jax.traces.trace import Trace

PAYS: Final = 0.01
"""A strategy pays if a batch takes at least this much less modelled time than without it."""
EVEN_SHARES: Final = (0.0, 0.5, 0.75, 0.9, 1.0)
"""The shares of tokens that are routed evenly, by which skew is lowered."""


class Point(NamedTuple):
    """The strategy that gains most in one setting."""

    at: float
    """The tokens of a rank, or the imbalance under static placement."""
    gain: float
    """The modelled time without balancing over that of the strategy, less 1."""
    strategy: str
    """The strategy."""


def route_some_evenly(trace: Trace, share: float, *, seed: int = 0) -> Trace:
    """A trace of which some tokens are routed to experts drawn evenly, so that it is less skewed.

    Args:
        trace: the trace.
        share: the share of tokens whose experts are drawn anew, in all layers.
        seed: the seed of what is drawn.

    Returns:
        The trace; synthetic if any token was drawn.
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
    """Where the gain reaches `PAYS`, on a line through the logarithms of the neighbouring points.

    Args:
        points: the best strategy at rising values.

    Returns:
        The value from which on every point pays; the first value if all do, None if the last does not.

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
