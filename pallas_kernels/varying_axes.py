"""Matching of the mesh axes over which arrays vary inside `jax.shard_map`."""

import jax


def match_varying_axes(*arrays: jax.Array) -> list[jax.Array]:
    """Mark all arrays as varying over the union of their mesh axes, inside `jax.shard_map`.

    A loop can then carry values computed from any of them. In the backward pass, the gradient of an array that was
    replicated over a mesh axis is summed over that axis. Outside `jax.shard_map` the arrays are returned unchanged.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(axes - own), to="varying") if axes - own else array
        for array, own in zip(arrays, varying, strict=True)
    ]
