"""The common parts of the Triton kernels: the launch, and masked loads and stores at the edges of arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import config
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton.block_sizes import BlockSizes


def interpreted() -> bool:
    """Return whether kernels traced now will run in Pallas's interpreter, which works on every platform."""
    return config.pallas_tpu_interpret_mode_context_manager.value is True


class Span(NamedTuple):
    """A range of consecutive indices on one axis of an array; indices from ``end`` on must not be accessed."""

    start: Any
    """The first index, int32."""
    size: int
    """The number of indices, a power of two."""
    end: Any = None
    """The index after the last one that may be accessed, int32. None if all may be accessed."""

    @property
    def slice(self) -> Any:
        """The range as a Pallas slice."""
        return pl.ds(self.start, self.size)

    @property
    def mask(self) -> jax.Array:
        """The mask of the indices that may be accessed, boolean ``[size]``."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32) < self.end


def block_span(index: jax.Array, size: int, length: int) -> Span:
    """Return the span of block number ``index`` on an axis of ``length`` that is cut into blocks of ``size``."""
    return Span(index * size, size, None if length % size == 0 else jnp.int32(length))


def load(ref: Any, place: Sequence[Any], *spans: Span) -> jax.Array:
    """Return ``ref[*place, *spans]``, with zeros for the indices that must not be accessed."""
    part = ref.at[(*place, *(span.slice for span in spans))]
    mask = _mask(spans)
    return plgpu.load(part, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def store(ref: Any, place: Sequence[Any], *spans: Span, values: jax.Array) -> None:
    """Set ``ref[*place, *spans]`` to the values, except for the indices that must not be accessed."""
    part = ref.at[(*place, *(span.slice for span in spans))]
    plgpu.store(part, values.astype(ref.dtype), mask=_mask(spans))


def _mask(spans: Sequence[Span]) -> jax.Array | None:
    shape = tuple(span.size for span in spans)
    masks = [
        jax.lax.broadcast_in_dim(span.mask, shape, (axis,))
        for axis, span in enumerate(spans)
        if span.end is not None
    ]
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else masks[0] & masks[1]


def branch(counts: Sequence[int], index: jax.Array, visit: Callable[[int, jax.Array], None]) -> None:
    """Call a function with the number of the part that contains an index, and the index in that part.

    Data cannot choose between references, so the program has a branch for every part. The branches are sequential: in
    nested branches, Triton allocated separate shared memory for each branch, and other nestings used more registers.

    Args:
        counts: the number of indices of each part, each at least 1. The last part also contains all larger indices.
        index: the index, int32, at least 0.
        visit: the function ``(number of the part, index in the part)`` to call.
    """
    last = len(counts) - 1
    for number, count in enumerate(counts):
        in_part = index >= 0 if number == last else (index >= 0) & (index < count)
        pl.when(in_part)(functools.partial(visit, number, index))
        index = index - count


def launch(
    body: Callable[..., None],
    operands: Any,
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    blocks: BlockSizes,
    name: str,
) -> tuple[jax.Array, ...]:
    """Run a kernel on every block of a grid.

    Args:
        body: the kernel ``(operands, outs)``. It receives references instead of arrays.
        operands: a tree of arrays.
        outs: the shapes and dtypes of the outputs.
        grid: the number of blocks along each axis, the fastest axis first.
        blocks: the block sizes. Their numbers of warps and stages are compile options of the kernel.
        name: the kernel's name in profiles.

    Returns:
        The outputs. Entries that no block writes are undefined.
    """
    leaves, tree = jax.tree.flatten(operands)
    axis_type = jax.typeof(leaves[0]).manual_axis_type

    def run(*refs: Any) -> None:
        body(jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :])

    return pl.pallas_call(
        run,
        out_shape=tuple(
            jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=axis_type) for out in outs
        ),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpreted(),
        name=name,
    )(*leaves)
