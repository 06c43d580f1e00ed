"""Is it right: every kernel against NumPy or blocked XLA, over even, uneven and empty groups, with NaN in padding.

A rehearsal runs the same steps at small sizes in JAX's GPU interpreter.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.gpu_day.facts import say
from pallas_kernels.compare import check_close, same_bits
from pallas_kernels.grouped_dot.api import IMPLEMENTATIONS
from pallas_kernels.grouped_mlp.swiglu import swiglu
from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.self_check import mlp_with_gradients, reasons_not_to_check, run_check
from pallas_kernels.sweep import Sweep

SPLITS: Final = ("even", "uneven", "empty")
"""How rows are split over groups."""
REPLICAS: Final = 2
"""Groups whose weights are in the second buffer."""


class Sizes(NamedTuple):
    """The sizes of a check."""

    rows: int
    contraction: int
    columns: int
    groups: int

    @classmethod
    def of(cls, rehearsal: bool) -> "Sizes":
        """Large enough for several tiles in every direction, or as small as the interpreter needs; the last tile of
        columns is a partial one."""
        return cls(72, 64, 192, 3) if rehearsal else cls(4104, 512, 704, 18)


class Operands:
    """Random operands, and what a product of them must be.

    Args:
        sizes: their sizes.
        matrices: the matrices of a group.
    """

    def __init__(self, sizes: Sizes, matrices: int = 1):
        keys = iter(jax.random.split(jax.random.key(0), 4))

        def array(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.bfloat16)

        self.sizes = sizes
        self.x, self.dy = array(sizes.rows, sizes.contraction), array(sizes.rows, sizes.columns)
        self.weights = array(sizes.groups, matrices, sizes.contraction, sizes.columns)

    @property
    def buffers(self) -> tuple[jax.Array, jax.Array]:
        """The weights in two buffers."""
        return self.weights[:-REPLICAS], self.weights[-REPLICAS:]

    def split(self, name: str) -> np.ndarray:
        """The group sizes ``[groups]`` of a way to split the rows, some rows of padding left."""
        rows, groups = self.sizes.rows, self.sizes.groups
        draw = np.random.default_rng(0)
        if name == "uneven":
            return draw.multinomial(rows - 13, draw.dirichlet(np.ones(groups))).astype(np.int32)
        sizes = np.full(groups, rows // groups)
        sizes[0] -= 3
        return np.where(np.arange(groups) % 2, 0 if name == "empty" else sizes, sizes).astype(np.int32)

    def product(self, rows: jax.Array, split: np.ndarray, matrix: int = 0, *, transposed: bool = False):
        """Each group's rows times its matrix in float32, ``[rows, n]``, zero in padding."""
        weights = np.asarray(self.weights[:, matrix], np.float32)
        weights = weights.swapaxes(1, 2) if transposed else weights
        out, ends = np.zeros((self.sizes.rows, weights.shape[2]), np.float32), np.cumsum(split)
        for group, (start, end) in enumerate(zip(ends - split, ends, strict=True)):
            out[start:end] = np.asarray(rows[start:end], np.float32) @ weights[group]
        return out

    def poison(self, rows: jax.Array, split: np.ndarray) -> jax.Array:
        """The rows, NaN in padding."""
        return jnp.where(np.arange(len(rows))[:, None] >= split.sum(), jnp.nan, rows)

    def offsets(self, split: np.ndarray) -> jax.Array:
        """Where groups start and end, as kernels read it."""
        return group_offsets(jnp.asarray(split), self.sizes.rows)


@contextlib.contextmanager
def interpreter(rehearsal: bool) -> Iterator[None]:
    """JAX's GPU interpreter in a rehearsal, else nothing."""
    if rehearsal:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    else:
        yield


def describe_machine(*, rehearsal: bool) -> None:
    """Say what device, driver, clocks and versions these are."""
    device = jax.devices()[0]
    query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    smi = shutil.which("nvidia-smi")
    command = [smi or "", f"--query-gpu={query}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip() if smi else None
    say(
        device=device.device_kind,
        devices=jax.device_count(),
        compute_capability=getattr(device, "compute_capability", None),
        multiprocessors=getattr(device, "core_count", None),
        jax=jax.__version__,
        **{query: said},
        ptxas=shutil.which("ptxas"),
        cuda_root=os.environ.get("CUDA_ROOT"),
    )
    if not rehearsal and device.platform != "gpu":
        raise ValueError(f"{device.device_kind} is no GPU")


def check_jax_example(*, rehearsal: bool) -> None:
    """Whether any Mosaic kernel runs on this machine: one of JAX's own, beside `jax.lax.ragged_dot`."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    groups, rows, width = (2, 128, 128) if rehearsal else (8, 512, 512)
    x = jax.random.normal(jax.random.key(0), (groups * rows, width), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (groups, width, width), jnp.bfloat16)
    sizes = jnp.full(groups, rows, jnp.int32)
    if rehearsal:
        # JAX's interpreter does not run its example.
        found = jax.lax.ragged_dot(x, weights, sizes)
    else:
        tiles: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64}
        run = functools.partial(ragged_dot_mgpu.ragged_dot, **tiles, max_concurrent_steps=4, grid_block_n=4)
        found = jax.jit(run)(x, weights, group_sizes=sizes)
    say(**check_close("JAX's example", found, jax.lax.ragged_dot(x, weights, sizes))._asdict())


def check_product(height: int, transposed: bool, cluster: int, *, rehearsal: bool) -> None:
    """The product that keeps the rows, plain or transposed, in tiles of one height, by clusters of 1 or 2 blocks."""
    operands = Operands(Sizes.of(rehearsal))

    @jax.jit
    def run(rows, buffers, offsets):
        return row_product_kernel(
            [rows],
            buffers,
            offsets,
            sums=[[Sweep(0, (0,))]],
            transposed=transposed,
            epilogue=lambda sums, _: (sums, None),
            padding=True,
            tiles=TileSizes(height, 128, 4, cluster),
        )[0]

    for name in SPLITS:
        split, rows = operands.split(name), operands.dy if transposed else operands.x
        begin = time.perf_counter()
        with interpreter(rehearsal):
            found = run(operands.poison(rows, split), operands.buffers, operands.offsets(split))
            found = np.asarray(found.astype(jnp.float32))
        seconds = round(time.perf_counter() - begin, 2)
        off = check_close(f"{name} groups", found, operands.product(rows, split, transposed=transposed))
        if found[split.sum() :].any():
            raise ValueError(f"{name} groups: padding is not zero")
        say(groups=name, **off._asdict(), seconds=seconds)


def check_weight_gradient(height: int, cluster: int, *, rehearsal: bool) -> None:
    """The weight gradient, in tiles of one height, by clusters of one or two blocks."""
    operands = Operands(Sizes.of(rehearsal))
    slots = tuple(len(buffer) for buffer in operands.buffers)

    @jax.jit
    def run(x, dy, offsets):
        return weight_gradient_kernel([(x, dy)], offsets, slots, tiles=TileSizes(height, 128, 4, cluster))

    for name in SPLITS:
        split = operands.split(name)
        rows = operands.poison(operands.x, split), operands.poison(operands.dy, split)
        with interpreter(rehearsal):
            parts = [np.asarray(part.astype(jnp.float32)) for part in run(*rows, operands.offsets(split))]
        found, wanted, ends = np.concatenate(parts)[:, 0], [], np.cumsum(split)
        for start, end in zip(ends - split, ends, strict=True):
            x, dy = (np.asarray(one[start:end], np.float32) for one in (operands.x, operands.dy))
            wanted.append(x.T @ dy)
        say(groups=name, **check_close(f"{name} groups", found, np.stack(wanted))._asdict())


def check_gate_up(*, rehearsal: bool) -> None:
    """Gate and up in one sweep, with SwiGLU behind them."""
    operands = Operands(Sizes.of(rehearsal), matrices=2)
    split = operands.split("uneven")
    with interpreter(rehearsal):
        (found,) = jax.jit(
            functools.partial(
                row_product_kernel,
                sums=[[Sweep(0, (0, 1))]],
                transposed=False,
                epilogue=swiglu,
                padding=True,
                tiles=TileSizes(128, 64 if rehearsal else 128, 4),
            )
        )([operands.x], operands.buffers, operands.offsets(split))
        found = np.asarray(found.astype(jnp.float32))
    gate, up = (operands.product(operands.x, split, matrix) for matrix in (0, 1))
    say(**check_close("gate and up", found, gate / (1 + np.exp(-gate)) * up)._asdict())


def _mlp_operands(rehearsal: bool) -> tuple[Any, ...]:
    sizes = Sizes.of(rehearsal)
    operands = Operands(sizes, matrices=3)
    homes, replicas = (buffer * sizes.contraction**-0.5 for buffer in operands.buffers)
    scale = jnp.linspace(0.5, 2, sizes.rows, dtype=jnp.float32)
    d_out = jax.random.normal(jax.random.key(7), operands.x.shape, jnp.bfloat16)
    return operands.x, (homes, replicas), jnp.asarray(operands.split("uneven")), scale, d_out


def _with_gradients(implementation: str, rehearsal: bool) -> Callable[..., dict[str, Any]]:
    run = jax.jit(functools.partial(mlp_with_gradients, implementation))

    def in_context(*operands):
        with interpreter(rehearsal and implementation == "mosaic"):
            return run(*operands)

    return in_context


def check_mlp(*, rehearsal: bool) -> None:
    """The grouped MLP and all its gradients, beside blocked XLA."""
    operands = _mlp_operands(rehearsal)
    found, wanted = (_with_gradients(name, rehearsal)(*operands) for name in ("mosaic", "xla"))
    for name, one in found.items():
        say(array=name, **check_close(name, one, wanted[name])._asdict())


def check_repeats(*, rehearsal: bool) -> None:
    """Whether the MLP and its gradients are the same bits in every run: nothing is added atomically, so a difference
    is a race.

    Raises:
        ValueError: if bits have moved.
    """
    operands, run = _mlp_operands(rehearsal), _with_gradients("mosaic", rehearsal)
    first, runs, moved = run(*operands), 2 if rehearsal else 500, 0

    for _ in range(runs):
        moved += not same_bits(first, run(*operands))
    say(runs=runs, moved=moved)
    if moved:
        raise ValueError(f"{moved} of {runs} runs are not the first one bit for bit")


def check_chosen(*, rehearsal: bool) -> None:
    """Which implementations pass their check on this machine, and which one is chosen where none is named.

    Raises:
        ValueError: if one that could run here does not pass.
    """
    if rehearsal:
        say(chosen="xla")
        return
    failed = []
    for implementation, reason in reasons_not_to_check().items():
        if reason:
            say(implementation=implementation, cannot_run=reason)
        else:
            verdict = run_check(implementation)
            say(implementation=implementation, **verdict._asdict())
            failed += [] if verdict.passed else [f"{implementation}: {verdict.reason}"]
    rows = jnp.zeros((8, 64), jnp.bfloat16)
    say(chosen=choose_implementation(None, IMPLEMENTATIONS, rows, rows.dtype, k=64, n=64))
    if failed:
        raise ValueError("; ".join(failed))
