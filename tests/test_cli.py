"""The command line as a person uses it: what it writes, and what bad input gets."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.ablation.__main__ import main as run_ablation
from experiments.ablation.variants import ablation
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.cli.main import EXTRA, main
from relibra_jax.cli.modelled_time import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.plan_files import load_plan
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.replay_files import save_replay


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    trace = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    save_replay(path, trace.replay, num_experts=trace.num_experts)
    return path


SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--replica-slots", "1", "--micro-batch-size", "4"]


def written(folder, names, shown):
    """Hold what a comparison has printed and written to the contenders that it was asked for."""
    numbers = json.loads((folder / "compare.json").read_text())
    assert [row["planner"] for row in numbers["planners"]] == list(names)
    for row in numbers["planners"]:
        assert row["planner"] in shown
        assert f"{row['imbalance']:.4f}" in shown
        assert 1 <= row["imbalance"] <= row["imbalance_max"]
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.png", "timeline.png"]


@pytest.mark.slow
def test_compare_writes_table_figures_and_numbers(trace, tmp_path, capsys, monkeypatch):
    few = {name: PLANNERS[name] for name in ("static", "relibra")}
    monkeypatch.setattr("relibra_jax.cli.compare.PLANNERS", few)
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    written(tmp_path, few, capsys.readouterr().out)


@pytest.mark.slow
def test_compare_runs_every_planner(trace, tmp_path, capsys):
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    written(tmp_path, PLANNERS, capsys.readouterr().out)


@pytest.mark.slow
def test_ablation_runs_every_variant(trace, tmp_path, capsys):
    assert run_ablation([str(trace), *SMALL, "--dispatch", "hierarchical", "--out", str(tmp_path)]) == 0
    cost_model = CostModel(CLUSTERS["h100"], MODELS["gpt-oss-20b"], 4096.0, 1.0, hierarchical=False)
    written(tmp_path, ablation(cost_model), capsys.readouterr().out)


def test_plan_can_be_read_back(trace, tmp_path):
    out = tmp_path / "deep" / "plan.npz"
    assert main(["plan", str(trace), *SMALL, "--planner", "lplb", "--out", str(out)]) == 0
    plan, topology = load_plan(out)
    assert topology.num_experts == 16
    assert plan.quota.shape == (4, 2, 2, 2, topology.slots)


def test_inspect_counts(trace, capsys):
    assert main(["inspect", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "16, top-2" in shown
    assert "32" in shown


def test_without_a_trace_it_is_the_recorded_one(monkeypatch, capsys):
    monkeypatch.delenv("RELIBRA_TRACE", raising=False)
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out
    assert "recorded_trace.npz" in shown
    assert "16, top-2" in shown


def test_environment_names_a_trace(trace, monkeypatch, capsys):
    monkeypatch.setenv("RELIBRA_TRACE", str(trace))
    assert main(["inspect"]) == 0
    assert "small.npz" in capsys.readouterr().out


@pytest.mark.parametrize("package", EXTRA)
def test_missing_extra_is_one_line_and_status_2(package, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("relibra_jax.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["inspect"]) == 2
    expected = f'error: relibra needs {package}: pip install "relibra-jax[cli]"\n'
    assert capsys.readouterr().err == expected


def test_the_library_starts_without_its_command_line():
    names = (*EXTRA, "relibra_jax.cli")
    program = f"import relibra_jax, sys; sys.exit(bool(set(sys.modules) & set({names})))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_trace_with_inferred_experts_says_so(trace, tmp_path, capsys):
    with np.load(trace) as file:
        np.savez(tmp_path / "bare.npz", routed_experts=file["routed_experts"], lengths=file["lengths"])
    assert main(["inspect", str(tmp_path / "bare.npz")]) == 0
    assert "inferred" in capsys.readouterr().out
