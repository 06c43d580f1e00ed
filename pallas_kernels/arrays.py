"""What the calls of this package check and choose in the same way."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.launch import STEP, interpreted


def choose(
    name: str | None, implementations: Mapping[str, Any], rows: jax.Array, out_dtype: Any, **sizes: int
) -> str:
    """The implementation to run: the named one if it can, else the best for the platform and the shapes.

    Args:
        name: a name in ``implementations``, or None for "mosaic" where that can run and "xla" where it cannot.
        implementations: by name; "mosaic" and "xla" among them.
        rows: what is multiplied; says for which device, where it is there or the device a described one.
        out_dtype: of the result.
        sizes: of the matrices' two dimensions, by name.

    Raises:
        ValueError: no implementation has that name, or the Hopper kernels cannot run.
    """
    if name is not None and name not in implementations:
        raise ValueError(f"implementation={name!r} is not one of {', '.join(implementations)}")
    if name is not None and name != "mosaic":
        return name
    reason = _why_not_mosaic(rows, out_dtype, sizes)
    if reason and name:
        raise ValueError(f"implementation='mosaic' cannot run: {reason}")
    return "xla" if reason else "mosaic"


def _why_not_mosaic(rows: jax.Array, out_dtype: Any, sizes: Mapping[str, int]) -> str | None:
    if rows.dtype != jnp.bfloat16:
        return f"rows are {rows.dtype}, not bfloat16"
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"out_dtype={out_dtype} is none of bfloat16, float16, float32"
    for name, size in sizes.items():
        if size < STEP or size % STEP:
            return f"{name}={size} is no multiple of {STEP}"
    return None if interpreted() else why_no_hopper(_device_kind(rows))


def _device_kind(rows: jax.Array) -> str:
    """Of the device that will compute: a described one, that of rows that are there, or the default."""
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(rows).sharding.mesh)
    for mesh in meshes:
        if mesh.abstract_device:
            return mesh.abstract_device.device_kind
    if not isinstance(rows, jax.core.Tracer):
        return next(iter(rows.devices())).device_kind
    default = jax.config.jax_default_device
    return (default if isinstance(default, jax.Device) else jax.devices(default)[0]).device_kind


def why_no_hopper(kind: str) -> str | None:
    """None for the kind of a Hopper GPU: H100, H200, H800, H20, GH200."""
    if re.search(r"\bG?H(\d{3}|20)\b", kind):
        return None
    return f"{kind} is no Hopper GPU"


def check_sizes(group_sizes: jax.Array, slots: tuple[int, int]) -> None:
    """Raise unless there is an integer for each slot."""
    if group_sizes.shape != (sum(slots),) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes: expected integers [{sum(slots)}] for {slots[0]} home and {slots[1]} replica slots,"
            f" found {show(group_sizes)}"
        )


def check_out_dtype(out_dtype: Any, rows: jax.Array) -> Any:
    """The dtype of a result: floating, that of rows for None."""
    dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"out_dtype: expected a floating dtype, found {dtype}")
    return dtype


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Inside shard_map: all arrays vary over the same mesh axes, so that loops may carry parts of any of them.

    The transpose sums the gradient of an array that was the same on several devices.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(axes - own), to="varying") if axes - own else array
        for array, own in zip(arrays, varying, strict=True)
    ]


def show(array: jax.Array) -> str:
    """Dtype and shape for an error message."""
    return f"{array.dtype}{list(array.shape)}"
