"""The error for a search in which no deployment is feasible: which constraint is violated, and by how much."""

from typing import NoReturn

import numpy as np
from jaxtyping import Float

GB = 1e9


def raise_infeasible(
    needs: tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]],
    room: tuple[float, float],
    steps: Float[np.ndarray, " fitting"],
    slo: float,
) -> NoReturn:
    """Raise the error of a search without a feasible deployment.

    If no deployment of the grid fits the attention devices, or none fits the expert devices, memory is the violated
    constraint. The grid combines both sides freely, so if each of them fits in some deployment, both fit in another
    one, and the time between two tokens is the violated constraint.

    Args:
        needs: the bytes of an attention device and of an expert device in each deployment.
        room: the bytes that weights and caches may take on an attention device and on an expert device.
        steps: the seconds of a decoding step in the deployments that fit the memory.
        slo: the most seconds of a decoding step.

    Raises:
        ValueError: always.

    >>> raise_infeasible((np.array([5e9]), np.array([9e9])), (8e9, 8e9), np.array([]), 0.1)
    Traceback (most recent call last):
    ValueError: no deployment is feasible: an expert device needs at least 9.00 GB but may use 8.00 GB, 1.00 GB too few
    """
    for side, needed, available in zip(("attention", "expert"), needs, room, strict=True):
        least = float(needed.min())
        if least > available:
            raise ValueError(
                f"no deployment is feasible: an {side} device needs at least {least / GB:.2f} GB but may use"
                f" {available / GB:.2f} GB, {(least - available) / GB:.2f} GB too few"
            )
    least = float(steps.min())
    raise ValueError(
        f"no deployment is feasible: the fastest that fits the memory takes {1e3 * least:.2f} ms between two tokens,"
        f" {least / slo - 1:.1%} more than slo={1e3 * slo:g} ms"
    )
