"""The number of multiprocessors that a kernel uses: all of the GPU, minus those reserved for other programs.

The Hopper kernels are persistent: a kernel starts one block per multiprocessor and assigns its tiles to the blocks in
advance. If a collective on another stream occupies some multiprocessors, the blocks that do not fit wait until others
finish, and the kernel takes up to twice as long. If these multiprocessors are reserved from the start, the kernel
becomes slower only in proportion to their number.
"""

import contextlib
from typing import Final

import jax

ASSUMED: Final = 132
"""The number of multiprocessors of an H100 or H200 (SXM), which is assumed if there is no GPU."""

_left: Final = jax.make_user_context(0)


def device_multiprocessors() -> int:
    """Return the number of multiprocessors of the first device or, if it has none, that of an H100 or H200 (SXM)."""
    return getattr(jax.devices()[0], "core_count", None) or ASSUMED


def multiprocessors() -> int:
    """Return the number of multiprocessors that a kernel uses if it is traced now."""
    return device_multiprocessors() - _left.value


def leave_multiprocessors(count: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the Hopper kernels leave ``count`` multiprocessors free, for example for collectives.

    The number is read when a kernel is traced, and functions under `jax.jit` are compiled once for each number. The
    kernels of the backward pass are traced after the forward pass, so the context must enclose the call of the whole
    step, not only that of a layer. Other implementations ignore the context.

    The best number depends on the collectives: NCCL uses one multiprocessor for each of its channels (the environment
    variables NCCL_MAX_CTAS and NCCL_MAX_NCHANNELS limit them). The effect has not been measured yet.

    Args:
        count: the number of multiprocessors to leave free, from 0 to one less than the GPU has.

    Returns:
        A context manager.

    Raises:
        ValueError: if the count is not an integer, is negative, or leaves no multiprocessor to the kernels.

    >>> with leave_multiprocessors(16):
    ...     multiprocessors()
    116
    """
    most = device_multiprocessors() - 1
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
        raise ValueError(
            f"count={count!r} must be an integer from 0 to {most}: the kernels need one of {most + 1} multiprocessors"
        )
    return _left(count)
