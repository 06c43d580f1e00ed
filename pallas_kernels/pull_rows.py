"""One-sided reads of rows from the buffers of other devices, for use inside `jax.shard_map`.

Each device names the rows that it needs and receives exactly those. Unlike in an exchange, a device does not need to
know which of its rows the others read.
"""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.pull_kernel import pull

IMPLEMENTATIONS: Final = ("mosaic", "xla")


def pull_rows(
    rank: jax.Array, row: jax.Array, rows: jax.Array, axis: str, *, implementation: str
) -> jax.Array:
    """Read rows from the buffers of the devices along a mesh axis.

    Args:
        rank: the index along ``axis`` of the device that holds each row, int32 ``[R]``.
        row: the index of each row in that device's buffer, int32 ``[R]``. A negative index gives a row of zeros.
        rows: this device's buffer, ``[X, *shape]``. X is the same on all devices.
        axis: the mesh axis of the devices.
        implementation: "mosaic" for the kernel of `pallas_kernels.hopper.pull_kernel`, which has not run on GPUs yet;
            "xla" for an all-gather of all buffers, which is meant for tests.

    Returns:
        The rows, ``[R, *shape]``.

    Raises:
        ValueError: if no implementation has that name, or if the kernel does not support the size of a row.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "mosaic":
        return pull(rank, row, rows, axis)
    all_rows = jax.lax.all_gather(rows, axis)
    return all_rows.at[rank, jnp.where(row < 0, len(rows), row)].get(mode="fill", fill_value=0)
