"""Correctness checks: every kernel against dense products or blocked XLA, for even, uneven and empty groups.

Results are compared on the device. Padding is NaN in most checks. A rehearsal runs the same steps at small sizes in
JAX's GPU interpreter.
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

from experiments.ladder.facts import print_facts
from pallas_kernels.agreement import reasons_not_to_check
from pallas_kernels.compare import check_close, same_bits
from pallas_kernels.grouped_dot.api import IMPLEMENTATIONS
from pallas_kernels.grouped_mlp.swiglu import swiglu
from pallas_kernels.hopper.persistent_kernel import TileSizes
from pallas_kernels.hopper.row_product_kernel import row_product_kernel
from pallas_kernels.hopper.tile_walk import group_offsets
from pallas_kernels.hopper.weight_gradient_kernel import weight_gradient_kernel
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.products import Sweep
from pallas_kernels.self_check import mlp_with_gradients
from pallas_kernels.verdicts import run_check

SPLITS: Final = ("even", "uneven", "empty")
"""The ways to split rows over groups."""
REPLICAS: Final = 2
"""The number of groups whose weights are in the second buffer."""


class Sizes(NamedTuple):
    """The sizes of a check."""

    rows: int
    contraction: int
    columns: int
    groups: int

    @classmethod
    def of(cls, rehearsal: bool) -> "Sizes":
        """Return sizes with several tiles in every direction, or small ones for the interpreter in a rehearsal.

        In both, the last column tile is only partly inside the output.
        """
        return cls(72, 64, 192, 3) if rehearsal else cls(4104, 512, 704, 18)


class ProductCase:
    """Random operands of products, and the expected results.

    Args:
        sizes: the sizes of the operands.
        matrices: the number of matrices of a group.
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
        """The weights, split into two buffers."""
        return self.weights[:-REPLICAS], self.weights[-REPLICAS:]

    def split(self, name: str) -> np.ndarray:
        """Return the group sizes ``[groups]`` of one of `SPLITS`, which leave some rows as padding."""
        rows, groups = self.sizes.rows, self.sizes.groups
        draw = np.random.default_rng(0)
        if name == "uneven":
            return draw.multinomial(rows - 13, draw.dirichlet(np.ones(groups))).astype(np.int32)
        sizes = np.full(groups, rows // groups)
        sizes[0] -= 3
        return np.where(np.arange(groups) % 2, 0 if name == "empty" else sizes, sizes).astype(np.int32)

    def product(
        self, rows: jax.Array, split: np.ndarray, matrix: int = 0, *, transposed: bool = False
    ) -> jax.Array:
        """Return each group's rows times its matrix, float32 ``[rows, n]``, with zeros in the padding."""
        weights = self.weights[:, matrix].swapaxes(1, 2) if transposed else self.weights[:, matrix]
        return _each_product(rows, weights, jnp.asarray(split))

    def outer(self, split: np.ndarray) -> jax.Array:
        """Return the sum of the outer products of each group's rows, float32 ``[groups, k, n]``."""
        return _each_outer(self.x, self.dy, jnp.asarray(split))

    def poison(self, rows: jax.Array, split: np.ndarray) -> jax.Array:
        """Return the rows with NaN in the padding."""
        return jnp.where(np.arange(len(rows))[:, None] >= split.sum(), jnp.nan, rows)

    def offsets(self, split: np.ndarray) -> jax.Array:
        """Return the group offsets in the format that the kernels read."""
        return group_offsets(jnp.asarray(split), self.sizes.rows)


@jax.jit
def _each_product(rows: jax.Array, weights: jax.Array, split: jax.Array) -> jax.Array:
    """Multiply all rows by every group's matrix, one group at a time on the device, and keep those of the group."""

    def add(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        matrix, own = group
        with jax.default_matmul_precision("highest"):
            product = rows.astype(jnp.float32) @ matrix.astype(jnp.float32)
        return jnp.where(own[:, None], product, out), None

    zeros = jnp.zeros((rows.shape[0], weights.shape[2]), jnp.float32)
    return jax.lax.scan(add, zeros, (weights, _rows_of_groups(split, rows.shape[0])))[0]


@jax.jit
def _each_outer(x: jax.Array, dy: jax.Array, split: jax.Array) -> jax.Array:
    """Multiply x, with zeros in the rows of other groups, by dy, one group at a time on the device."""

    def one(own: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return jnp.where(own[:, None], x, 0).astype(jnp.float32).T @ dy.astype(jnp.float32)

    return jax.lax.map(one, _rows_of_groups(split, x.shape[0]))


def _rows_of_groups(split: jax.Array, num_rows: int) -> jax.Array:
    """Return which rows belong to each group, ``[groups, rows]``."""
    ends, row = jnp.cumsum(split)[:, None], jnp.arange(num_rows)[None]
    return (row >= ends - split[:, None]) & (row < ends)


@contextlib.contextmanager
def interpreter(rehearsal: bool) -> Iterator[None]:
    """Run kernels in JAX's GPU interpreter in a rehearsal; otherwise do nothing."""
    if rehearsal:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            yield
    else:
        yield


def describe_machine(*, rehearsal: bool = False) -> None:
    """Report the device, driver, clocks and versions.

    Raises:
        ValueError: if the device is not a GPU and this is not a rehearsal.
    """
    device = jax.devices()[0]
    query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    smi = shutil.which("nvidia-smi")
    command = [smi or "", f"--query-gpu={query}", "--format=csv,noheader"]
    smi_output = subprocess.run(command, capture_output=True, text=True).stdout.strip() if smi else None
    print_facts(
        device=device.device_kind,
        devices=jax.device_count(),
        compute_capability=getattr(device, "compute_capability", None),
        multiprocessors=getattr(device, "core_count", None),
        jax=jax.__version__,
        **{query: smi_output},
        ptxas=shutil.which("ptxas"),
        cuda_root=os.environ.get("CUDA_ROOT"),
    )
    if not rehearsal and device.platform != "gpu":
        raise ValueError(f"the device {device.device_kind} is not a GPU")


def check_jax_example(*, rehearsal: bool = False) -> None:
    """Check that Mosaic kernels work on this machine at all, by comparing one of JAX's with `jax.lax.ragged_dot`."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    groups, rows, width = (2, 128, 128) if rehearsal else (8, 512, 512)
    x = jax.random.normal(jax.random.key(0), (groups * rows, width), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (groups, width, width), jnp.bfloat16)
    sizes = jnp.full(groups, rows, jnp.int32)
    if rehearsal:
        # JAX's interpreter cannot run this example.
        result = jax.lax.ragged_dot(x, weights, sizes)
    else:
        tiles: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64}
        run = functools.partial(ragged_dot_mgpu.ragged_dot, **tiles, max_concurrent_steps=4, grid_block_n=4)
        result = jax.jit(run)(x, weights, group_sizes=sizes)
    print_facts(**check_close("JAX's example", result, jax.lax.ragged_dot(x, weights, sizes))._asdict())


def check_product(height: int, transposed: bool, cluster: int, *, rehearsal: bool = False) -> None:
    """Check the row product for one tile height, plain or transposed weights, and clusters of one or two blocks."""
    case = ProductCase(Sizes.of(rehearsal))

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
        split, rows = case.split(name), case.dy if transposed else case.x
        begin = time.perf_counter()
        with interpreter(rehearsal):
            result = jax.block_until_ready(run(case.poison(rows, split), case.buffers, case.offsets(split)))
        seconds = round(time.perf_counter() - begin, 2)
        error = check_close(f"{name} groups", result, case.product(rows, split, transposed=transposed))
        if result[split.sum() :].any():
            raise ValueError(f"{name} groups: the padding of the result is not zero")
        print_facts(groups=name, **error._asdict(), seconds=seconds)


def check_weight_gradient(height: int, cluster: int, *, rehearsal: bool = False) -> None:
    """Check the weight gradient for one tile height and clusters of one or two blocks."""
    case = ProductCase(Sizes.of(rehearsal))
    slots = tuple(len(buffer) for buffer in case.buffers)

    @jax.jit
    def run(x, dy, offsets):
        return weight_gradient_kernel([(x, dy)], offsets, slots, tiles=TileSizes(height, 128, 4, cluster))

    for name in SPLITS:
        split = case.split(name)
        rows = case.poison(case.x, split), case.poison(case.dy, split)
        with interpreter(rehearsal):
            parts = run(*rows, case.offsets(split))
        result = jnp.concatenate(parts)[:, 0]
        print_facts(groups=name, **check_close(f"{name} groups", result, case.outer(split))._asdict())


def check_gate_up(*, rehearsal: bool = False) -> None:
    """Check the product with gate and up in one sweep and SwiGLU fused."""
    case = ProductCase(Sizes.of(rehearsal), matrices=2)
    split = case.split("uneven")
    with interpreter(rehearsal):
        (result,) = jax.jit(
            functools.partial(
                row_product_kernel,
                sums=[[Sweep(0, (0, 1))]],
                transposed=False,
                epilogue=swiglu,
                padding=True,
                tiles=TileSizes(128, 64 if rehearsal else 128, 4),
            )
        )([case.x], case.buffers, case.offsets(split))
    gate, up = (case.product(case.x, split, matrix) for matrix in (0, 1))
    print_facts(**check_close("gate and up", result, gate / (1 + jnp.exp(-gate)) * up)._asdict())


def _mlp_operands(rehearsal: bool) -> tuple[Any, ...]:
    sizes = Sizes.of(rehearsal)
    case = ProductCase(sizes, matrices=3)
    homes, replicas = (buffer * sizes.contraction**-0.5 for buffer in case.buffers)
    scale = jnp.linspace(0.5, 2, sizes.rows, dtype=jnp.float32)
    d_out = jax.random.normal(jax.random.key(7), case.x.shape, jnp.bfloat16)
    return case.x, (homes, replicas), jnp.asarray(case.split("uneven")), scale, d_out


def _with_gradients(implementation: str, rehearsal: bool) -> Callable[..., dict[str, Any]]:
    run = jax.jit(functools.partial(mlp_with_gradients, implementation))

    def in_context(*operands):
        with interpreter(rehearsal and implementation == "mosaic"):
            return run(*operands)

    return in_context


def check_mlp(*, rehearsal: bool = False) -> None:
    """Check the grouped MLP and all its gradients against blocked XLA."""
    operands = _mlp_operands(rehearsal)
    result, expected = (_with_gradients(name, rehearsal)(*operands) for name in ("mosaic", "xla"))
    for name, array in result.items():
        print_facts(array=name, **check_close(name, array, expected[name])._asdict())


def check_repeats(*, rehearsal: bool = False) -> None:
    """Check that the MLP and its gradients have the same bits in every run.

    The kernels use no atomic additions, so a difference would be a race.

    Raises:
        ValueError: if a run differs from the first one.
    """
    operands, run = _mlp_operands(rehearsal), _with_gradients("mosaic", rehearsal)
    first, runs, differing_runs = run(*operands), 2 if rehearsal else 500, 0

    for _ in range(runs):
        differing_runs += not same_bits(first, run(*operands))
    print_facts(runs=runs, moved=differing_runs)
    if differing_runs:
        raise ValueError(f"{differing_runs} of {runs} runs differ from the first run in some bit")


def check_chosen(*, rehearsal: bool = False) -> None:
    """Run the self-check of all implementations, and report which one ``implementation=None`` chooses.

    Raises:
        ValueError: if an implementation that can run on this machine does not pass.
    """
    if rehearsal:
        print_facts(chosen="xla")
        return
    failed = []
    for implementation, reason in reasons_not_to_check().items():
        if reason:
            print_facts(implementation=implementation, cannot_run=reason)
        else:
            verdict = run_check(implementation)
            print_facts(implementation=implementation, **verdict._asdict())
            failed += [] if verdict.passed else [f"{implementation}: {verdict.reason}"]
    rows = jnp.zeros((8, 64), jnp.bfloat16)
    print_facts(chosen=choose_implementation(None, IMPLEMENTATIONS, rows, rows.dtype, k=64, n=64))
    if failed:
        raise ValueError("; ".join(failed))
