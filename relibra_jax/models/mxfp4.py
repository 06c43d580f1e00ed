"""Reading of tensors in MXFP4, the format of the experts in GPT-OSS checkpoints, as ordinary tensors.

The format is that of the OCP Microscaling Formats (MX) Specification 1.0. A tensor is stored as ``NAME_blocks`` and
``NAME_scales`` (https://github.com/openai/gpt-oss, gpt_oss/torch/weights.py). A block is 32 numbers of four bits along
the inputs of the matrix, two in a byte, the first one in the low bits: a sign, two bits of exponent and one of
mantissa. Its scale is a power of two, ``2^(byte - 127)``; 255 is NaN. The matrix is stored as ``[outputs, inputs]``,
while Hugging Face's tensor ``NAME`` without MXFP4 is ``[inputs, outputs]``.
"""

import functools
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, UInt8

from relibra_jax.models.tensor_files import TensorFiles

BLOCK: Final = 32
"""The numbers of a block."""
BLOCKS, SCALES = "_blocks", "_scales"
_CODES: Final = np.arange(256, dtype=np.uint8)
_PAIRS: Final = np.stack([_CODES & 15, _CODES >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
"""The two numbers of every byte, ``[256, 2]``."""
_FACTORS: Final = _CODES.view(jnp.float8_e8m0fnu).astype(np.float32)
"""The factor of every scale."""


def decode_mxfp4(
    blocks: UInt8[np.ndarray, "*rows blocks 16"], scales: UInt8[np.ndarray, "*rows blocks"]
) -> Float32[np.ndarray, "*rows inputs"]:
    """Decode numbers in MXFP4; the results are exact.

    Args:
        blocks: the numbers, two in a byte.
        scales: the scale of each block.

    >>> blocks, scales = np.full((1, 16), 0xC1, np.uint8), np.array([128], np.uint8)
    >>> decode_mxfp4(blocks, scales)[:4].tolist()
    [1.0, -4.0, 1.0, -4.0]
    """
    with np.errstate(over="ignore"):
        values = _PAIRS[blocks] * _FACTORS[scales][..., None, None]
    return values.reshape(*scales.shape[:-1], BLOCK * scales.shape[-1])


class Mxfp4Files(TensorFiles):
    """The tensors of a checkpoint folder, with those in MXFP4 under the names that they have without it.

    The arguments and errors are those of `TensorFiles`.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; of tensors in MXFP4, that of the decoded one."""
        shapes = super().shapes()
        for name in self._encoded:
            *lead, outputs, blocks, half = shapes.pop(name + BLOCKS)
            if shapes.pop(name + SCALES) != (*lead, outputs, blocks) or 2 * half != BLOCK:
                raise ValueError(f"{self.folder}: {name}{SCALES} does not have one scale for {BLOCK} numbers")
            shapes[name] = (*lead, BLOCK * blocks, outputs)
        return shapes

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor in the names of safetensors; ``BF16`` for those in MXFP4."""
        dtypes = super().dtypes()
        for name in self._encoded:
            for part in (name + BLOCKS, name + SCALES):
                if (dtype := dtypes.pop(part)) != "U8":
                    raise ValueError(f"{self.folder}: {part} is of dtype {dtype} instead of U8")
            dtypes[name] = "BF16"
        return dtypes

    def read(self, name: str, rows: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or the part of it that ``rows`` selects; for tensors in MXFP4, a part of one entry."""
        return self._entry(name, rows[0])[rows[1:]] if name in self._encoded else super().read(name, rows)

    def _read_entry(self, name: str, index: int) -> np.ndarray:
        if name not in self._encoded:
            return super()._read_entry(name, index)
        blocks, scales = (
            super(Mxfp4Files, self)._read_entry(name + part, index) for part in (BLOCKS, SCALES)
        )
        return decode_mxfp4(blocks, scales).swapaxes(-1, -2)

    @functools.cached_property
    def _encoded(self) -> set[str]:
        names = (name.removesuffix(BLOCKS) for name in self._files if name.endswith(BLOCKS))
        return {name for name in names if name + SCALES in self._files}
