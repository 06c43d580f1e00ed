"""How a call of this package chooses its implementation, and the checks of operands that all calls share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper.persistent_kernel import STEP
from pallas_kernels.hopper.persistent_kernel import interpreted as hopper_interpreted
from pallas_kernels.self_check import is_trusted
from pallas_kernels.triton.launch import interpreted as triton_interpreted

KERNEL_DTYPES: Final = ("bfloat16", "float16", "float32")
"""The dtypes of the results of all kernels, and of the rows that the Triton kernels take."""
AMPERE_AND_LATER: Final = (
    r"\bNVIDIA\b.*\b(A(2|10G?|16|30|40|100X?|800)|L(2|4|20|40S?)|G?H(\d{3}|20)|G?B(\d{3}|10)"
    r"|RTX (A\d{4}|[345]0\d\d|PRO \d{4}|\d{4} (SFF )?Ada))\b"
)
"""The kinds of devices whose compute capability is 8.0 or higher, of those in NVIDIA's list of CUDA GPUs: for
descriptions of devices, which do not tell it."""


def choose_implementation(
    name: str | None, implementations: Mapping[str, Any], rows: jax.Array, out_dtype: Any, **dimensions: int
) -> str:
    """Return the name of the implementation to run: the one that was asked for, or the fastest that can run.

    Args:
        name: the name that the caller asked for. None stands for "mosaic" where the Hopper kernels can run, else for
            "triton" where the Triton kernels can, and for "xla" where neither can. Kernels that have not passed their
            check on this machine are passed over (`pallas_kernels.self_check`).
        implementations: all implementations by name; "mosaic", "triton" and "xla" are among them.
        rows: the row operand, which says what device computes: the one that holds it, or the one that a mesh
            describes while a program is compiled for other devices.
        out_dtype: the dtype of the result.
        dimensions: the two dimensions of the weight matrices, by the names that error messages use.

    Raises:
        ValueError: if no implementation has that name, or if "mosaic" or "triton" was asked for and cannot run.
    """
    if name is not None and name not in implementations:
        raise ValueError(f"implementation={name!r} is not one of {', '.join(implementations)}")
    for kernels, why_not in {"mosaic": _why_not_mosaic, "triton": _why_not_triton}.items():
        if name in (None, kernels):
            reason = why_not(rows, out_dtype, dimensions)
            if reason and name:
                raise ValueError(f"implementation={name!r} cannot run: {reason}")
            if not reason and (name or _interpreted() or is_trusted(kernels, _device(rows).device_kind)):
                return kernels
    return name or "xla"


def _interpreted() -> bool:
    return hopper_interpreted() or triton_interpreted()


def _why_not_mosaic(rows: jax.Array, out_dtype: Any, dimensions: Mapping[str, int]) -> str | None:
    """Return the reason why the Hopper kernels cannot run, or None if they can."""
    if rows.dtype != jnp.bfloat16:
        return f"rows are {rows.dtype}, not bfloat16"
    if out_dtype not in KERNEL_DTYPES:
        return f"out_dtype={out_dtype} is none of {', '.join(KERNEL_DTYPES)}"
    for name, size in dimensions.items():
        if size < STEP or size % STEP:
            return f"{name}={size} is no multiple of {STEP}"
    return None if hopper_interpreted() else why_not_hopper(_device(rows).device_kind)


def _why_not_triton(rows: jax.Array, out_dtype: Any, _: Mapping[str, int]) -> str | None:
    """Return the reason why the Triton kernels cannot run, or None if they can; they take any dimensions."""
    if rows.dtype not in KERNEL_DTYPES:
        return f"rows are {rows.dtype}, none of {', '.join(KERNEL_DTYPES)}"
    if out_dtype not in KERNEL_DTYPES:
        return f"out_dtype={out_dtype} is none of {', '.join(KERNEL_DTYPES)}"
    return None if triton_interpreted() else why_not_ampere(_device(rows))


def _device(rows: jax.Array) -> Any:
    """Return the device that will compute: a described one, the one that holds rows, or the default."""
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(rows).sharding.mesh)
    for mesh in meshes:
        if mesh.abstract_device:
            return mesh.abstract_device
    if not isinstance(rows, jax.core.Tracer):
        return next(iter(rows.devices()))
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def why_not_hopper(device_kind: str) -> str | None:
    """Return the reason why a device is no Hopper GPU, or None if it is one (H100, H200, H800, H20, GH200).

    >>> why_not_hopper("NVIDIA A100-SXM4-80GB")
    'NVIDIA A100-SXM4-80GB is no Hopper GPU'
    """
    if re.search(r"\bG?H(\d{3}|20)\b", device_kind):
        return None
    return f"{device_kind} is no Hopper GPU"


def why_not_ampere(device: Any) -> str | None:
    """Return the reason why a device is no NVIDIA GPU of compute capability 8.0 or higher, or None if it is one.

    Args:
        device: a device, which tells its compute capability if it is a GPU, or the description of one, which tells no
            more than its kind.

    >>> why_not_ampere(jax.sharding.AbstractDevice("NVIDIA L40S", num_cores=142, platform="gpu"))
    >>> why_not_ampere(jax.sharding.AbstractDevice("Tesla V100-SXM2-16GB", num_cores=80, platform="gpu"))
    'Tesla V100-SXM2-16GB is not known as an NVIDIA GPU of compute capability 8.0 or higher'
    """
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        if re.search(AMPERE_AND_LATER, device.device_kind):
            return None
        return f"{device.device_kind} is not known as an NVIDIA GPU of compute capability 8.0 or higher"
    # On GPUs of other makers this is a name.
    if re.fullmatch(r"\d+\.\d+", capability) and float(capability) >= 8:
        return None
    return f"{device.device_kind} has compute capability {capability}, not one of NVIDIA's from 8.0 on"


def check_weights(weights: Sequence[Any], rows: jax.Array, *matrix: int | str) -> tuple[jax.Array, ...]:
    """Check weight buffers, and leave out those without slots, for which there is nothing to compute.

    Args:
        weights: the buffers as the caller gave them.
        rows: the row operand, whose dtype the weights share.
        matrix: the dimensions of one slot's weights; a dimension that rows leave open is given by its name.

    Returns:
        The buffers that have slots, in their order.

    Raises:
        ValueError: if the weights are an array instead of a sequence of arrays, if a buffer does not fit the rows or
            the first buffer, or if no buffer has a slot.
    """
    if isinstance(weights, jax.Array | np.ndarray):
        raise ValueError(f"weights: expected a sequence of weight buffers, found one {describe(weights)}")
    buffers = tuple(map(jnp.asarray, weights))
    for index, buffer in enumerate(buffers):
        wanted = tuple(
            found if isinstance(size, str) else size
            for size, found in zip(matrix, buffer.shape[1:], strict=False)
        )
        if len(wanted) != len(matrix) or buffer.shape[1:] != wanted or buffer.dtype != rows.dtype:
            raise ValueError(
                f"weights[{index}]: expected {rows.dtype}[slots, {', '.join(map(str, matrix))}]"
                f" for rows {describe(rows)}, found {describe(buffer)}"
            )
        if buffer.shape[1:] != buffers[0].shape[1:]:
            raise ValueError(
                f"weights[{index}]: expected matrices like those of weights[0] {describe(buffers[0])},"
                f" found {describe(buffer)}"
            )
    if not any(buffer.shape[0] for buffer in buffers):
        raise ValueError(f"weights: expected at least one slot, found [{', '.join(map(describe, buffers))}]")
    return tuple(buffer for buffer in buffers if buffer.shape[0])


def check_group_sizes(group_sizes: jax.Array, slots: Sequence[int]) -> None:
    """Check that there is one integer size for each weight slot.

    Args:
        group_sizes: the sizes as the caller gave them.
        slots: the number of slots of each weight buffer.

    Raises:
        ValueError: if the sizes have another shape than ``[sum(slots)]`` or are no integers.
    """
    if group_sizes.shape != (sum(slots),) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes: expected integers [{sum(slots)}] for weights of {' + '.join(map(str, slots))} slots,"
            f" found {describe(group_sizes)}"
        )


def resolve_out_dtype(out_dtype: Any, rows: jax.Array) -> Any:
    """Return the dtype of a result: the one that was asked for, or that of the rows if None was.

    Raises:
        ValueError: if the dtype is not floating.
    """
    dtype = jnp.dtype(rows.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"out_dtype: expected a floating dtype, found {dtype}")
    return dtype


def describe(array: jax.Array | np.ndarray) -> str:
    """Return the dtype and shape of an array, for error messages.

    >>> describe(jnp.zeros((2, 3)))
    'float32[2, 3]'
    """
    return f"{array.dtype}{list(array.shape)}"
