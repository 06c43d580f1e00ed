"""Why no deployment is feasible: which constraint binds, and by how much."""

from typing import NoReturn

import numpy as np
from jaxtyping import Float

GB = 1e9


def refuse(
    needs: tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]],
    room: tuple[float, float],
    steps: Float[np.ndarray, " fitting"],
    slo: float,
) -> NoReturn:
    """Raise the error of a search without a feasible deployment.

    A side's memory binds if no deployment of the grid fits it. The sides are chosen apart from each other, so where
    each of them can fit, some deployments do, and the time between two tokens binds.

    Args:
        needs: bytes of an attention device and of an expert device in each deployment.
        room: bytes that weights and caches may take on either.
        steps: seconds of a decoding step of the deployments that fit.
        slo: the most seconds of a step.

    Raises:
        ValueError: always.

    >>> refuse((np.array([5e9]), np.array([9e9])), (8e9, 8e9), np.array([]), 0.1)
    Traceback (most recent call last):
    ValueError: no deployment is feasible: an expert device needs at least 9.00 GB and may take 8.00 GB: 1.00 GB too few
    """
    for side, needed, there in zip(("attention", "expert"), needs, room, strict=True):
        least = float(needed.min())
        if least > there:
            raise ValueError(
                f"no deployment is feasible: an {side} device needs at least {least / GB:.2f} GB and may take"
                f" {there / GB:.2f} GB: {(least - there) / GB:.2f} GB too few"
            )
    least = float(steps.min())
    raise ValueError(
        f"no deployment is feasible: of those that fit the memory the fastest takes {1e3 * least:.2f} ms between two"
        f" tokens, {least / slo - 1:.1%} more than slo={1e3 * slo:g} ms"
    )
