"""Experts other than plain SwiGLU: experts with biases, or with another activation.

The array of an expert with biases has C further columns, ``[3, D, F + C]``. Those of a matrix hold its bias, F numbers
for gate and up and D for down, in the order of memory, and then zeros. An expert therefore remains one array, and its
biases go wherever its matrices go: to its home, to replicas and residents, into checkpoints and through gradients.

`grouped_mlp` has SwiGLU without biases inside its kernels. `GeneralMlp` computes the three products by themselves, with
`pallas_kernels.grouped_dot`. It copies the matrices, and stores gate and up, ``[rows, F]``, in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels import grouped_dot
from pallas_kernels.group_loops import group_bounds

GATE, UP, DOWN = range(3)
"""The matrices of an expert, in the order of ``[3, D, F]``."""
CLAMP_LIMIT: Final = 7.0
"""The bound of gate and up in GPT-OSS (``swiglu_limit``)."""
CLAMP_ALPHA: Final = 1.702
"""The factor inside GPT-OSS's sigmoid (``swiglu_alpha``)."""


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation of GPT-OSS (https://github.com/openai/gpt-oss, gpt_oss/torch/model.py)."""
    gate, up = jnp.minimum(gate, CLAMP_LIMIT), jnp.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT)
    return gate * jax.nn.sigmoid(CLAMP_ALPHA * gate) * (up + 1)


ACTIVATIONS: Final[Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]]] = MappingProxyType(
    {"swiglu": _swiglu, "clamped_swiglu": _clamped_swiglu}
)
"""The functions of gate and up that experts may have, by name."""


def expert_columns(width: int, expert_width: int, *, biases: bool) -> int:
    """Return the number of columns of an expert's array: F, and with biases as many more as the longest bias needs.

    Args:
        width: D, the model width.
        expert_width: F, the hidden width of an expert.
        biases: whether the expert has biases.

    >>> expert_columns(2880, 2880, biases=True), expert_columns(8, 20, biases=True), expert_columns(8, 20, biases=False)
    (2881, 23, 20)
    """
    return expert_width + (-(-expert_width // width) if biases else 0)


def bias_of(matrices: jax.Array, matrix: int, expert_width: int) -> jax.Array:
    """Return the bias of a matrix, ``[..., F]`` or ``[..., D]`` for down, from experts ``[..., 3, D, F + C]``."""
    width = matrices.shape[-2]
    columns = matrices[..., matrix, :, expert_width:]
    return columns.reshape(*columns.shape[:-2], -1)[..., : width if matrix == DOWN else expert_width]


@dataclass(frozen=True, kw_only=True)
class GeneralMlp:
    """An `relibra_jax.execution.moe.ExpertMlp` for any activation, with or without biases.

    Args:
        activation: the function of gate and up, a key of `ACTIVATIONS`.
        expert_width: F, the hidden width of an expert.
        biases: whether the experts have biases.
    """

    activation: str
    expert_width: int
    biases: bool

    def __call__(
        self,
        rows: jax.Array,
        weights: Sequence[jax.Array],
        group_sizes: jax.Array,
        row_scale: jax.Array,
        *,
        implementation: str | None,
    ) -> jax.Array:
        """Return the outputs of the rows, with the arguments and results of `pallas_kernels.grouped_mlp`."""
        wide = jnp.promote_types(rows.dtype, jnp.float32)
        bounds = group_bounds(group_sizes, len(rows))
        at = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
        # Products with it are sums of a fixed order, unlike gathers of biases, whose gradients are scatters.
        in_group = ((bounds[None, :-1] <= at) & (at < bounds[None, 1:])).astype(wide)

        def product(operand: jax.Array, matrix: int, **options: Any) -> jax.Array:
            matrices = [buffer[:, matrix, :, : self.expert_width] for buffer in weights]
            values = grouped_dot(
                operand, matrices, group_sizes, out_dtype=wide, implementation=implementation, **options
            )
            if not self.biases:
                return values
            biases = [bias_of(buffer, matrix, self.expert_width) for buffer in weights]
            return values + jnp.dot(in_group, jnp.concatenate(biases).astype(wide), precision="highest")

        hidden = ACTIVATIONS[self.activation](product(rows, GATE), product(rows, UP))
        out = product(hidden.astype(rows.dtype), DOWN, transposed=True)
        # The scale and the gradient of a row without a group may be NaN.
        real = at < bounds[-1]
        scale = jnp.where(real, row_scale[:, None], 0).astype(wide)
        return jnp.where(real, out * scale, 0).astype(rows.dtype)
