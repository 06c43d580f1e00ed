"""A check that the kernels compute correct results on this machine, run once and cached.

    python -m pallas_kernels.self_check

``implementation=None`` never chooses a kernel that has not passed this check: results must not come from a kernel that
was never verified on this GPU, with this driver and this version of JAX. The check compares the grouped MLP and all its
gradients with blocked XLA, for uneven and empty groups, NaN in the padding, and small and large tiles. The kernels of
attention and of float8 products have checks of their own. All check that repeated runs give the same bits, and take
seconds. `pallas_kernels.verdicts` runs them and keeps their results.

On several hosts, run the command on each of them before the first launch: it saves the first start minutes. All
processes of a program choose the same kernels, those that have passed in each of them (`pallas_kernels.agreement`).
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.agreement import reasons_not_to_check
from pallas_kernels.compare import check_close, same_bits
from pallas_kernels.flash_attention.api import CHECK as ATTENTION_CHECK
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.grouped_dot_float8.api import CHECK as FLOAT8_CHECK
from pallas_kernels.grouped_dot_float8.api import FLOAT8, grouped_dot_float8
from pallas_kernels.grouped_mlp.api import grouped_mlp
from pallas_kernels.implementation import why_not_hopper
from pallas_kernels.products import SCALE_BLOCK
from pallas_kernels.verdicts import run_check

SIZES: Final = ((640, 256), (4096, 1024))
"""The pairs of number of rows and width that are checked; the first gives small tiles, the second large ones."""
ATTENTION: Final = ((700, 80, "bfloat16"), (2048, 128, "bfloat16"), (700, 64, "float32"))
"""The numbers of tokens, widths of a head and dtypes with which attention is checked."""
REPEATS: Final = 20
"""The number of times that each result is computed again and compared bit for bit."""


def check_here(implementation: str) -> None:
    """Check an implementation of grouped products, or the kernels of attention or of float8, in this process.

    Raises:
        ValueError: if a result is wrong, or if two runs differ in any bit.
    """
    if implementation == ATTENTION_CHECK:
        for tokens, width, dtype in ATTENTION:
            name = f"attention of {tokens} tokens, {dtype} heads of {width}"
            check_case("triton", name, attention_with_gradients, attention_operands(tokens, width, dtype))
        return
    if implementation == FLOAT8_CHECK:
        kernels = "triton" if why_not_hopper(jax.local_devices()[0].device_kind) else "mosaic"
        for rows, width in SIZES:
            check_case(
                kernels, f"{rows} float8 rows of {width}", float8_product, float8_operands(rows, width)
            )
        return
    for rows, width in SIZES:
        check_case(implementation, f"{rows} rows of {width}", mlp_with_gradients, mlp_operands(rows, width))


def check_case(
    implementation: str, name: str, call: Callable[..., dict[str, Any]], operands: tuple[Any, ...]
) -> None:
    """Compare a call with that of blocked XLA, and with itself.

    Args:
        implementation: the implementation.
        name: the name of the case in error messages.
        call: the function ``(implementation, *operands) -> arrays by name``.
        operands: the operands.
    """
    run_kernels, run_xla = (jax.jit(functools.partial(call, each)) for each in (implementation, "xla"))
    result = run_kernels(*operands)
    check_close(name, result, run_xla(*operands))
    for _ in range(REPEATS):
        if not same_bits(result, run_kernels(*operands)):
            raise ValueError(f"{name}: two runs gave different bits")


def mlp_operands(rows: int, width: int) -> tuple[Any, ...]:
    """Return operands of a grouped MLP, with empty groups and NaN in the padding."""
    slots = 4, 2
    pattern = np.array([3, 0, 1, 2, 0, 1])
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (pattern * ((rows - 5) / pattern.sum())).astype(np.int32)
    weights = jax.random.normal(keys[0], (sum(slots), 3, width, width), jnp.bfloat16) * width**-0.5
    padding = np.arange(rows)[:, None] >= sizes.sum()
    x, d_out = (
        jnp.where(padding, jnp.nan, jax.random.normal(key, (rows, width), jnp.bfloat16)) for key in keys[1:]
    )
    buffers = weights[: slots[0]], weights[slots[0] :]
    return x, buffers, jnp.asarray(sizes), jnp.linspace(0.5, 2, rows), d_out


def float8_operands(rows: int, width: int) -> tuple[Any, ...]:
    """Return float8 operands of a grouped product with scales of blocks, with empty groups and NaN in the padding."""
    x, buffers, sizes, *_ = mlp_operands(rows, width)
    keys = jax.random.split(jax.random.key(1), 3)

    def scales(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, 0.25, 4.0)

    blocks = width // SCALE_BLOCK
    weights = [buffer[:, 0].astype(FLOAT8) for buffer in buffers]
    of_weights = [
        scales(key, len(buffer), blocks, blocks) for key, buffer in zip(keys[1:], buffers, strict=True)
    ]
    return x.astype(FLOAT8), scales(keys[0], rows, blocks), weights, of_weights, sizes


def float8_product(implementation: str, *operands: Any) -> dict[str, Any]:
    """Return the grouped product of float8 operands, by name."""
    return {"out": grouped_dot_float8(*operands, implementation=implementation)}


def attention_operands(tokens: int, width: int, dtype: str) -> tuple[Any, ...]:
    """Return operands of attention inside samples of a tenth, a fifth and the rest of the tokens.

    Some tokens are padding, which attends to itself alone, and some attend to nothing.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    query, d_out = (jax.random.normal(key, (tokens, 4, width), dtype) for key in keys[:2])
    key, value = (jax.random.normal(key, (tokens, 2, width), dtype) for key in keys[2:])
    last = np.arange(tokens, dtype=np.int32)
    starts = np.array([0, tokens // 10, tokens * 3 // 10], np.int32)
    first = starts[np.searchsorted(starts, last, side="right") - 1]
    padding = tokens // 50
    first[-padding:] = last[-padding:]
    last[-2 * padding : -padding] = -1
    return query, key, value, jnp.asarray(first), jnp.asarray(last), d_out


def mlp_with_gradients(
    implementation: str,
    x: jax.Array,
    weights: Sequence[jax.Array],
    sizes: jax.Array,
    scale: jax.Array,
    d_out: jax.Array,
) -> dict[str, Any]:
    """Return the output of the grouped MLP and all its gradients, by name."""

    def call(x, weights, scale):
        return grouped_mlp(x, weights, sizes, scale, implementation=implementation)

    out, pull = jax.vjp(call, x, weights, scale)
    d_x, d_weights, d_scale = pull(d_out)
    return {"out": out, "d_x": d_x, "d_weights": d_weights, "d_scale": d_scale}


def attention_with_gradients(
    implementation: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first: jax.Array,
    last: jax.Array,
    d_out: jax.Array,
) -> dict[str, Any]:
    """Return the output of attention and all its gradients, by name."""

    def call(query, key, value):
        return flash_attention(query, key, value, first, last, implementation=implementation)

    out, pull = jax.vjp(call, query, key, value)
    d_query, d_key, d_value = pull(d_out)
    return {"out": out, "d_query": d_query, "d_key": d_key, "d_value": d_value}


def main(arguments: list[str] | None = None) -> int:
    """Check again all implementations that can run on this machine; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.self_check", description=__doc__)
    parser.add_argument(
        "--here",
        metavar="IMPLEMENTATION",
        help="check one implementation in this process, without storing the verdict",
    )
    chosen = parser.parse_args(arguments).here
    if chosen:
        check_here(chosen)
        return 0
    failed = False
    for implementation, reason in reasons_not_to_check().items():
        if reason:
            print(f"{implementation}: not checked, {reason}")
        else:
            verdict = run_check(implementation)
            failed |= not verdict.passed
            print(f"{implementation}: {'passed' if verdict.passed else 'failed, ' + verdict.reason}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
