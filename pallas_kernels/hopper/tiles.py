"""Sizes of tiles: a heuristic that counts cycles, and a table of what was measured to be better.

A warpgroup's accumulators are 64 rows by at most 256 columns in all, half of its registers; operands then come in at
the widest ratio of products to bytes that one block reaches. In tiles of 128 rows two warpgroups share every matrix
tile. Wide tiles are few, and multiprocessors that find none left wait for the others: the heuristic takes the sizes for
which the fullest multiprocessor has the fewest cycles to go. What shared memory is left holds steps that copies run
ahead.

The table is written by ``python -m pallas_kernels.hopper.autotune`` on a Hopper GPU. Until someone has run it, it is
empty and the heuristic decides alone.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pallas_kernels.hopper.launch import LINE, ROWS, SHARED_MEMORY, STEP, Tiles, multiprocessors

TABLE_PATH: Final = Path(__file__).with_name("tiles.json")
COLUMNS: Final = (256, 192, 128, 64)
MOST_ACCUMULATED: Final = 256
"""Columns of all accumulators of a warpgroup together: at 384 the compiler spills them, at 256 it does not."""
MOST_STAGES: Final = 6
BARRIERS: Final = 1024
"""Bytes set aside for barriers and alignment."""
PRODUCTS: Final = 2048
"""Multiplications and additions of bfloat16 in a cycle of a multiprocessor (989 TFLOP/s of 132 at 1.83 GHz)."""
BYTES: Final = 56
"""That reach a multiprocessor in a cycle while all of them read; 64 fit through, the rest is an assumption."""
LATENCY: Final = 800
"""Cycles from the start of a copy to its first byte, an assumption."""
ENDS: Final = 1500
"""Cycles of a tile in which nothing is multiplied, an assumption: its outputs are written."""


class Problem(NamedTuple):
    """What decides the tiles of a kernel."""

    matrices: int
    """Of a step, each with an accumulator; 0 for the kernel of weight gradients, whose steps hold two tiles of rows."""
    contraction: int
    """Elements that a product sums over, expected ones for weight gradients."""
    columns: int
    """Of the output."""
    rows: int
    """Expected rows of a group; rows of the output for weight gradients."""
    groups: int
    """For weight gradients times the matrices of a slot."""

    @property
    def expected(self) -> int:
        """Rows of a group."""
        return self.rows if self.matrices else self.contraction

    @property
    def key(self) -> str:
        """Its name in the table; rows of a group by their next power of two."""
        power = 1 << max(self.expected - 1, 0).bit_length()
        sizes = self._replace(rows=power) if self.matrices else self._replace(contraction=power)
        return "-".join(map(str, sizes))


class Shape(NamedTuple):
    """Sizes of a model's experts."""

    width: int
    expert_width: int
    experts: int
    top_k: int


MODELS: Final = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "GLM-4.5-106B-A12B": Shape(4096, 1408, 128, 8),
    "Qwen3-235B-A22B": Shape(4096, 1536, 128, 8),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8),
    "GPT-OSS-120B": Shape(2880, 2880, 128, 4),
}
"""Shapes that are compiled, tuned and measured: those of one rank of `RANKS`."""
RANKS: Final = 8
REPLICAS: Final = 2
"""Replica slots of that rank."""


def stages(problem: Problem, rows: int, columns: int) -> int:
    """How many steps fit into shared memory, at most `MOST_STAGES`."""
    # Two buffers of 64 lines for each warpgroup's outputs.
    outputs = rows // ROWS * 2 * ROWS * LINE
    return min((SHARED_MEMORY - BARRIERS - outputs) // loaded(problem, rows, columns), MOST_STAGES)


def loaded(problem: Problem, rows: int, columns: int) -> int:
    """Bytes of a step."""
    return 2 * STEP * (rows + max(problem.matrices, 1) * columns)


def candidates(problem: Problem) -> Iterator[Tiles]:
    """Every choice that a kernel can be compiled for, the widest first."""
    for rows in (128, 64):
        for columns in COLUMNS:
            fits = columns * problem.matrices <= MOST_ACCUMULATED and problem.columns % columns == 0
            if fits and (most := stages(problem, rows, columns)) >= 2:
                yield Tiles(rows, columns, most)


def cycles(problem: Problem, tiles: Tiles) -> float:
    """How long the fullest multiprocessor is busy, counted: a model to compare choices by, not a time.

    >>> problem = Problem(1, contraction=2048, columns=768, rows=256, groups=18)
    >>> [round(cycles(problem, Tiles(*size, 4)) / 1000) for size in ((128, 256), (128, 128), (64, 256))]
    [69, 61, 50]
    """
    steps, high = problem.contraction / STEP, problem.rows / tiles.rows
    if problem.matrices:
        # A group's last tile is full by half, as its size may be any.
        high += 0.5
    else:
        # The same for its last step.
        steps, high = steps + 0.5, math.ceil(high)
    count = problem.groups * high * problem.columns / tiles.columns
    products = max(problem.matrices, 1) * tiles.rows * tiles.columns * STEP / PRODUCTS
    copies = loaded(problem, tiles.rows, tiles.columns) / BYTES
    step = max(products, copies, (LATENCY + copies) / (tiles.stages - 1))
    return math.ceil(count / multiprocessors()) * (steps * step + ENDS)


def choose(problem: Problem) -> Tiles:
    """The measured best where the table has one, else the heuristic's choice.

    >>> choose(Problem(1, contraction=2048, columns=2048, rows=1024, groups=18))
    Tiles(rows=128, columns=256, stages=4)
    >>> choose(Problem(1, contraction=2048, columns=768, rows=256, groups=18))
    Tiles(rows=64, columns=256, stages=5)
    """
    if measured := TABLE.get(problem.key):
        return Tiles(*measured)
    return min(candidates(problem), key=lambda tiles: cycles(problem, tiles))


TABLE: Final[dict[str, list[int]]] = json.loads(TABLE_PATH.read_text())["tiles"]
"""From the key of a problem to its measured tiles."""
