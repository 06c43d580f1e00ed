"""The studies that the claims are read from, each a cell with its rows: a quick form and a full form.

The full form has the conditions of ReLibra's evaluation (arXiv 2605.08639): 16 ranks as 2 x 8 and 32 ranks as 4 x 8,
batches of 1,024 samples in 32 micro-batches, four consecutive batches that count after one that does not, the shapes of
the paper's three models, and 160 GPUs over which optimizer state is sharded. The recorded trace is also run at the
shapes of its own model.
"""

import dataclasses
from typing import Final, NamedTuple

from experiments.claims.cells import Cell
from experiments.claims.rows import HEADLINE, MORE_PLANNERS, PARTS, WITH_ALL
from relibra_jax.evaluation import Batching, Costs, Ranks

PAPER_MODELS: Final = ("qwen3-30b-a3b", "glm-4.5-106b-a12b", "qwen3-235b-a22b")
PAPER_RANKS: Final = ((2, 8), (4, 8))
SYNTHETIC: Final = "synthetic-128"
"""The trace with as many experts as the paper's models. No recorded routing of such models was available."""
GPUS: Final = 160
BATCHES: Final = Batching(batch_size=1024, bootstrap=5, micro_batches=32)
TOP: Final = ("static", "eplb", "relibra")
"""The rows of sweeps."""


class Study(NamedTuple):
    """A cell with its rows, and the part of the report that it is for."""

    section: str
    """The part of the report: headline, recompute, ranks, or the name of a sweep."""
    trace: str | None
    """The name of the trace. None stands for the recorded trace of the command's argument."""
    cell: Cell
    """The setting."""
    rows: tuple[str, ...]
    """The rows to run."""


def quick_studies(model: str) -> list[Study]:
    """Make the studies of the quick form: the headline rows on the recorded trace and 2 x 4 ranks.

    Args:
        model: the model whose sizes are modelled.
    """
    cell = Cell(ranks=Ranks(), batching=Batching(), costs=Costs(model=model))
    return [Study("headline", None, cell, HEADLINE)]


def full_studies(model: str) -> list[Study]:
    """Make all studies. Running them takes hours on two cores.

    Args:
        model: the model that the trace was recorded from.
    """
    studies = []
    for nodes, local in PAPER_RANKS:
        studies.append(Study("headline", None, _cell(nodes, local, model), HEADLINE + MORE_PLANNERS + PARTS))
        studies += [Study("headline", None, _cell(nodes, local, name), HEADLINE) for name in PAPER_MODELS]
        studies += [
            Study(
                "headline",
                SYNTHETIC,
                _cell(nodes, local, name),
                HEADLINE + (MORE_PLANNERS if name == PAPER_MODELS[0] else ()),
            )
            for name in PAPER_MODELS
        ]
    both_passes = dataclasses.replace(_cell(2, 8, model), costs=_costs(16, model, recompute=True))
    studies.append(Study("recompute", None, both_passes, ("static", "foremoe", "relibra", WITH_ALL)))
    studies += [
        Study("ranks", trace, _with_enough_samples(_cell(nodes, 8, name)), ("static", "relibra"))
        for trace, name, most in ((None, model, 4), (SYNTHETIC, PAPER_MODELS[0], 8))
        for nodes in (1, 2, 4, 8)
        if nodes <= most
    ]
    return studies + _sweeps(model)


def _with_enough_samples(cell: Cell) -> Cell:
    """Return the cell with a batch size of at least one sample for each rank and micro-batch."""
    ranks = cell.ranks.nodes * cell.ranks.ranks_per_node
    size = max(cell.batching.batch_size or 0, (cell.batching.micro_batches or 0) * ranks)
    return dataclasses.replace(cell, batching=dataclasses.replace(cell.batching, batch_size=size))


def _sweeps(model: str) -> list[Study]:
    """Return the studies of the sweeps, which vary one number at a time on 2 x 8 ranks."""
    cell, change = _cell(2, 8, model), dataclasses.replace

    def ranks(**numbers: int) -> Cell:
        return change(cell, ranks=change(cell.ranks, **numbers))

    cells: dict[str, list[Cell]] = {
        "micro_batches": [
            change(cell, batching=change(BATCHES, micro_batches=count)) for count in (4, 8, 16, 32, 64)
        ],
        "tokens_per_rank": [
            change(cell, costs=change(cell.costs, tokens_per_rank=float(tokens)))
            for tokens in (64, 256, 1024, 4096, 16384)
        ],
        "replica_slots": [ranks(replica_slots=slots) for slots in (0, 1, 2, 4)],
        "resident_slots": [ranks(resident_slots=slots) for slots in (0, 1, 2, 3)],
        "nodes": [ranks(nodes=nodes, ranks_per_node=16 // nodes) for nodes in (1, 2, 4, 8)],
    }
    return [Study(section, None, each, TOP) for section, varied in cells.items() for each in varied]


def _cell(nodes: int, local: int, model: str) -> Cell:
    return Cell(
        ranks=Ranks(nodes=nodes, ranks_per_node=local), batching=BATCHES, costs=_costs(nodes * local, model)
    )


def _costs(ranks: int, model: str, *, recompute: bool = False) -> Costs:
    return Costs(model=model, shards=GPUS // ranks, recompute=recompute)
