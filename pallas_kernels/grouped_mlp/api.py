"""The one call for grouped MLPs: looks at shapes, chooses an implementation, and leaves the rest to it.

An implementation is a function ``(rows, home, replica, group_sizes, row_scale, out_dtype)`` that JAX can
differentiate, and a row in `IMPLEMENTATIONS`: the tests run every row. Shapes and dtypes have been checked, and there
is at least one row.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import check_out_dtype, check_sizes, choose, show, vary_alike
from pallas_kernels.grouped_mlp.mosaic import grouped_mlp_mosaic
from pallas_kernels.grouped_mlp.reference import grouped_mlp_reference
from pallas_kernels.grouped_mlp.xla import grouped_mlp_xla

type Array = jax.Array | np.ndarray

IMPLEMENTATIONS: Final[Mapping[str, Callable[..., jax.Array]]] = {
    "reference": grouped_mlp_reference,
    "xla": grouped_mlp_xla,
    "mosaic": grouped_mlp_mosaic,
}
"""All implementations by name."""


def grouped_mlp(
    rows: Array,
    home: Array,
    replica: Array,
    group_sizes: Array,
    row_scale: Array | None = None,
    *,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """Each group of rows through the SwiGLU MLP of its own slot: ``(silu(x W0) * (x W1)) W2^T * scale``.

    Group sizes are data: one compilation serves every split. Products accumulate in float32 (float64 for float64
    rows). The two weight buffers are read where they lie. Nothing of the size of ``[r, F]`` is stored for the
    backward pass, which computes gate and up again. Hidden rows are rounded to the dtype of rows before the down
    product. (The reference does neither.) Works under jit, grad (once, in reverse), vmap and shard_map.

    Args:
        rows: ``[r, D]`` floating, sorted by group: the rows of home slot 0, 1, ..., H-1, then of each replica slot.
            Rows beyond the last group are padding and may hold anything.
        home: ``[H, 3, D, F]`` in the dtype of rows, H at least 1: gate, up, and down transposed.
        replica: ``[R, 3, D, F]`` likewise; R may be 0.
        group_sizes: ``[H + R]`` integer, rows of each slot; together at most r. Sizes below 0 count as 0, and rows
            beyond r are left out.
        row_scale: ``[r]`` floating, a factor for each row of the output; None for 1.
        out_dtype: of the result, floating; None for that of rows. Its gradient is rounded to theirs.
        implementation: a name in `IMPLEMENTATIONS`. None is "mosaic" where that can run: on Hopper GPUs, in bfloat16,
            with D and F multiples of 64; it copies rows whose number is no multiple of 8. Elsewhere None is "xla",
            which runs on every platform that JAX has, and is fast on CPUs.

    Returns:
        ``[r, D]``; zero in padding. Gradients of padding and of the weights of empty groups
        are zero.

    Raises:
        ValueError: shapes or dtypes do not fit together, no implementation has that name, or the named one cannot
            run here.

    >>> rows, home, replica = jnp.ones((4, 2)), jnp.ones((2, 3, 2, 8)), jnp.ones((1, 3, 2, 8))
    >>> grouped_mlp(rows, home, replica, jnp.array([2, 0, 1]))[:, 0].round().tolist()
    [28.0, 28.0, 28.0, 0.0]
    """
    rows, home, replica, group_sizes = map(jnp.asarray, (rows, home, replica, group_sizes))
    _check(rows, home, replica, group_sizes)
    dtype = check_out_dtype(out_dtype, rows)
    name = choose(implementation, IMPLEMENTATIONS, rows, dtype, D=rows.shape[1], F=home.shape[3])
    if row_scale is None:
        row_scale = jnp.ones(rows.shape[0], jnp.promote_types(rows.dtype, jnp.float32))
    row_scale = jnp.asarray(row_scale)
    if row_scale.shape != rows.shape[:1] or not jnp.issubdtype(row_scale.dtype, jnp.floating):
        raise ValueError(
            f"row_scale: expected floating [{rows.shape[0]}] for rows {show(rows)}, found {show(row_scale)}"
        )
    if rows.size == 0:
        return rows.astype(dtype)
    return IMPLEMENTATIONS[name](*vary_alike(rows, home, replica, group_sizes, row_scale), dtype)


def _check(rows: jax.Array, home: jax.Array, replica: jax.Array, group_sizes: jax.Array) -> None:
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"rows: expected floating [r, D], found {show(rows)}")
    for name, weights in (("home", home), ("replica", replica)):
        if weights.ndim != 4 or weights.shape[1:3] != (3, rows.shape[1]) or weights.dtype != rows.dtype:
            raise ValueError(
                f"{name}: expected {rows.dtype}[slots, 3, {rows.shape[1]}, F] for rows {show(rows)},"
                f" found {show(weights)}"
            )
    if home.shape[0] < 1 or home.shape[3] != replica.shape[3]:
        raise ValueError(
            f"home {show(home)}, replica {show(replica)}: at least one home slot, and the same last dimension"
        )
    check_sizes(group_sizes, (home.shape[0], replica.shape[0]))
