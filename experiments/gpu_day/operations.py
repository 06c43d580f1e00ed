"""The measured operations: three grouped products and the whole grouped MLP, with their FLOPs and bytes.

An `Operation` contains one computation in all available versions: this project's kernels, a dense matmul, and the
baselines that support it.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day import baselines
from pallas_kernels import grouped_dot, grouped_mlp, grouped_outer
from pallas_kernels.hopper.tile_sizes import REPLICAS, ModelShape

OWN_KERNELS, DENSE, UNFUSED = "ours", "dense matmul", "products one at a time"
"""The names in the results of this project's kernels, of the dense baseline, and of the MLP without fusion."""
SETS: Final = 2
"""The number of operand sets that a program alternates between, so that no operands are still in a cache."""


class Operands(NamedTuple):
    """One set of operands."""

    x: jax.Array
    """The row operand, ``[r, k]``."""
    d_out: jax.Array
    """The gradient of the operation's result."""
    weights: tuple[jax.Array, jax.Array]
    """The weights of the home slots and of the replica slots, each ``[slots, k, n]``, or ``[slots, 3, k, n]`` for an
    MLP."""
    joint: jax.Array | None
    """The weights of all slots in one buffer, for the baselines; None if no version reads it."""
    apart: list[tuple[jax.Array, jax.Array]]
    """The home and replica slots of each matrix of an MLP, for products one at a time."""
    dense: list[jax.Array]
    """The matrices ``[k, n]`` of a dense layer."""


type Call = Callable[[Operands, jax.Array], Any]
"""A function ``(operands, group sizes) -> result``."""


class Version(NamedTuple):
    """One way to compute an operation, forward or with gradients; each method is a `Call`."""

    call: Callable[..., Any]
    """The function ``(*inputs, group sizes) -> result``."""
    inputs: Callable[[Operands], tuple[Any, ...]]
    """The function that takes the inputs, which have gradients, from operands."""

    def forward(self, operands: Operands, sizes: jax.Array) -> Any:
        """Compute the result."""
        return self.call(*self.inputs(operands), sizes)

    def with_gradients(self, operands: Operands, sizes: jax.Array) -> tuple[Any, ...]:
        """Compute the result and the gradients of all inputs."""
        out, pull = jax.vjp(lambda *inputs: self.call(*inputs, sizes), *self.inputs(operands))
        return out, *pull(operands.d_out)


class Operation(NamedTuple):
    """One computation in all its versions; the content of one table."""

    name: str
    calls: dict[str, Call]
    """The versions by name, including `OWN_KERNELS` and `DENSE`."""
    flops: Callable[[np.ndarray], float]
    """A function from group sizes to the number of floating-point operations, without padding."""
    bytes: Callable[[np.ndarray], float]
    """A function from group sizes to the smallest possible memory traffic in bytes: every operand and result once."""
    reference: Call
    """The XLA implementation, with which the results of the kernels are compared. Tests compare it with float64."""


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    """Return normally distributed bfloat16 numbers with about the magnitude of trained weights."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / math.sqrt(shape[-1])


def operand_sets(matrix: tuple[int, ...], rows: int, homes: int, columns: int) -> list[Operands]:
    """Return `SETS` sets of random operands.

    Args:
        matrix: the shape of one slot's weights: (k, n), or (3, D, F) for an MLP.
        rows: the number of rows of the row operand.
        homes: the number of home slots. There are also `REPLICAS` replica slots.
        columns: the number of columns of the result.
    """
    sets = []
    for seed in range(SETS):
        weights = random_array(homes + REPLICAS, *matrix, seed=3 * seed)
        x = random_array(rows, matrix[-2], seed=3 * seed + 1)
        d_out = random_array(rows, columns, seed=3 * seed + 2)
        operands = split_operands(x, d_out, weights, homes)
        sets.append(operands._replace(joint=None) if operands.apart else operands)
    return sets


def split_operands(x: jax.Array, d_out: jax.Array, weights: jax.Array, homes: int) -> Operands:
    """Return the operands of one product or MLP, with weights in one buffer and in parts.

    Args:
        x: the row operand.
        d_out: the gradient of the result.
        weights: the weights of all slots.
        homes: the number of home slots, which are the first ones.
    """
    buffers, parts = (weights[:homes], weights[homes:]), range(3 if weights.ndim == 4 else 0)
    apart = [(buffers[0][:, part], buffers[1][:, part]) for part in parts]
    dense = [weights[0, part] for part in parts] or [weights[0]]
    return Operands(x, d_out, buffers, weights, apart, dense)


def products(shape: ModelShape, implementation: str) -> Iterator[Operation]:
    """Yield the forward product of the gate, its input gradient and its weight gradient.

    Args:
        shape: the sizes of the model's experts.
        implementation: the implementation of `pallas_kernels` to measure as `OWN_KERNELS`.
    """
    k, n = shape.width, shape.expert_width

    def forward(name: str, operands: Operands, sizes: jax.Array) -> jax.Array:
        return grouped_dot(operands.x, operands.weights, sizes, implementation=name)

    def input_gradient(name: str, operands: Operands, sizes: jax.Array) -> jax.Array:
        return grouped_dot(operands.d_out, operands.weights, sizes, transposed=True, implementation=name)

    def weight_gradient(name: str, operands: Operands, sizes: jax.Array) -> tuple[jax.Array, ...]:
        slots = [buffer.shape[0] for buffer in operands.weights]
        return grouped_outer(operands.x, operands.d_out, sizes, slots=slots, implementation=name)

    grouped: dict[str, Callable[..., Any]] = {
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

    for name in baselines.PRODUCTS:

        def memory_traffic(sizes: np.ndarray, name: str = name) -> float:
            matrices = sizes.size if name == "weight gradient" else int((sizes > 0).sum())
            return 2.0 * (int(sizes.sum()) * (k + n) + matrices * k * n)

        calls: dict[str, Call] = {
            OWN_KERNELS: functools.partial(grouped[name], implementation),
            DENSE: dense[name],
        }
        for baseline, call in baselines.calls(name).items():
            calls[baseline] = functools.partial(_with_joint_buffer, call)
        yield Operation(name, calls, flops, memory_traffic, functools.partial(grouped[name], "xla"))


def _with_joint_buffer(call: baselines.Call, operands: Operands, sizes: jax.Array) -> jax.Array:
    return call(operands.x, operands.d_out, operands.joint, sizes)


def mlps(shape: ModelShape, implementation: str) -> Iterator[Operation]:
    """Yield the grouped MLP, forward and with gradients, both fused and as separate products.

    Args:
        shape: the sizes of the model's experts.
        implementation: the implementation of `pallas_kernels` to measure as `OWN_KERNELS`.
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
        return baselines.dense_mlp(x, *weights) * scale[:, None].astype(x.dtype)

    def version(call, weights) -> Version:
        return Version(call, lambda operands: (operands.x, _ones(operands.x), weights(operands)))

    versions = {
        OWN_KERNELS: version(functools.partial(fused, implementation), lambda operands: operands.weights),
        UNFUSED: version(unfused, lambda operands: operands.apart),
        DENSE: version(dense, lambda operands: operands.dense),
        "xla": version(functools.partial(fused, "xla"), lambda operands: operands.weights),
    }

    def flops(sizes: np.ndarray) -> float:
        return 6.0 * int(sizes.sum()) * k * n

    def forward_traffic(sizes: np.ndarray) -> float:
        return 2.0 * (2 * int(sizes.sum()) * k + 3 * int((sizes > 0).sum()) * k * n)

    # The kernels recompute gate and up; this adds to their time, but not to the FLOPs. Empty groups have gradients too.
    def total_traffic(sizes: np.ndarray) -> float:
        return 2.0 * (4 * int(sizes.sum()) * k + 3 * (int((sizes > 0).sum()) + sizes.size) * k * n)

    for name, run, work, traffic in (
        ("MLP forward", Version.forward, flops, forward_traffic),
        ("MLP with gradients", Version.with_gradients, lambda sizes: 3 * flops(sizes), total_traffic),
    ):
        calls: dict[str, Call] = {label: functools.partial(run, each) for label, each in versions.items()}
        yield Operation(name, calls, work, traffic, calls.pop("xla"))


def _ones(x: jax.Array) -> jax.Array:
    return jnp.ones(x.shape[0], jnp.float32)
