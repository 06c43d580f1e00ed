"""The report of the claims: the quick form, and the report of constructed results."""

import functools
import json
from pathlib import Path

import pytest

from experiments.claims.__main__ import Claims
from experiments.claims.__main__ import main as run_claims
from experiments.claims.behind import behind
from experiments.claims.cells import Cell, CellResult, run_cell
from experiments.claims.measured import WHOLE_UPDATES, Measurement, read_measured
from experiments.claims.own_loads import OwnLoad, plan_loads, skewed_ranks
from experiments.claims.published import CLAIMS, figure_of
from experiments.claims.report import SWEEPS, write_report
from experiments.claims.results import Results
from experiments.claims.rivals import best_rival, best_rows
from experiments.claims.rows import HEADLINE, WITH_ALL, WITH_RESIDENTS, entries
from experiments.claims.settings import SYNTHETIC, full_studies, quick_studies
from experiments.program import run_program
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.types import Topology
from relibra_jax.evaluation import Batching, Costs, Ranks
from relibra_jax.planning.baselines.moonep import moonep
from relibra_jax.traces.read import read_trace

program = functools.partial(run_program, run_claims, Claims)
KEPT = Path(__file__).parents[1] / "experiments" / "results"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return the folder with the report of the quick form."""
    out = tmp_path_factory.mktemp("claims")
    assert program(["--quick", "--measured", str(KEPT), "--out", str(out)]) == 0
    return out


@pytest.mark.long
def test_claims_writes_report_figure_and_numbers_in_the_quick_form(quick):
    report, numbers = (quick / "claims.md").read_text(), json.loads((quick / "claims.json").read_text())
    (cell,) = numbers["cells"]
    assert list(cell["rows"]) == list(HEADLINE)
    assert cell["cell"]["experts"] == 16
    static, relibra = cell["rows"]["static"], cell["rows"]["relibra"]
    speed = static["modelled_seconds"] / relibra["modelled_seconds"]
    assert f"| speed over Megatron-LM (static) | 1.21x to 1.58x | {speed:.2f}x |" in report
    assert (
        f"| share of the balanced run's speed | 90% to 94% | {relibra['share_of_balanced']:.1%} |" in report
    )
    shares = [relibra[f"share_{name}"] for name in ("overlapped", "as_needed", "of_local")]
    full = "overlapped {:.1%}, as needed {:.1%}, of local {:.1%}".format(*shares)
    assert (
        f"| ReLibra: share of the balanced run's speed |  | {relibra['share_of_balanced']:.1%} ({full}) |"
        in report
    )
    assert "## Synthetic routing" not in report
    for line in report.splitlines():
        if line.startswith(("| recorded_trace", "!")):
            assert "16 experts" in line, "every figure says for how many experts it is"
    assert "python -m experiments.claims --quick" in report
    assert sorted(path.name for path in quick.iterdir()) == ["claims.json", "claims.md", "planners.png"]


@pytest.mark.long
def test_claims_report_begins_with_where_it_is_behind(quick):
    headings = [line for line in (quick / "claims.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[:2] == ["## Where relibra_jax is behind", "## Recorded routing"]


def numbers(seconds, **changed):
    """Return the numbers of a row whose batch takes ``seconds``."""
    row = {
        "imbalance": 1.1,
        "forecast_error": 0.0,
        "crossings": 1.0,
        "replicas": 2.0,
        "rank_memory": 3e10,
        "modelled_parts": {"exposed": 0.1, "push": 0.2, "reorder": 0.3},
        "modelled_seconds": seconds,
        "share_of_balanced": 8.0 / seconds,
        "share_overlapped": 7.0 / seconds,
        "share_as_needed": 9.0 / seconds,
        "share_of_local": 8.5 / seconds,
        "left": 0.25,
        "plan_seconds": 0.01,
        "fits": True,
    }
    return row | changed


def cell_of(rows, *, synthetic=False, model="gpt-oss-20b"):
    setting = {
        "ranks": {"nodes": 2, "ranks_per_node": 8},
        "batching": {},
        "costs": {"model": model},
        "experts": 32,
        "replica_share": 0.01,
    }
    return CellResult("trace", synthetic, setting, rows)


def results_of(*cells, **others):
    fields = {
        "about": {"command": "python -m experiments.claims"},
        "own_loads": [],
        "measured": [],
        "figures": {},
    }
    return Results(**(fields | others), cells=[("headline", cell) for cell in cells])


ROWS = {"static": numbers(12.0), "eplb": numbers(10.5), "lplb": numbers(9.5), "relibra": numbers(10.0)}


def test_behind_names_a_planner_that_is_ahead():
    lines = behind(results_of(cell_of(ROWS)))
    assert "lplb is 5.3% faster than relibra in modelled time on recorded routing (gpt-oss-20b, 2x8)" in lines
    assert not [line for line in lines if line.startswith(("eplb is", "static is"))]


def test_best_rows_have_each_rival_at_its_best():
    rows = ROWS | {"eplb_repacked": numbers(9.0), "lplb_repacked": numbers(8.0, rank_memory=9e10, fits=False)}
    cell = cell_of(rows)
    assert best_rows(rows) == {"static": "static", "eplb": "eplb_repacked", "lplb": "lplb"}
    assert best_rival(rows) == "eplb_repacked"
    report = write_report(results_of(cell))
    assert (
        "| speed over EPLB+ and over LPLB+ (measured: over EPLB+) | 1.06x to 1.21x | 0.90x, 0.95x |" in report
    )
    assert "| best rival (the fastest of all systems of others): share" in report
    assert "| 88.9% (eplb_repacked) |" in report
    assert "| speed of ReLibra over the best rival |  | 0.90x |" in report
    named = [line.partition(" is ")[0] for line in behind(results_of(cell)) if " faster than relibra" in line]
    assert named == ["eplb_repacked", "lplb"]


def test_write_report_ends_a_table_with_the_best_rival():
    more = {name: numbers(11.0) for name in (*HEADLINE, "llep") if name not in ROWS}
    report = write_report(results_of(cell_of(ROWS | more)))
    table = report.split("### Every row: trace, 32 experts")[1].split("\n\n")[1].splitlines()
    assert table[-1].startswith("| best rival: lplb | 1.100 | ")
    assert " | 84.2% | 73.7% | 94.7% | 89.5% | " in table[-1]


def test_behind_names_an_assignment_that_is_slower():
    lines = behind(results_of(cell_of(ROWS | {"relibra + assign": numbers(12.5)})))
    assert any(line.startswith("relibra + assign is 20% slower than relibra") for line in lines)


def test_behind_names_a_claim_that_is_not_reached():
    lines = "\n".join(behind(results_of(cell_of(ROWS))))
    assert (
        "speed over Megatron-LM (static); published: 1.21x to 1.58x; relibra_jax on recorded routing: 1.20x"
        " (gpt-oss-20b, 2x8)" in lines
    )
    assert (
        "share of the balanced run's speed; published: 90% to 94%; relibra_jax on recorded routing: 80.0%"
        in lines
    )
    assert "memory of replicas" not in lines


def test_write_report_shows_the_gigabytes_of_a_row_that_does_not_fit():
    """Such a row is neither behind nor ahead."""
    large = cell_of(ROWS | {"relibra": numbers(30.0, rank_memory=2.12e11, fits=False)})
    report = write_report(results_of(large))
    assert "| speed over Megatron-LM (static) | 1.21x to 1.58x | needs 212 GB |" in report
    assert not [line for line in behind(results_of(large)) if "memory of replicas" not in line]


def test_write_report_puts_synthetic_routing_below_and_labels_it():
    report = write_report(results_of(cell_of(ROWS, synthetic=True, model="qwen3-30b-a3b"), cell_of(ROWS)))
    recorded, synthetic = report.split("## Synthetic routing")
    assert "relibra_jax, modelled: gpt-oss-20b" in recorded
    assert "qwen3-30b-a3b" not in recorded.split("## Recorded routing")[1]
    assert "relibra_jax, modelled: qwen3-30b-a3b" in synthetic


def test_write_report_gives_measured_figures_a_column_of_their_own():
    ran = Measurement(
        f"{WHOLE_UPDATES}, 2x2", {"static": 3.0, "relibra": 2.0, "balanced": 1.9}, "miniature/a.json"
    )
    report = write_report(results_of(cell_of(ROWS), measured=[ran]))
    assert "| speed over Megatron-LM (static) | 1.21x to 1.58x | 1.20x | 1.50x |" in report
    assert "| share of the balanced run's speed | 90% to 94% | 80.0% | 0.95x |" in report


def test_run_cell_says_why_a_cell_cannot_run():
    cell = Cell(ranks=Ranks(nodes=3), batching=Batching(), costs=Costs())
    skipped = run_cell(read_trace(None), cell, ("static",))
    assert "num_experts=16 must divide evenly over 12 ranks" in write_report(results_of(skipped))


def test_run_cell_gives_planners_the_slots_of_the_cell_and_of_the_row(monkeypatch):
    """The larger number of slots counts. Memory is that of the model's own 32 experts; the trace has 16."""
    slots_by_row = {}

    def stop_at(name, entry, setting):
        slots_by_row[name] = setting.topology.resident_slots
        raise ValueError("not run")

    monkeypatch.setattr("experiments.claims.cells.run_planner", stop_at)
    for slots in (0, 2):
        cell = Cell(ranks=Ranks(resident_slots=slots), batching=Batching(), costs=Costs())
        for row in ("relibra", WITH_RESIDENTS):
            run_cell(read_trace(None), cell, (row,))
        assert slots_by_row == {"relibra": slots, WITH_RESIDENTS: max(slots, 1)}


def test_full_studies_have_at_least_four_cells_in_a_sweep():
    studies = full_studies("gpt-oss-20b")
    for section in SWEEPS:
        cells = [study.cell for study in studies if study.section == section]
        assert len({repr(cell) for cell in cells}) == len(cells) >= 4
    residents = [study.cell.ranks.resident_slots for study in studies if study.section == "resident_slots"]
    assert residents == [0, 1, 2, 3]


def test_full_studies_have_a_sample_for_every_rank_where_ranks_are_many():
    for study in full_studies("gpt-oss-20b"):
        if study.section == "ranks":
            ranks, batching = study.cell.ranks, study.cell.batching
            assert batching.batch_size >= batching.micro_batches * ranks.nodes * ranks.ranks_per_node


def test_entries_have_a_planner_for_every_row_of_studies_and_claims():
    row_names = entries().keys()
    for study in full_studies("gpt-oss-20b") + quick_studies("gpt-oss-20b"):
        assert set(study.rows) <= row_names
    for paper in CLAIMS:
        assert {name for claim in paper.claims for name in claim.rows} <= row_names


def test_full_studies_have_the_papers_conditions():
    studies = full_studies("gpt-oss-20b")
    headline = [study for study in studies if study.section == "headline"]
    for trace in (None, SYNTHETIC):
        lines = {
            (study.cell.ranks.nodes, study.cell.ranks.ranks_per_node, study.cell.costs.model)
            for study in headline
            if study.trace == trace
        }
        paper = {(n, 8, m) for n in (2, 4) for m in ("qwen3-30b-a3b", "glm-4.5-106b-a12b", "qwen3-235b-a22b")}
        assert lines - {(2, 8, "gpt-oss-20b"), (4, 8, "gpt-oss-20b")} == paper
    batching = headline[0].cell.batching
    assert (batching.batch_size, batching.micro_batches) == (1024, 32)
    assert batching.bootstrap - 1 == 4, "four consecutive batches count, after one that does not"


def test_figure_of_is_none_for_a_claim_without_its_rows():
    (claim,) = [claim for claim in CLAIMS[-1].claims if claim.rows == ("static", WITH_ALL)]
    assert figure_of(claim, cell_of(ROWS)) is None


def test_plan_loads_lets_moonep_balance_its_own_load_to_one_token():
    """The drawn loads have the requested imbalance, and the rank loads of MoonEP differ by at most one token."""
    load = skewed_ranks(2.01)
    by_rank = load.reshape(64, 4).sum(1)
    assert by_rank.max() / by_rank.mean() == pytest.approx(2.01, abs=0.02)
    topology = Topology(num_nodes=1, ranks_per_node=64, num_experts=256, replica_slots=4)
    computed = rank_load(plan_loads(moonep(), load[None], topology))
    assert computed.max() - computed.min() <= 1
    lines = OwnLoad("moonep", "a load", "exact", "1 token apart", "40 tokens apart", "its documentation")
    assert "| moonep | a load | exact | 1 token apart | 40 tokens apart |" in write_report(
        results_of(cell_of(ROWS), own_loads=[lines])
    )


def test_read_measured_reads_kept_measurements():
    measurements = read_measured(KEPT)
    assert any(each.gain("static", "relibra") for each in measurements)
    assert all(each.gain("nobody", "relibra") is None for each in measurements)


def test_read_measured_rejects_measurements_in_another_format(tmp_path):
    (tmp_path / "miniature").mkdir()
    (tmp_path / "miniature" / "a.json").write_text('{"settings": {"grid": [2, 1]}}')
    with pytest.raises(
        ValueError, match=r"a.json is not in the format that its benchmark writes: KeyError\('"
    ):
        read_measured(tmp_path)


def test_claims_refuses_an_unknown_model_in_one_line(tmp_path, capsys):
    assert program(["--model", "qwen3-30b-a3", "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean qwen3-30b-a3b" in line
    assert not (tmp_path / "out").exists()
