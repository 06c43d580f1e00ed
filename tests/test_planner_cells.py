"""ReLibra beside other planners over a sample of settings (`experiments.planner_cells`)."""

import itertools

import jax
import pytest

from experiments.planner_cells import AHEAD, VALUES, Cell, PlannerCells, draw_cells, main, run_cell

RIVALS = ("static", "eplb", "lplb", "lplb_repacked", "ultraep", "moonep", "laer", "foremoe")
PAIRS = 92
"""The number of cells after which every pair of values was drawn."""
BEHIND = {10: 1.005, 16: 1.11, 22: 1.007, 47: 1.003, 69: 1.05, 81: 1.004}
"""The cells in which ReLibra takes more than `AHEAD` times the best rival's time, and the most that it may take there
(docs/evidence/index.md says why)."""


def test_cells_cover_all_pairs_of_values():
    cells = draw_cells(200)
    assert cells == draw_cells(200)
    assert len(set(cells)) == 200
    cells = cells[:PAIRS]
    for first, second in itertools.combinations(Cell._fields, 2):
        seen = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        missing = set(itertools.product(VALUES[first], VALUES[second])) - seen
        assert not missing, (first, second, missing)


@pytest.mark.slow
def test_relibra_is_behind_no_rival_in_a_few_cells(capsys):
    assert main(PlannerCells(cells=6, first=5, rivals=("static", "moonep"))) == 0
    assert "0 of 1" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", range(PAIRS))
def test_relibra_is_hardly_behind_any_rival(number):
    seconds = run_cell(draw_cells(200)[number], ("relibra", *RIVALS)).level
    jax.clear_caches()
    assert seconds["relibra"] <= BEHIND.get(number, AHEAD) * min(seconds[name] for name in RIVALS), seconds
