"""How many multiprocessors a kernel takes: all that the GPU has, but those that are left to others.

A kernel here is persistent: it starts one block on each multiprocessor and shares its tiles out before it starts. Where
a collective of another stream already holds some of them, the blocks that find no place wait until others are done, and
the kernel takes up to twice as long. Left out of the count from the start, they cost their share of the products alone.
"""

import contextlib
from typing import Final

import jax

ASSUMED: Final = 132
"""The multiprocessors of an H100 or H200 (SXM), assumed where there is no GPU."""

_left: Final = jax.make_user_context(0)


def device_multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU that is here, or else of an H100 or H200 (SXM)."""
    return getattr(jax.devices()[0], "core_count", None) or ASSUMED


def multiprocessors() -> int:
    """Return the number of multiprocessors that kernels that are traced now take."""
    return device_multiprocessors() - _left.value


def leave_multiprocessors(count: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the Hopper kernels leave ``count`` multiprocessors to others, such as collectives.

    The number is read when a kernel is traced, and functions under `jax.jit` are compiled once for each number. The
    kernels of a backward pass are traced after the forward pass: let the context enclose the call of the whole step,
    not only that of a layer. Other implementations than the kernels take no notice of it.

    How many are best depends on the collectives: NCCL takes one for each of its channels (its variables
    NCCL_MAX_CTAS and NCCL_MAX_NCHANNELS bound them). Nothing of this has been measured here yet.

    Args:
        count: the number of multiprocessors to leave, from 0 to one less than the GPU has.

    Raises:
        ValueError: if the count is no integer, less than 0, or leaves none to the kernels.

    >>> with leave_multiprocessors(16):
    ...     multiprocessors()
    116
    """
    most = device_multiprocessors() - 1
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
        raise ValueError(
            f"count={count!r} must be an integer from 0 to {most}: one of {most + 1} is to be used"
        )
    return _left(count)
