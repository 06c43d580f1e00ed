"""The choice of tile sizes for a kernel: from a table of measurements, or from a heuristic model of cycles.

The accumulators of a warpgroup have 64 rows and at most 256 columns in total, which takes half of its registers. This
is the highest ratio of products to loaded bytes that one block reaches. In tiles of 128 rows, two warpgroups share
every matrix tile. With wide tiles there are few tiles, and multiprocessors that have none wait for the others. So the
heuristic chooses the sizes that minimise the cycles of the multiprocessor with the most work. The remaining shared
memory holds additional pipeline stages.

``python -m pallas_kernels.hopper.autotune`` writes the table (`tile_table`) on a Hopper GPU. Without a table, only the
heuristic is used.
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
"""The tile widths that are considered."""
MAX_ACCUMULATED: Final = 256
"""The largest total number of columns of a warpgroup's accumulators. With 384 columns the compiler spills registers;
with 256 it does not."""
MAX_STAGES: Final = 6
"""The largest number of pipeline stages, even if shared memory has room for more."""
BARRIER_BYTES: Final = 1024
"""The number of bytes of shared memory reserved for barriers and alignment."""
PRODUCTS_PER_CYCLE: Final = 2048
"""The number of bfloat16 multiply-adds per cycle of a multiprocessor, computed from 989 TFLOP/s, 132 multiprocessors
and 1.83 GHz."""
BYTES_PER_CYCLE: Final = 38
"""The number of bytes per cycle that a multiprocessor loads from L2 while all multiprocessors load. This is an
assumption and has not been measured; reported values are 36 to 40."""
PORT_BYTES_PER_CYCLE: Final = 64
"""The largest number of bytes per cycle that can enter a multiprocessor, regardless of which block loaded them."""
LATENCY_CYCLES: Final = 800
"""The number of cycles from the start of a copy to its first byte; an assumption."""
OUTPUT_CYCLES: Final = 1500
"""The number of cycles per tile in which nothing is multiplied because the output is written; an assumption."""


class Problem(NamedTuple):
    """The sizes of a kernel's computation, from which its tile sizes are chosen."""

    matrices: int
    """The number of matrices of a step, each with its own accumulator. 0 stands for the weight gradient kernel, whose
    steps load two tiles of rows."""
    contraction: int
    """The number of elements that a product sums over; for weight gradients the expected number of rows of a group."""
    output_width: int
    """The number of columns of the output."""
    output_height: int
    """The expected number of rows of the output of one group; for weight gradients the number of rows of the matrix."""
    groups: int
    """The number of groups; for weight gradients multiplied by the number of matrices of a slot."""

    @property
    def rows_per_group(self) -> int:
        """The expected number of rows of a group."""
        return self.output_height if self.matrices else self.contraction

    @property
    def key(self) -> str:
        """The key of the problem in the table. The rows of a group are rounded up to a power of two."""
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
"""The models for whose shapes, on one of `RANKS` ranks, the kernels are compiled, tuned and measured."""
RANKS: Final = 8
"""The number of ranks that share a model's experts."""
REPLICAS: Final = 2
"""The number of replica slots of a rank."""


def count_stages(problem: Problem, height: int, width: int, *, float8: bool = False) -> int:
    """Return the number of steps that fit into shared memory for tiles of these sizes, at most `MAX_STAGES`."""
    # Each warpgroup has two output buffers of 64 lines.
    outputs = height // WARPGROUP_HEIGHT * 2 * WARPGROUP_HEIGHT * LINE_BYTES
    scales = 4 * height if float8 else 0
    room = SHARED_MEMORY_BYTES - BARRIER_BYTES - outputs
    return min(room // (step_bytes(problem, height, width) + scales), MAX_STAGES)


def step_bytes(problem: Problem, height: int, width: int) -> int:
    """Return the number of bytes of operands that one step loads."""
    return 2 * STEP * (height + max(problem.matrices, 1) * width)


def candidate_tile_sizes(problem: Problem, *, float8: bool = False) -> Iterator[TileSizes]:
    """Yield all tile sizes that a kernel can be compiled for: without clusters first, then higher and wider first.

    Args:
        problem: the sizes of the computation.
        float8: whether the operands are float8. A warpgroup then keeps the product of a step beside the sum.
    """
    accumulators = 2 if float8 else problem.matrices
    for cluster, height, width in itertools.product((1, 2), (128, 64), WIDTHS):
        fits = width * accumulators <= MAX_ACCUMULATED and width <= problem.output_width
        if fits and (stages := count_stages(problem, height, width, float8=float8)) >= 2:
            yield TileSizes(height, width, stages, cluster)


def estimate_cycles(problem: Problem, tiles: TileSizes) -> float:
    """Return the modelled number of cycles of the busiest multiprocessor, for comparing tile sizes with each other.

    >>> problem = Problem(1, contraction=2048, output_width=768, output_height=256, groups=18)
    >>> sizes = ((128, 256), (128, 128), (64, 256))
    >>> [round(estimate_cycles(problem, TileSizes(*size, 4)) / 1000) for size in sizes]
    [86, 87, 72]
    """
    steps, high = problem.contraction / STEP, problem.output_height / tiles.cluster_height
    if problem.matrices:
        # Group sizes are arbitrary, so the last tile of a group is half full on average, and there is at least one.
        high = max(high + 0.5, 1.0)
    else:
        # Likewise, the last step of a group is half full on average.
        steps, high = steps + 0.5, math.ceil(high)
    # The last column tile takes as long as the others, even if most of its columns are outside the output.
    count = problem.groups * high * math.ceil(problem.output_width / tiles.width)
    products = max(problem.matrices, 1) * tiles.height * tiles.width * STEP / PRODUCTS_PER_CYCLE
    received = step_bytes(problem, tiles.height, tiles.width)
    own = step_bytes(problem, tiles.height, 0)
    loaded = own + (received - own) / tiles.cluster
    copies = max(loaded / BYTES_PER_CYCLE, received / PORT_BYTES_PER_CYCLE)
    step = max(products, copies, (LATENCY_CYCLES + copies) / (tiles.stages - 1))
    return math.ceil(count / (multiprocessors() // tiles.cluster)) * (steps * step + OUTPUT_CYCLES)


def choose_tile_sizes(problem: Problem) -> TileSizes:
    """Return the best measured tile sizes for a problem, or the choice of the heuristic if there are none.

    The heuristic never chooses clusters, because their speed has not been measured yet.

    >>> choose_tile_sizes(Problem(1, contraction=2048, output_width=2048, output_height=1024, groups=18))
    TileSizes(height=128, width=256, stages=4, cluster=1)
    >>> choose_tile_sizes(Problem(1, contraction=2048, output_width=768, output_height=32, groups=18))
    TileSizes(height=64, width=128, stages=6, cluster=1)
    """
    return measured_tile_sizes().get(problem.key) or _best_estimate(problem, candidate_tile_sizes(problem))


def choose_float8_tile_sizes(problem: Problem) -> TileSizes:
    """Return the choice of the heuristic for a product of float8 operands; none have been measured.

    A step holds twice as many elements as in bfloat16 in the same bytes, and tensor cores multiply them in the same
    cycles. So the product takes as long as one of bfloat16 whose contraction is half as long.

    >>> choose_float8_tile_sizes(Problem(1, contraction=4096, output_width=3072, output_height=1024, groups=18))
    TileSizes(height=128, width=128, stages=5, cluster=1)
    """
    problem = problem._replace(contraction=problem.contraction // 2)
    return _best_estimate(problem, candidate_tile_sizes(problem, float8=True))


def _best_estimate(problem: Problem, candidates: Iterator[TileSizes]) -> TileSizes:
    """Return the candidate without clusters for which the model's time is shortest."""
    alone = (tiles for tiles in candidates if tiles.cluster == 1)
    return min(alone, key=lambda tiles: estimate_cycles(problem, tiles))
