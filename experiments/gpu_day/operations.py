"""What is measured: three grouped products and the whole grouped MLP, with their floating-point operations and bytes.

An `Operation` holds the same computation as written by everyone who can do it, this project's kernels and a dense
matmul among them.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day import peers
from pallas_kernels import grouped_dot, grouped_mlp, grouped_outer
from pallas_kernels.hopper.tile_sizes import REPLICAS, ModelShape

OURS, DENSE, UNFUSED = "ours", "dense matmul", "products one at a time"
"""The names of this project's kernels, of the dense peer, and of the MLP without fusion."""
SETS: Final = 2
"""How many sets of operands one program works on, so that none is found in a cache."""


class Operands(NamedTuple):
    """One set of operands."""

    x: jax.Array
    """``[r, k]``, the row operand."""
    d_out: jax.Array
    """The gradient of the operation's result."""
    weights: tuple[jax.Array, jax.Array]
    """``[slots, k, n]``, or ``[slots, 3, k, n]`` for an MLP: the weights of the home slots and of the replica slots."""
    joint: jax.Array | None
    """Both in one buffer, as peers want them; None for an MLP."""
    apart: list[tuple[jax.Array, jax.Array]]
    """The home and replica slots of each of an MLP's matrices, for products one at a time."""
    dense: list[jax.Array]
    """The matrices ``[k, n]`` of a dense layer."""


type Call = Callable[[Operands, jax.Array], Any]
"""A function ``(operands, group sizes) -> result``."""


class Operation(NamedTuple):
    """One computation, as everyone who can do it does it: the content of one table."""

    name: str
    calls: dict[str, Call]
    """Who computes it, by name; `OURS` and `DENSE` are among them."""
    flops: Callable[[np.ndarray], float]
    """The number of floating-point operations for given group sizes; only rows that exist count."""
    bytes: Callable[[np.ndarray], float]
    """The bytes that have to move at least for given group sizes: every operand and result once."""
    reference: Call
    """The computation that ours has to agree with: the XLA implementation, which tests hold to float64 results."""


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    """Return normal bfloat16 numbers of the size of trained weights."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / math.sqrt(shape[-1])


def operand_sets(matrix: tuple[int, ...], rows: int, homes: int, columns: int) -> list[Operands]:
    """Return `SETS` sets of random operands.

    Args:
        matrix: the shape of one slot's weights: (k, n), or (3, D, F) for an MLP.
        rows: the number of rows of the row operand.
        homes: the number of home slots; `REPLICAS` replica slots come beside them.
        columns: the number of columns of the result.
    """
    sets = []
    for seed in range(SETS):
        weights = random_array(homes + REPLICAS, *matrix, seed=3 * seed)
        x = random_array(rows, matrix[-2], seed=3 * seed + 1)
        d_out = random_array(rows, columns, seed=3 * seed + 2)
        buffers, parts = (weights[:homes], weights[homes:]), range(3 if len(matrix) == 3 else 0)
        apart = [(buffers[0][:, part], buffers[1][:, part]) for part in parts]
        dense = [weights[0, part] for part in parts] or [weights[0]]
        sets.append(Operands(x, d_out, buffers, None if apart else weights, apart, dense))
    return sets


def products(shape: ModelShape, implementation: str) -> Iterator[Operation]:
    """Yield the forward product of the gate, its input gradient and its weight gradient.

    Args:
        shape: the sizes of a model's experts.
        implementation: the implementation of `pallas_kernels` that is measured as `OURS`.
    """
    k, n = shape.width, shape.expert_width

    def forward(name: str, operands: Operands, sizes: jax.Array) -> jax.Array:
        return grouped_dot(operands.x, operands.weights, sizes, implementation=name)

    def input_gradient(name: str, operands: Operands, sizes: jax.Array) -> jax.Array:
        return grouped_dot(operands.d_out, operands.weights, sizes, transposed=True, implementation=name)

    def weight_gradient(name: str, operands: Operands, sizes: jax.Array) -> tuple[jax.Array, ...]:
        slots = [buffer.shape[0] for buffer in operands.weights]
        return grouped_outer(operands.x, operands.d_out, sizes, slots=slots, implementation=name)

    ours: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "input gradient": input_gradient,
        "weight gradient": weight_gradient,
    }
    dense: dict[str, Call] = {
        "forward": lambda operands, _: operands.x @ operands.dense[0],
        "input gradient": lambda operands, _: operands.d_out @ operands.dense[0].T,
        "weight gradient": lambda operands, _: operands.x.T @ operands.d_out,
    }

    def flops(sizes: np.ndarray) -> float:
        return 2.0 * int(sizes.sum()) * k * n

    for name in peers.PRODUCTS:

        def moved(sizes: np.ndarray, name: str = name) -> float:
            matrices = sizes.size if name == "weight gradient" else int((sizes > 0).sum())
            return 2.0 * (int(sizes.sum()) * (k + n) + matrices * k * n)

        calls: dict[str, Call] = {OURS: functools.partial(ours[name], implementation), DENSE: dense[name]}
        for peer, call in peers.calls(name).items():
            calls[peer] = functools.partial(_in_one_buffer, call)
        yield Operation(name, calls, flops, moved, functools.partial(ours[name], "xla"))


def _in_one_buffer(call: peers.Call, operands: Operands, sizes: jax.Array) -> jax.Array:
    return call(operands.x, operands.d_out, operands.joint, sizes)


def mlps(shape: ModelShape, implementation: str) -> Iterator[Operation]:
    """Yield the grouped MLP forward and with its gradients, and beside it the same as products one at a time.

    Args:
        shape: the sizes of a model's experts.
        implementation: the implementation of `pallas_kernels` that is measured as `OURS`.
    """
    k, n = shape.width, shape.expert_width

    def fused(name, x, scale, weights, sizes):
        return grouped_mlp(x, weights, sizes, scale, implementation=name)

    def unfused(x, scale, weights, sizes):
        dot = functools.partial(grouped_dot, group_sizes=sizes, implementation=implementation)
        gate, up, down = weights
        hidden = (jax.nn.silu(dot(x, gate)) * dot(x, up)).astype(x.dtype)
        return dot(hidden, down, transposed=True) * scale[:, None].astype(x.dtype)

    def dense(x, scale, weights, sizes):
        gate, up, down = weights
        return ((jax.nn.silu(x @ gate) * (x @ up)) @ down.T) * scale[:, None].astype(x.dtype)

    calls: dict[str, tuple[Callable[..., Any], Callable[[Operands], Any]]] = {
        OURS: (functools.partial(fused, implementation), lambda operands: operands.weights),
        UNFUSED: (unfused, lambda operands: operands.apart),
        DENSE: (dense, lambda operands: operands.dense),
        "xla": (functools.partial(fused, "xla"), lambda operands: operands.weights),
    }

    def forward(call, weights, operands: Operands, sizes):
        return call(operands.x, jnp.ones(operands.x.shape[0], jnp.float32), weights(operands), sizes)

    def with_gradients(call, weights, operands: Operands, sizes):
        arguments = operands.x, jnp.ones(operands.x.shape[0], jnp.float32), weights(operands)
        out, pull = jax.vjp(functools.partial(call, sizes=sizes), *arguments)
        return out, *pull(operands.d_out)

    def flops(sizes: np.ndarray) -> float:
        return 6.0 * int(sizes.sum()) * k * n

    def moved(sizes: np.ndarray) -> float:
        return 2.0 * (2 * int(sizes.sum()) * k + 3 * int((sizes > 0).sum()) * k * n)

    # That ours computes gate and up again counts as time, not as work. Empty groups have gradients too.
    def moved_both(sizes: np.ndarray) -> float:
        return 2.0 * (4 * int(sizes.sum()) * k + 3 * (int((sizes > 0).sum()) + sizes.size) * k * n)

    for name, run, work, least in (
        ("MLP forward", forward, flops, moved),
        ("MLP with gradients", with_gradients, lambda sizes: 3 * flops(sizes), moved_both),
    ):
        by_name: dict[str, Call] = {peer: functools.partial(run, *call) for peer, call in calls.items()}
        yield Operation(name, by_name, work, least, by_name.pop("xla"))
