"""The sizes of tiles for a kernel: from a table of measurements, or from a heuristic that counts cycles.

A warpgroup's accumulators are 64 rows by at most 256 columns in all, half of its registers; operands then come in at
the widest ratio of products to bytes that one block reaches. In tiles of 128 rows two warpgroups share every matrix
tile. Wide tiles are few, and multiprocessors that find none left wait for the others: the heuristic takes the sizes for
which the fullest multiprocessor has the fewest cycles to go. What shared memory is left holds steps that copies run
ahead.

The table (`tile_table`) is written by ``python -m pallas_kernels.hopper.autotune`` on a Hopper GPU. Until someone has
run it, there is none and the heuristic decides alone.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from pallas_kernels.hopper.multiprocessors import multiprocessors
from pallas_kernels.hopper.persistent_kernel import (
    LINE_BYTES,
    SHARED_MEMORY_BYTES,
    STEP,
    WARPGROUP_HEIGHT,
    TileSizes,
)
from pallas_kernels.hopper.tile_table import measured_tile_sizes

WIDTHS: Final = (256, 192, 128, 64)
"""The widths that a tile may have."""
MAX_ACCUMULATED: Final = 256
"""Columns of all accumulators of a warpgroup together: at 384 the compiler spills them, at 256 it does not."""
MAX_STAGES: Final = 6
"""Steps that shared memory holds at most."""
BARRIER_BYTES: Final = 1024
"""Shared memory set aside for barriers and alignment."""
PRODUCTS_PER_CYCLE: Final = 2048
"""Multiplications and additions of bfloat16 in a cycle of a multiprocessor (989 TFLOP/s of 132 at 1.83 GHz)."""
BYTES_PER_CYCLE: Final = 38
"""Bytes that a multiprocessor loads from L2 in a cycle while all of them do: an assumption, not measured here. Programs
are said to get 36 to 40."""
PORT_BYTES_PER_CYCLE: Final = 64
"""Bytes that fit into a multiprocessor in a cycle, whoever loaded them."""
LATENCY_CYCLES: Final = 800
"""Cycles from the start of a copy to its first byte, an assumption."""
OUTPUT_CYCLES: Final = 1500
"""Cycles of a tile in which nothing is multiplied because its output is written, an assumption."""


class Problem(NamedTuple):
    """What a kernel is asked to compute: everything that decides the sizes of its tiles."""

    matrices: int
    """The number of matrices of a step, each with an accumulator of its own; 0 stands for the kernel of weight
    gradients, whose steps hold two tiles of rows."""
    contraction: int
    """The number of elements that a product sums over; for weight gradients the expected rows of a group."""
    output_width: int
    """Columns of the output."""
    output_height: int
    """Rows of the output of one group, an expected number; for weight gradients the rows of the matrix."""
    groups: int
    """The number of groups; for weight gradients times the matrices of a slot."""

    @property
    def rows_per_group(self) -> int:
        """The expected rows of a group."""
        return self.output_height if self.matrices else self.contraction

    @property
    def key(self) -> str:
        """The problem's name in the table, in which rows of a group stand by their next power of two."""
        power = 1 << max(self.rows_per_group - 1, 0).bit_length()
        rounded = self._replace(output_height=power) if self.matrices else self._replace(contraction=power)
        return "-".join(map(str, rounded))


class ModelShape(NamedTuple):
    """The sizes of a model's experts."""

    width: int
    expert_width: int
    experts: int
    top_k: int


MODELS: Final = {
    "Qwen3-30B-A3B": ModelShape(2048, 768, 128, 8),
    "GLM-4.5-106B-A12B": ModelShape(4096, 1408, 128, 8),
    "Qwen3-235B-A22B": ModelShape(4096, 1536, 128, 8),
    "DeepSeek-V3": ModelShape(7168, 2048, 256, 8),
    "GPT-OSS-120B": ModelShape(2880, 2880, 128, 4),
}
"""The models at whose shapes kernels are compiled, tuned and measured: those of one rank of `RANKS`."""
RANKS: Final = 8
"""The number of ranks that share a model's experts."""
REPLICAS: Final = 2
"""The number of replica slots of a rank."""


def count_stages(problem: Problem, height: int, width: int) -> int:
    """Return how many steps of tiles of these sizes fit into shared memory, at most `MAX_STAGES`."""
    # Two buffers of 64 lines for each warpgroup's outputs.
    outputs = height // WARPGROUP_HEIGHT * 2 * WARPGROUP_HEIGHT * LINE_BYTES
    return min(
        (SHARED_MEMORY_BYTES - BARRIER_BYTES - outputs) // step_bytes(problem, height, width), MAX_STAGES
    )


def step_bytes(problem: Problem, height: int, width: int) -> int:
    """Return the bytes of operands that one step loads."""
    return 2 * STEP * (height + max(problem.matrices, 1) * width)


def candidate_tile_sizes(problem: Problem) -> Iterator[TileSizes]:
    """Yield all sizes that a kernel can be compiled for, clusters last, and before that the widest first."""
    for cluster, height, width in itertools.product((1, 2), (128, 64), WIDTHS):
        fits = width * problem.matrices <= MAX_ACCUMULATED and width <= problem.output_width
        if fits and (stages := count_stages(problem, height, width)) >= 2:
            yield TileSizes(height, width, stages, cluster)


def estimate_cycles(problem: Problem, tiles: TileSizes) -> float:
    """Return how many cycles the fullest multiprocessor is busy: a model to compare sizes by, not a time.

    >>> problem = Problem(1, contraction=2048, output_width=768, output_height=256, groups=18)
    >>> sizes = ((128, 256), (128, 128), (64, 256))
    >>> [round(estimate_cycles(problem, TileSizes(*size, 4)) / 1000) for size in sizes]
    [86, 87, 72]
    """
    steps, high = problem.contraction / STEP, problem.output_height / tiles.cluster_height
    if problem.matrices:
        # A group's last tile is full by half, as its size may be any; and a group with rows has one at least.
        high = max(high + 0.5, 1.0)
    else:
        # The same for its last step.
        steps, high = steps + 0.5, math.ceil(high)
    # The last tile of columns takes as long as the others, however few of its columns the output has.
    count = problem.groups * high * math.ceil(problem.output_width / tiles.width)
    products = max(problem.matrices, 1) * tiles.height * tiles.width * STEP / PRODUCTS_PER_CYCLE
    received = step_bytes(problem, tiles.height, tiles.width)
    own = step_bytes(problem, tiles.height, 0)
    loaded = own + (received - own) / tiles.cluster
    copies = max(loaded / BYTES_PER_CYCLE, received / PORT_BYTES_PER_CYCLE)
    step = max(products, copies, (LATENCY_CYCLES + copies) / (tiles.stages - 1))
    return math.ceil(count / (multiprocessors() // tiles.cluster)) * (steps * step + OUTPUT_CYCLES)


def choose_tile_sizes(problem: Problem) -> TileSizes:
    """Return the sizes that were measured to be best, or the heuristic's choice where nothing was measured.

    Only a measurement chooses clusters: what they are worth, and that they are right, has not been seen on a GPU yet.

    >>> choose_tile_sizes(Problem(1, contraction=2048, output_width=2048, output_height=1024, groups=18))
    TileSizes(height=128, width=256, stages=4, cluster=1)
    >>> choose_tile_sizes(Problem(1, contraction=2048, output_width=768, output_height=32, groups=18))
    TileSizes(height=64, width=128, stages=6, cluster=1)
    """
    if measured := measured_tile_sizes().get(problem.key):
        return measured
    alone = (tiles for tiles in candidate_tile_sizes(problem) if tiles.cluster == 1)
    return min(alone, key=lambda tiles: estimate_cycles(problem, tiles))
