"""The command line as a person uses it: what it writes, and what bad input gets."""

import json

import numpy as np
import pytest

from experiments.run import main
from experiments.traces import synthetic_trace
from relibra_jax.plan_files import load_plan
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.replay import save_replay
from relibra_jax.types import RoutingReplay


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    made = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    save_replay(path, made.replay, num_experts=made.num_experts)
    return path


SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--replica-slots", "1", "--micro-batch-size", "4"]


def test_compare_writes_table_figure_and_numbers(trace, tmp_path, capsys):
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    numbers = json.loads((tmp_path / "compare.json").read_text())
    assert [row["planner"] for row in numbers["planners"]] == list(PLANNERS)
    for row in numbers["planners"]:
        assert row["planner"] in shown
        assert f"{row['imbalance']:.4f}" in shown
        assert 1 <= row["imbalance"] <= row["imbalance_max"]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.json", "compare.png", "timeline.png"]


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
    assert "rl_demo.npz" in shown
    assert "16, top-2" in shown


def test_environment_names_a_trace(trace, monkeypatch, capsys):
    monkeypatch.setenv("RELIBRA_TRACE", str(trace))
    assert main(["inspect"]) == 0
    assert "small.npz" in capsys.readouterr().out


def test_synthetic_trace_is_uneven_and_shifts():
    trace = synthetic_trace()
    ids, mask = trace.replay
    assert (np.sort(ids[mask], axis=-1)[..., 1:] != np.sort(ids[mask], axis=-1)[..., :-1]).all(), (
        "k different experts"
    )
    hottest = set()
    for start in range(0, 256, 32):
        part = ids[start : start + 32][mask[start : start + 32]]
        count = np.bincount(part[:, 0].ravel(), minlength=trace.num_experts)
        assert count.max() > 1.5 * count.mean()
        hottest.add(int(count.argmax()))
    assert len(hottest) > 2, "the hottest expert moves"


def corrupt(trace, tmp_path, **changes):
    with np.load(trace) as file:
        arrays = {**file, **changes}
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "no such trace"),
        ("truncated", "bad.npz"),
        ("not an archive", "bad.npz"),
        ("axis order", "bad.npz"),
        ("out of range", "expert id 200"),
        ("repeated", "twice"),
        ("lengths", "bad.npz"),
    ],
)
def test_bad_trace_is_one_line_and_status_2(trace, tmp_path, capsys, fault, message):
    with np.load(trace) as file:
        rows, lengths = file["routed_experts"], file["lengths"]
    path = tmp_path / "bad.npz"
    if fault == "truncated":
        path.write_bytes(trace.read_bytes()[:1000])
    elif fault == "not an archive":
        path.write_text("routing")
    elif fault == "axis order":
        corrupt(trace, tmp_path, routed_experts=rows.transpose(1, 0, 2))
    elif fault == "out of range":
        corrupt(
            trace,
            tmp_path,
            routed_experts=np.where(np.arange(rows.size).reshape(rows.shape) == 77, 200, rows),
        )
    elif fault == "repeated":
        again = rows.copy()
        again[5, 1, 1] = again[5, 1, 0]
        corrupt(trace, tmp_path, routed_experts=again)
    elif fault == "lengths":
        corrupt(trace, tmp_path, lengths=lengths + 1)
    out = tmp_path / "out"
    assert main(["compare", str(path), *SMALL, "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["compare", "--nodes", "3"], "num_experts=16 must divide evenly over 6 ranks (3 nodes x 2)"),
        (["compare", "--replica-slots", "-1"], "replica_slots=-1 must be an integer of at least 0"),
        (["compare", "--micro-batch-size", "5", "--batch-size", "16"], "batch_size=16 must be a multiple of"),
        (["compare", "--batch-size", "64"], "batch_size=64 exceeds the 32 samples"),
        (["compare", "--micro-batch-size", "0"], "micro_batch_size=0"),
        (["plan", "--planner", "elpb"], "planner 'elpb' must be one of static,"),
    ],
)
def test_bad_setting_is_one_line_and_status_2(trace, capsys, tmp_path, args, message):
    command, *rest = args
    assert main([command, str(trace), *SMALL, *rest, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_unknown_option_is_status_2():
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--planners", "all"])
    assert stop.value.code == 2


def test_trace_with_inferred_experts_says_so(trace, tmp_path, capsys):
    with np.load(trace) as file:
        np.savez(tmp_path / "bare.npz", routed_experts=file["routed_experts"], lengths=file["lengths"])
    assert main(["inspect", str(tmp_path / "bare.npz")]) == 0
    assert "inferred" in capsys.readouterr().out


def test_padding_of_the_replay_does_not_matter(trace, tmp_path):
    made = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    ids = np.where(made.replay.mask[..., None, None], made.replay.expert_ids, 9)
    save_replay(tmp_path / "padded.npz", RoutingReplay(ids, made.replay.mask), num_experts=16)
    assert (tmp_path / "padded.npz").read_bytes()
    with np.load(trace) as one, np.load(tmp_path / "padded.npz") as two:
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
