"""Rows out of the buffers of other devices, each device naming the ones that it wants. Inside `jax.shard_map`.

Unlike in an exchange, nobody has to know what others want of him, and every device gets exactly what it names.
"""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.pull_kernel import pull

IMPLEMENTATIONS: Final = ("mosaic", "xla")


def pull_rows(
    rank: jax.Array, row: jax.Array, rows: jax.Array, axis: str, *, implementation: str
) -> jax.Array:
    """Read rows where they are.

    Args:
        rank: ``[R]`` int32, the index along ``axis`` of the device that holds each row.
        row: ``[R]`` int32, the row of that device's buffer; negative for rows of zeros.
        rows: this device's buffer ``[X, *shape]``, as long on all devices.
        axis: the mesh axis of the devices.
        implementation: "mosaic" for the kernel of `pallas_kernels.hopper.pull_kernel`, which has not run on GPUs yet;
            "xla" for a gather of everything everywhere, for tests.

    Returns:
        The rows, ``[R, *shape]``.

    Raises:
        ValueError: if no implementation has that name, or a row does not suit the kernel.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "mosaic":
        return pull(rank, row, rows, axis)
    everywhere = jax.lax.all_gather(rows, axis)
    return everywhere.at[rank, jnp.where(row < 0, len(rows), row)].get(mode="fill", fill_value=0)
