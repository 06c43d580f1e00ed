"""The choice of an implementation, shared by all functions of this package."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax

from pallas_kernels.hopper.persistent_kernel import STEP
from pallas_kernels.hopper.persistent_kernel import interpreted as hopper_interpreted
from pallas_kernels.triton.launch import interpreted as triton_interpreted
from pallas_kernels.verdicts import is_trusted

KERNEL_DTYPES: Final = ("bfloat16", "float16", "float32")
"""The output dtypes that all kernels support, and the row dtypes that the Triton kernels support."""
ROW_DTYPES: Final = {"mosaic": ("bfloat16",), "triton": KERNEL_DTYPES}
"""The row dtypes of the kernels, unless a function says otherwise."""
AMPERE_AND_LATER: Final = (
    r"\bNVIDIA\b.*\b(A(2|10G?|16|30|40|100X?|800)|L(2|4|20|40S?)|G?H(\d{3}|20)|G?B(\d{3}|10)"
    r"|RTX (A\d{4}|[345]0\d\d|PRO \d{4}|\d{4} (SFF )?Ada))\b"
)
"""A pattern for the device kinds with compute capability 8.0 or higher, from NVIDIA's list of CUDA GPUs. It is needed
for device descriptions (`jax.sharding.AbstractDevice`), which do not contain the compute capability."""
ADA_AND_LATER: Final = (
    r"\bNVIDIA\b.*\b(L(2|4|20|40S?)|G?H(\d{3}|20)|G?B(\d{3}|10)|RTX ([45]0\d\d|PRO \d{4}|\d{4} (SFF )?Ada))\b"
)
"""A pattern for those of 8.9 or higher, whose tensor cores multiply float8."""


def choose_implementation(
    name: str | None,
    implementations: Mapping[str, Any],
    rows: jax.Array,
    out_dtype: Any,
    *,
    check: str | None = None,
    row_dtypes: Mapping[str, Sequence[str]] = ROW_DTYPES,
    **dimensions: int,
) -> str:
    """Return the name of the implementation to run: the one that the caller named, or else the fastest that can run.

    Args:
        name: the name that the caller gave. None chooses "mosaic" where the Hopper kernels can run, else "triton"
            where the Triton kernels can run, and else "xla". It skips kernels that have not passed their check on this
            machine (`pallas_kernels.self_check`).
        implementations: all implementations by name, including "xla"; those named "mosaic" and "triton" are kernels.
        rows: the row operand. It determines the device that computes: the device that holds the rows or, when a
            program is compiled for other devices, the device that the mesh describes.
        out_dtype: the dtype of the result.
        check: the name of the check that the kernels must have passed. None for the name of the implementation.
        row_dtypes: the row dtypes of each kernel that ``implementations`` has.
        dimensions: the two dimensions of the weight matrices, by their names in error messages.

    Returns:
        A key of ``implementations``.

    Raises:
        ValueError: if no implementation has that name, or if the caller named "mosaic" or "triton" and it cannot run.
    """
    if name is not None and name not in implementations:
        raise ValueError(f"implementation={name!r} is not one of {', '.join(implementations)}")
    for kernels, why_not in {"mosaic": _why_not_mosaic, "triton": _why_not_triton}.items():
        if name in (None, kernels) and kernels in implementations:
            reason = _why_not_dtypes(rows, out_dtype, row_dtypes[kernels]) or why_not(rows, dimensions)
            if reason and name:
                raise ValueError(f"implementation={name!r} cannot run: {reason}")
            if not reason and (
                name or _interpreted() or is_trusted(check or kernels, _device(rows).device_kind)
            ):
                return kernels
    return name or "xla"


def _interpreted() -> bool:
    return hopper_interpreted() or triton_interpreted()


def _why_not_dtypes(rows: jax.Array, out_dtype: Any, row_dtypes: Sequence[str]) -> str | None:
    """Return the reason why kernels for these row dtypes cannot run, or None if the dtypes are right."""
    if rows.dtype not in row_dtypes:
        expected = row_dtypes[0] if len(row_dtypes) == 1 else f"one of {', '.join(row_dtypes)}"
        return f"rows are {rows.dtype}, not {expected}"
    if out_dtype not in KERNEL_DTYPES:
        return f"out_dtype={out_dtype} is not one of {', '.join(KERNEL_DTYPES)}"
    return None


def _why_not_mosaic(rows: jax.Array, dimensions: Mapping[str, int]) -> str | None:
    """Return the reason why the Hopper kernels cannot run, or None if they can."""
    for name, size in dimensions.items():
        if size < STEP or size % STEP:
            return f"{name}={size} is not a positive multiple of {STEP}"
    return None if hopper_interpreted() else why_not_hopper(_device(rows).device_kind)


def _why_not_triton(rows: jax.Array, _: Mapping[str, int]) -> str | None:
    """Return the reason why the Triton kernels cannot run, or None if they can. They accept any dimensions."""
    if triton_interpreted():
        return None
    return (why_not_ada if rows.dtype.itemsize == 1 else why_not_ampere)(_device(rows))


def _device(rows: jax.Array) -> Any:
    """Return the device that will compute: the one that a mesh describes, or that holds the rows, or the default."""
    meshes = (jax.sharding.get_abstract_mesh(), jax.typeof(rows).sharding.mesh)
    for mesh in meshes:
        if mesh.abstract_device:
            return mesh.abstract_device
    if not isinstance(rows, jax.core.Tracer):
        return next(iter(rows.devices()))
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def why_not_hopper(device_kind: str) -> str | None:
    """Return the reason why a device is not a Hopper GPU, or None if it is one (H100, H200, H800, H20, GH200).

    >>> why_not_hopper("NVIDIA A100-SXM4-80GB")
    'NVIDIA A100-SXM4-80GB is not a Hopper GPU'
    """
    if re.search(r"\bG?H(\d{3}|20)\b", device_kind):
        return None
    return f"{device_kind} is not a Hopper GPU"


def why_not_ampere(device: Any) -> str | None:
    """Return the reason why a device is not an NVIDIA GPU of compute capability 8.0 or higher, or None if it is one.

    Args:
        device: a device, whose compute capability is read if it is a GPU; or the description of a device, which is
            judged by its kind.

    >>> why_not_ampere(jax.sharding.AbstractDevice("NVIDIA L40S", num_cores=142, platform="gpu"))
    >>> why_not_ampere(jax.sharding.AbstractDevice("Tesla V100-SXM2-16GB", num_cores=80, platform="gpu"))
    'Tesla V100-SXM2-16GB is not known to be an NVIDIA GPU of compute capability 8.0 or higher'
    """
    return _why_not_capability(device, "8.0", AMPERE_AND_LATER)


def why_not_ada(device: Any) -> str | None:
    """Return the reason why a device is not an NVIDIA GPU that multiplies float8, as `why_not_ampere` does.

    >>> why_not_ada(jax.sharding.AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"))
    'NVIDIA A100-SXM4-80GB is not known to be an NVIDIA GPU of compute capability 8.9 or higher'
    """
    return _why_not_capability(device, "8.9", ADA_AND_LATER)


def _why_not_capability(device: Any, least: str, kinds: str) -> str | None:
    """Return the reason why a device has a lower compute capability, or has none and is not one of these kinds."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        if re.search(kinds, device.device_kind):
            return None
        return (
            f"{device.device_kind} is not known to be an NVIDIA GPU of compute capability {least} or higher"
        )
    # On GPUs of other vendors the attribute is a name, not a number.
    if re.fullmatch(r"\d+\.\d+", capability) and float(capability) >= float(least):
        return None
    return f"{device.device_kind} has compute capability {capability}, but NVIDIA's {least} or higher is required"
