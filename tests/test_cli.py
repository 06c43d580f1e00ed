"""The command line as a user runs it: the output, and the files that it writes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.traces import save_small_trace

from relibra_jax.cli.main import EXTRA, main
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import ablation
from relibra_jax.planning.planners import PLANNERS


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return save_small_trace(tmp_path_factory.mktemp("traces") / "small.npz")


SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--replica-slots", "1", "--micro-batches", "4"]


def check_written(folder, names, shown):
    """Check the printed table and the files of a comparison of the planners ``names``."""
    numbers = json.loads((folder / "compare.json").read_text())
    assert [row["planner"] for row in numbers["planners"]] == list(names)
    for row in numbers["planners"]:
        assert row["planner"] in shown
        assert f"{row['imbalance']:.4f}" in shown
        assert 1 <= row["imbalance"] <= row["imbalance_max"]
        assert sum(row["modelled_parts"].values()) == pytest.approx(row["modelled_seconds"])
        assert row["crossings"] <= row["crossings_busiest"]
        assert 0 < row["least_seconds"] <= row["modelled_seconds"]
        assert row["left"] == pytest.approx(row["modelled_seconds"] / row["least_seconds"] - 1)
        assert f"{row['left']:.0%}" in shown
        assert f"{row['share_overlapped']:.1%}" in shown
        assert row["share_as_needed"] > row["share_of_balanced"] > row["share_planning_exposed"] > 0
        assert row["share_of_local"] <= row["share_of_balanced"] * 1.2
    assert "--legend" in shown
    assert "Max / mean" not in shown, "columns are explained on demand"
    table = shown.split("columns: ")[0]
    assert "…" not in table, "no number is cut on a terminal of 80 characters"
    assert max(map(len, table.splitlines()[1:])) <= 124
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.png", "timeline.png"]


@pytest.mark.slow
def test_compare_writes_table_figures_and_numbers(trace, tmp_path, capsys, monkeypatch):
    two_planners = {name: PLANNERS[name] for name in ("static", "eplb")}
    monkeypatch.setattr("relibra_jax.cli.compare.PLANNERS", two_planners)
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    check_written(tmp_path, two_planners, capsys.readouterr().out)


@pytest.mark.long
def test_compare_counts_what_residents_cost(trace, tmp_path, capsys, monkeypatch):
    """Pushes are part of the time, and only planners that fill resident slots need their memory."""
    two_planners = {name: PLANNERS[name] for name in ("static", "relibra")}
    monkeypatch.setattr("relibra_jax.cli.compare.PLANNERS", two_planners)
    options = ["--resident-slots", "2", "--updates", "2", "--recompute", "--tokens-per-rank", "200000"]
    assert main(["compare", str(trace), *SMALL, *options, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    check_written(tmp_path, two_planners, shown)
    shown = " ".join(shown.split())
    for words in (
        "2 nodes x 2 ranks, 1 replica slot, 2 resident slots",
        " push ",
        " resid ",
        "hierarchical dispatch, 2 updates per batch, recompute, fitted exchange",
    ):
        assert words in shown
    static, relibra = json.loads((tmp_path / "compare.json").read_text())["planners"]
    assert static["residents"] == static["modelled_parts"]["push"] == 0
    assert relibra["residents"] > 0
    assert relibra["modelled_parts"]["push"] > 0
    model = MODELS["gpt-oss-20b"]
    slot_bytes = 2 * model.moe_layers * model.expert_params * 6
    assert relibra["rank_memory"] - static["rank_memory"] == pytest.approx(slot_bytes)


@pytest.mark.long
def test_compare_runs_every_planner(trace, tmp_path, capsys):
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    check_written(tmp_path, PLANNERS, capsys.readouterr().out)


@pytest.mark.long
def test_compare_runs_every_variant_of_an_ablation(trace, tmp_path, capsys):
    options = ["--ablation", "--dispatch", "hierarchical", "--out", str(tmp_path)]
    assert main(["compare", str(trace), *SMALL, *options]) == 0
    check_written(tmp_path, ablation(), capsys.readouterr().out)


def test_plan_can_be_read_back_by_the_line_that_it_prints(trace, tmp_path, capsys):
    out = tmp_path / "deep [1]" / "plan.npz"
    assert main(["plan", str(trace), *SMALL, "--planner", "lplb", "--out", str(out)]) == 0
    (line,) = re.findall("^in Python: (.*)$", capsys.readouterr().out, re.MULTILINE)
    names = {}
    exec(line, names)
    plan, topology = names["plan"], names["topology"]
    assert topology.num_experts == 16
    assert plan.quota.shape == (4, 2, 2, 2, topology.slots)


@pytest.mark.slow
def test_commands_write_only_where_they_are_told_and_to_the_cache(trace, tmp_path):
    """In a home, a working folder and a folder for temporary files that are new, nothing else appears."""
    folders = {name: tmp_path / name for name in ("home", "here", "temporary")}
    for folder in folders.values():
        folder.mkdir()
    variables = {"HOME": str(folders["home"]), "TMPDIR": str(folders["temporary"])}
    variables |= {"PYTHONPATH": str(Path(__file__).parents[1])}
    without = {"XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "MPLCONFIGDIR"}
    environment = {name: value for name, value in os.environ.items() if name not in without} | variables
    commands = [
        ["inspect", str(trace)],
        ["plan", str(trace), *SMALL, "--planner", "eplb", "--out", "asked/plan.npz"],
    ]
    program = f"from relibra_jax.cli.main import main; [main(args) for args in {commands}]"
    subprocess.run([sys.executable, "-c", program], cwd=folders["here"], env=environment, check=True)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    cached = {path for path in written if path.startswith("home/.cache/")}
    assert written - cached == {"here/asked/plan.npz"}
    assert [path.name for path in folders["here"].iterdir()] == ["asked"]
    assert not list(folders["temporary"].iterdir())
    # Matplotlib makes an empty folder for its settings.
    assert {path.name for path in folders["home"].iterdir()} <= {".cache", ".config"}


def test_inspect_shows_the_counts_of_experts_and_samples(trace, capsys):
    assert main(["inspect", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "16, top-2" in shown
    assert "32" in shown


def test_inspect_and_compare_show_brackets_in_names_and_paths(tmp_path, capsys):
    trace, folder = save_small_trace(tmp_path / "[red]x.npz"), tmp_path / "o[" / "b]"
    assert main(["inspect", str(trace)]) == 0
    assert "[red]x.npz" in capsys.readouterr().out
    assert main(["compare", str(trace), *SMALL, "--rows", "static", "--out", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "[red]x.npz: 4 micro-batches" in shown
    assert f"numbers: {folder / 'compare.json'}" in shown


def test_inspect_reads_the_recorded_trace_by_default(monkeypatch, capsys):
    monkeypatch.delenv("RELIBRA_TRACE", raising=False)
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out
    assert "recorded_trace.npz" in shown
    assert "16, top-2" in shown


def test_inspect_reads_a_trace_by_name(capsys):
    assert main(["inspect", "recorded"]) == 0
    assert "recorded_trace.npz" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["compare", "plan", "inspect"])
def test_main_help_names_the_trace(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "TRACE The trace: a name" in " ".join(capsys.readouterr().out.split())


def test_inspect_reads_the_trace_that_the_environment_names(trace, monkeypatch, capsys):
    monkeypatch.setenv("RELIBRA_TRACE", str(trace))
    assert main(["inspect"]) == 0
    assert "small.npz" in capsys.readouterr().out


@pytest.mark.parametrize("package", EXTRA)
def test_main_reports_a_missing_extra_in_one_line_with_status_2(package):
    program = f"""
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
from relibra_jax.cli.main import main
sys.exit(main(["inspect"]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f'error: relibra needs {package}: pip install "relibra-jax[cli]"\n'


def test_relibra_jax_starts_without_its_command_line():
    names = (*EXTRA, "relibra_jax.cli")
    program = f"import relibra_jax, sys; sys.exit(bool(set(sys.modules) & set({names})))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_inspect_says_that_experts_are_inferred(trace, tmp_path, capsys):
    with np.load(trace) as file:
        np.savez(tmp_path / "bare.npz", routed_experts=file["routed_experts"], lengths=file["lengths"])
    assert main(["inspect", str(tmp_path / "bare.npz")]) == 0
    assert "inferred" in capsys.readouterr().out
