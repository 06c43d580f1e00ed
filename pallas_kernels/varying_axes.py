"""The mesh axes over which arrays vary inside `jax.shard_map`."""

import jax


def match_varying_axes(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays, all of them varying over the same mesh axes inside `jax.shard_map`.

    Loops may then carry parts of any of them. The transpose sums the gradient of an array that was the same on
    several devices. Outside `jax.shard_map` the arrays come back as they are.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(axes - own), to="varying") if axes - own else array
        for array, own in zip(arrays, varying, strict=True)
    ]
