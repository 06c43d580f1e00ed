"""``python -m experiments.deploy``: the numbers that it prints and writes, and its errors for bad input."""

import itertools
import json

import numpy as np
import pytest

from experiments.deploy.__main__ import Deploy, main
from experiments.deploy.best_deployments import InFlight, over_micro_batches
from experiments.deploy.deployments import Deployment, Score, Search
from experiments.deploy.figure import draw_deployment
from experiments.program import run_program
from relibra_jax.cli.drawing import save_figure

FEW = ["--expert-groups", "4", "--replica-slots", "0", "1", "--attention-copies", "8", "16"]


def deploy(*args):
    return run_program(main, Deploy, list(map(str, args)))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The JSON report and the files of a small run on the recorded trace, and the boxes of the labels of its figure.

    The boxes are also those of a figure whose two lines cross.
    """
    out, boxes = tmp_path_factory.mktemp("deploy"), []

    def save(figure, path):
        figure.canvas.draw()
        boxes.append([text.get_window_extent() for axes in figure.axes for text in axes.texts])
        save_figure(figure, path)

    def draw(path, points, planned, title):
        crossing = [InFlight(m, *each) for m, each in enumerate([(6.0, 7.0), (17.5, 17.5), (18.5, 17.2)], 1)]
        draw_deployment(path, crossing, planned, title)
        draw_deployment(path, points, planned, title)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.deploy.figure.save_figure", save)
        patch.setattr("experiments.deploy.__main__.draw_deployment", draw)
        assert deploy(*FEW, "--slo", "0.04", "--out", out) == 0
    return json.loads((out / "deploy.json").read_text()), sorted(path.name for path in out.iterdir()), boxes


def test_labels_of_the_figure_do_not_overlap(deployed):
    *_, figures = deployed
    assert len(figures) == 2
    for boxes in figures:
        assert len(boxes) > 6
        assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


def test_deploy_writes_consistent_rows(deployed):
    report, files, _ = deployed
    assert files == ["deploy.json", "deploy.png"]
    even, contiguous, planned = report["rows"].values()
    assert list(report["rows"]) == ["even (assumed)", "contiguous", "planned"]
    assert planned["modelled_per_price"] >= contiguous["modelled_per_price"]
    assert even["modelled_per_price"] >= contiguous["modelled_per_price"]
    assert 1 <= planned["busiest_over_mean"] < contiguous["busiest_over_mean"]
    for row in (even, contiguous, planned):
        assert row["modelled_step"] <= 0.04
        assert 0 < row["feasible"] < row["tried"]
        assert row["batch"] == row["attention_copies"] * row["micro_batches"] * row["sequences"]
        devices = row["attention_copies"] * row["attention_devices"] + 4 * row["expert_devices"]
        assert row["modelled_per_price"] == pytest.approx(
            row["batch"] / row["modelled_step"] / devices, rel=1e-5
        )
        assert row["simulated_per_price"] == pytest.approx(
            row["batch"] / row["simulated_step"] / devices, rel=1e-5
        )
        assert 0 <= row["expert_idle"] <= row["group_idle"] < 1
        assert 0 <= row["attention_idle"] < 1


def test_deploy_gains_at_most_the_number_of_micro_batches(deployed):
    report, *_ = deployed
    points = report["micro_batches"]
    assert [point["micro_batches"] for point in points] == [1, 2, 3, 4]
    best = max(point["best"] for point in points)
    planned = report["rows"]["planned"]
    assert best == pytest.approx(planned["modelled_per_price"])
    assert points[planned["micro_batches"] - 1]["same"] == pytest.approx(best)
    for before, after in itertools.pairwise(points):
        assert 1 <= after["same"] / before["same"] <= after["micro_batches"] / before["micro_batches"]


def test_over_micro_batches_without_a_feasible_deployment():
    candidates = Deployment(
        *(np.array([1, 1, 1, 1]) for _ in range(4)), np.array([1, 1, 2, 2]), np.array([1, 2, 1, 2])
    )
    scores = Score(*(np.array([1.0, 2.0, 3.0, 4.0]) for _ in Score._fields))
    best = Deployment(1, 1, 1, 1, 1, 2)
    search = Search(candidates, scores, np.array([True, True, False, False]), best, scores)
    one, two = over_micro_batches(search)
    assert one == InFlight(1, 2.0, 2.0)
    assert two == InFlight(2, 4.0, None)


def test_deploy_marks_simulated_steps_beyond_the_slo(tmp_path, capsys):
    options = (
        "--expert-groups 16 --replica-slots 0 --attention-copies 32 --attention-cluster h200 --slo 0.0135"
    )
    assert deploy(*options.split(), "--out", tmp_path) == 0
    report = json.loads((tmp_path / "deploy.json").read_text())["rows"]
    lines = capsys.readouterr().out.splitlines()
    for name, row in report.items():
        assert row["modelled_step"] <= 0.0135
        assert row["simulated_within_slo"] == (row["simulated_step"] <= 0.0135)
        (line,) = (line for line in lines if line.startswith(f" {name}"))
        assert line.rstrip().endswith("!") == (not row["simulated_within_slo"])
    assert {row["simulated_within_slo"] for row in report.values()} == {False, True}


def test_deploy_reports_a_number_of_micro_batches_that_never_fits(tmp_path, capsys):
    sizes = "--model deepseek-v3 --tensor-parallel 8 --attention-copies 1 --sequences 25"
    limits = "--expert-groups 2 --replica-slots 0 --context 12000 --slo 2"
    assert deploy(*sizes.split(), *limits.split(), "--out", tmp_path) == 0
    assert "3 to 4 none fits" in capsys.readouterr().out
    report = json.loads((tmp_path / "deploy.json").read_text(), parse_constant=pytest.fail)
    assert report["micro_batches"][-1]["best"] is None


@pytest.mark.parametrize("setting", ["--slo 0", "--context nan", "--expert-price -1", "--sequences 0"])
def test_deploy_refuses_settings_before_it_plans_placements(setting, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.deploy.__main__.find_best_deployments", pytest.fail)
    assert deploy(*setting.split(), "--out", tmp_path) == 2


FEW_TEXT = " ".join(FEW)


@pytest.mark.parametrize(
    ("options", "says"),
    {
        "--attention-cluster h10": "error: attention_cluster='h10' must be one of h100, h200",
        "--expert-cluster h2000": "error: expert_cluster='h2000' must be one of h100, h200",
        "--expert-groups 2 0": "error: expert_groups=0 must be an integer of at least 1",
        "--model gpt-oss-21b": "did you mean gpt-oss-20b",
        "--expert-groups 3": "num_experts=16 must divide evenly over 3 groups of expert devices",
        f"{FEW_TEXT} --replica-slots 17": "replica_slots=17 must be an integer of at least 0 and at most 16",
        "--replica-slots": "replica_slots must name at least one number of slots",
        "--expert-groups 1 --replica-slots 1": (
            "replica_slots=(1,) with expert_groups=(1,) leaves no placement to try"
        ),
        f"{FEW_TEXT} --slo 0": "slo=0.0 must be positive and finite",
        f"{FEW_TEXT} --micro-batches 0": "micro_batches=0 must be an integer of at least 1",
        f"{FEW_TEXT} --memory-share 1.1": "memory_share=1.1 must be above 0 and at most 1",
        "--tensor-parallel 16 --attention-cluster gb200-nvl72": (
            "tensor_parallel=16 must be at most the 8 devices of a node"
        ),
        "--tensor-parallel 72 --attention-cluster gb200-nvl72 --expert-cluster gb200-nvl72": (
            "tensor_parallel=72 must divide the model's heads 64"
        ),
        "--model qwen3-30b-a3b --tensor-parallel 3": "tensor_parallel=3 must divide the model's heads 32",
        "--seed -1": "seed=-1 must be an integer of at least 0",
        "--expert-groups 4 --replica-slots 0 --slo 1e-4": "the fastest that fits the memory takes",
        "--expert-groups 1 --replica-slots 0 --model deepseek-v3 --tensor-parallel 1": (
            "an expert device needs at least 81.74 GB but may use 72.00 GB, 9.74 GB too few"
        ),
    }.items(),
)
def test_deploy_reports_bad_input_in_one_line(options, says, tmp_path, capsys):
    assert deploy(*options.split(), "--out", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_deploy_shuffles_a_sorted_trace_into_halves_that_are_alike(tmp_path):
    path = tmp_path / "sorted.npz"
    # 64 samples of a token each, sorted by its expert.
    ids = np.repeat(np.arange(4, dtype=np.uint8), 16)[:, None, None]
    np.savez(path, num_experts=np.int32(4), routed_experts=ids, lengths=np.ones(64, int))
    busiest = {}
    for order in ("given", "shuffled"):
        options = f"--order {order} --expert-groups 2 --replica-slots 1"
        assert deploy(path, *options.split(), "--out", tmp_path / order) == 0
        report = json.loads((tmp_path / order / "deploy.json").read_text())
        busiest[order] = report["rows"]["contiguous"]["simulated_busiest_over_mean"]
        assert report["setting"].count("in shuffled order") == (order == "shuffled")
    assert busiest["shuffled"] < busiest["given"] == 2.0


def test_deploy_refuses_a_trace_of_one_sample(tmp_path, capsys):
    path = tmp_path / "one.npz"
    ids = np.zeros((3, 1, 1), np.uint8)
    np.savez(path, num_experts=np.int32(4), routed_experts=ids, lengths=np.array([3]))
    assert deploy(path, "--out", tmp_path / "out") == 2
    assert "one.npz has no tokens in one half of its 1 samples" in capsys.readouterr().err
