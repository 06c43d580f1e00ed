"""Sizes of tiles: a heuristic from shapes and expected rows a group, and a table of what was measured to be better.

A warpgroup's accumulators are 64 rows by at most 256 columns in all, half of its registers; operands then come in at
the widest ratio of products to bytes that one block reaches. Two warpgroups share every matrix tile, unless a group is
expected to have no rows for the second. What shared memory is left holds steps that copies run ahead.

The table is written by ``python -m pallas_kernels.hopper.autotune`` on a Hopper GPU. Until someone has run it, it is
empty and the heuristic decides alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pallas_kernels.hopper.launch import LINE, ROWS, SHARED_MEMORY, STEP, Tiles

TABLE_PATH: Final = Path(__file__).with_name("tiles.json")
COLUMNS: Final = (256, 192, 128, 64)
MOST_ACCUMULATED: Final = 256
"""Columns of all accumulators of a warpgroup together: at 384 the compiler spills registers, at 256 it does not."""
MOST_STAGES: Final = 6
BARRIERS: Final = 1024
"""Bytes set aside for barriers and alignment."""


class Problem(NamedTuple):
    """What decides the tiles of a kernel."""

    operands: int
    """Row operands of a step; 0 for the kernel of weight gradients, whose tile has rows of one."""
    matrices: int
    """Tiles of a step as wide as the output."""
    accumulators: int
    contraction: int
    """Elements that a product sums over, expected ones for weight gradients."""
    columns: int
    """Of the output."""
    rows: int
    """Expected rows of a group; rows of the output for weight gradients."""

    @property
    def key(self) -> str:
        """Its name in the table; rows of a group by their next power of two."""
        rows = 1 << max(self.rows - 1, 0).bit_length()
        return "-".join(str(size) for size in (*self[:3], *self[3:5], rows))


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
"""Shapes that are compiled, tuned and measured."""


def stages(problem: Problem, rows: int, columns: int) -> int:
    """How many steps fit into shared memory, at most `MOST_STAGES`."""
    # Two buffers of 64 lines for each warpgroup's outputs.
    outputs = rows // ROWS * 2 * ROWS * LINE
    step = 2 * STEP * (max(problem.operands, 1) * rows + problem.matrices * columns)
    return min((SHARED_MEMORY - BARRIERS - outputs) // step, MOST_STAGES)


def candidates(problem: Problem) -> Iterator[Tiles]:
    """Every choice that a kernel can be compiled for, the heuristic's first."""
    tall = (64, 128) if problem.operands and problem.rows <= ROWS else (128, 64)
    for rows in tall:
        for columns in COLUMNS:
            fits = columns * problem.accumulators <= MOST_ACCUMULATED and problem.columns % columns == 0
            if fits and (most := stages(problem, rows, columns)) >= 2:
                yield Tiles(rows, columns, most)


def choose(problem: Problem) -> Tiles:
    """The measured best where the table has one, else the heuristic's choice.

    >>> choose(Problem(operands=1, matrices=1, accumulators=1, contraction=2048, columns=768, rows=1024))
    Tiles(rows=128, columns=256, stages=4)
    >>> choose(Problem(operands=1, matrices=2, accumulators=2, contraction=2048, columns=768, rows=32))
    Tiles(rows=64, columns=128, stages=5)
    """
    measured = TABLE.get(problem.key)
    return Tiles(*measured) if measured else next(candidates(problem))


TABLE: Final[dict[str, list[int]]] = json.loads(TABLE_PATH.read_text())["tiles"]
"""From the key of a problem to its measured tiles."""
