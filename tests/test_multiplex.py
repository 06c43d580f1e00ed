"""``python -m experiments.multiplex``: jobs from files and runs, what it prints and writes, and one-line errors."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from support.runs import SMALL

from experiments.multiplex.__main__ import Multiplex, main
from experiments.multiplex.comparison import ALONE, COLOCATED, GROUPS, OPTIMUM, SORTED
from experiments.multiplex.job_sources import read_jobs
from experiments.multiplex.park import Park, move_arrays
from experiments.multiplex.park import main as park
from experiments.multiplex.parking import read_parking
from experiments.multiplex.run_metrics import (
    ROLLOUT_TIMES,
    TRAINING_TIMES,
    job_of_durations,
    read_durations,
)
from experiments.program import run_program
from experiments.rl.metrics import EVALUATE, LEARN, WARM_UP, names_of

ROOT = Path(__file__).parents[1]
TIMES = (*ROLLOUT_TIMES, *TRAINING_TIMES)
JOB = {"name": "a", "rollout_seconds": 60, "training_seconds": 40, "rollout_nodes": 1, "training_nodes": 1}


def learn_line(rollout, training):
    """Return a metrics line of a learning step, whose training time is divided evenly over its six metrics."""
    line = {"kind": LEARN, "step": 0} | dict.fromkeys(names_of(LEARN), 99.0)
    line |= dict.fromkeys(ROLLOUT_TIMES, rollout) | dict.fromkeys(TRAINING_TIMES, training / 6)
    return json.dumps(line)


def make_run(folder, *seeds):
    for seed, lines in enumerate(seeds):
        (folder / f"seed-{seed}").mkdir(parents=True)
        (folder / f"seed-{seed}" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path):
    """Make the folder of a run with two seeds, whose first steps are slow because they compile."""
    slow = learn_line(60.0, 90.0)
    steps = [learn_line(2.0 + number / 100, 6.0) for number in range(20)]
    other = [json.dumps({"kind": WARM_UP, "time/update_seconds": 500.0}), json.dumps({"kind": EVALUATE})]
    return make_run(tmp_path / "run", [*other, slow, *steps], [slow, *steps])


def test_run_metrics_are_those_of_a_learning_step():
    assert set(TIMES) <= names_of(LEARN)


def test_job_of_durations_has_the_quantiles_of_a_run(run):
    sizes = {"rollout_nodes": 2, "training_nodes": 3}
    durations = read_durations(run)
    job = job_of_durations(str(run), durations, quantile=0.95, slo=1.5, **sizes)
    assert (job.name, job.rollout_nodes, job.training_nodes, job.slo) == (str(run), 2, 3, 1.5)
    # 42 steps, of which two compile: the 40th longest is the conservative one.
    assert (job.rollout_seconds, job.training_seconds) == (pytest.approx(2.19), pytest.approx(6.0))
    longest = job_of_durations(str(run), durations, quantile=1.0, **sizes)
    assert (longest.rollout_seconds, longest.training_seconds) == (60.0, pytest.approx(90.0))


def test_multiplex_refuses_steps_too_few_for_the_quantile(tmp_path, out, refused, capsys):
    slow, steps = learn_line(60.0, 90.0), [learn_line(2.0, 6.0 + number) for number in range(5)]
    run = make_run(tmp_path / "run", [slow, *steps])
    # The 95% quantile of six steps would be the one that compiles.
    assert "quantile=0.95 needs at least 20 learning steps, but there are 6; use a smaller" in refused(run)
    two = make_run(tmp_path / "two", [slow, *steps], [slow, *steps])
    assert "quantile=0.9 needs at least 20 learning steps, but there are 12 of 2 seeds;" in refused(
        two, "--quantile", 0.9
    )
    run_command([run, "--quantile", 0.8], out)
    assert (
        "6 learning steps; rollout: median 2 s, conservative 2 s; training: median 8.5 s, conservative 10 s"
        in capsys.readouterr().out
    )


def test_read_durations_leaves_out_an_incomplete_last_line(run):
    before = len(read_durations(run).rollout)
    with (run / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "lea')
    assert len(read_durations(run).rollout) == before == 42


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def multiplex(*args):
    return run_program(main, Multiplex, list(map(str, args)))


def run_command(args, out):
    assert multiplex(*args, "--steps", 5, "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["multiplex.json", "multiplex.png"]
    return json.loads((out / "multiplex.json").read_text())


def test_multiplex_compares_drawn_sets(out, capsys):
    numbers = run_command(["--drawn", 4, "--seeds", 3], out)
    shown = capsys.readouterr().out
    assert "4 drawn jobs, 3 sets" in shown
    assert "12 of 12 jobs within their objectives" in shown
    ways = numbers["ways"]
    assert list(ways) == [GROUPS, SORTED, ALONE, COLOCATED, OPTIMUM]
    assert ways[ALONE]["over_alone"] == ways[COLOCATED]["over_colocated"] == 1
    assert ways[OPTIMUM]["gap_worst"] == 0 <= ways[GROUPS]["gap"] == pytest.approx(sum(numbers["gaps"]) / 3)
    assert ways[OPTIMUM]["price"] <= ways[GROUPS]["price"] <= ways[ALONE]["price"]
    assert ways[GROUPS]["over_alone"] > 1
    assert len(numbers["sets"]) == 3


def test_multiplex_leaves_out_the_optimum_of_more_jobs_than_it_supports(out, capsys):
    numbers = run_command(["--drawn", 7], out)
    assert OPTIMUM not in numbers["ways"]
    assert numbers["gaps"] is None
    assert "optimum" not in capsys.readouterr().out


def test_multiplex_takes_files_and_runs_in_their_order(run, tmp_path, out, capsys):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([JOB | {"slo": 2.0, "tail_share": 0.5}, JOB | {"name": "b"}]))
    numbers = run_command([path, run, "--slo", 3, "--training-nodes", 2], out)
    assert "drawn jobs" not in capsys.readouterr().out
    (groups,) = numbers["sets"]
    listed = sorted((job for group in groups for job in group["jobs"]), key=lambda job: job["name"])
    assert [job["name"] for job in listed] == sorted(["a", "b", str(run)])
    own = next(job for job in listed if job["name"] == str(run))
    assert (own["slo"], own["training_nodes"]) == (3.0, 2)
    saved = tmp_path / "again.json"
    saved.write_text(json.dumps(listed))
    assert [job.name for job in read_jobs(saved)] == [job["name"] for job in listed]


MOVES = {"bytes": 8 * 10**9, "out_seconds": 2.0, "back_seconds": 1.5}
PARKING = {"weights": MOVES | {"back_seconds": 0.25}, "state": MOVES, "device": "cpu", "devices": 1}


def test_multiplex_adds_the_measured_moves_of_a_run_to_its_phases_and_to_host_memory(run, out, capsys):
    (run / "parking.json").write_text(json.dumps(PARKING))
    numbers = run_command([run, "--training-nodes", 3, "--rollout-bytes", 7], out)
    (group,) = numbers["sets"][0]
    (job,) = group["jobs"]
    assert (job["rollout_seconds"], job["training_seconds"]) == (
        pytest.approx(2.19 + 0.25),
        pytest.approx(6.0 + 3.5),
    )
    assert (job["rollout_bytes"], job["training_bytes"]) == (7, -(-8 * 10**9 // 3))
    assert "weights in 0.25 s (8e+03 MB), state in 1.5 s and out 2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [{}, [], PARKING | {"state": 1}, PARKING | {"weights": MOVES | {"out_seconds": -1}}]
)
def test_multiplex_reports_a_file_of_moves_that_it_cannot_read(run, refused, wrong):
    (run / "parking.json").write_text(json.dumps(wrong))
    assert "parking.json has no measured moves; write it with python -m" in refused(run)


@pytest.mark.usefixtures("smallest_policy")
def test_park_measures_the_whole_state_of_a_run(run):
    (run / "config.json").write_text(json.dumps(SMALL | {"seeds": [0]}))
    assert run_program(park, Park, [str(run), "--repeats", "2"]) == 0
    parking = read_parking(run)
    # float32 weights, and two moments of each.
    assert parking.state.bytes == 3 * parking.weights.bytes > 0
    assert min(*parking.weights[1:], *parking.state[1:]) > 0
    assert (parking.device, parking.devices) == ("cpu", 8)


def test_move_arrays_returns_the_same_arrays_where_they_were():
    arrays = [jax.device_put(np.arange(6.0, dtype=np.float32), device) for device in jax.devices()[:2]]
    moved, move = move_arrays(arrays, repeats=2)
    assert move.bytes == 48
    assert all(array.is_deleted() for array in arrays)
    for array, device in zip(moved, jax.devices(), strict=False):
        assert (array.devices(), array.sharding.memory_kind) == ({device}, "device")
        np.testing.assert_array_equal(array, np.arange(6.0))


def test_multiplex_prints_names_of_any_characters(tmp_path, out, capsys):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([JOB | {"name": "[red]"}, JOB | {"name": "$\\frac$", "slo": 2.0}]))
    run_command([path], out)
    shown = capsys.readouterr().out
    assert "[red]" in shown
    assert "$\\frac$" in shown


BAD_JOBS = {
    "[": "is not a JSON file (",
    "{}": "must contain a JSON list of jobs, each a JSON object",
    "[]": "jobs must have at least one job",
    json.dumps([JOB, JOB | {"name": "b", "slo": 0.5}]): "job 1: job b: slo=0.5 must be at least 1",
    json.dumps([JOB | {"sloo": 2}]): "job 0: unknown field 'sloo'; did you mean slo?",
    json.dumps([{"name": "a"}]): "job 0: required field 'rollout_seconds' is missing",
    json.dumps([JOB | {"slo": "2"}]): "job 0: slo='2' must be of type float",
    json.dumps([JOB | {"rollout_nodes": 1.5}]): "job 0: rollout_nodes=1.5 must be of type int",
    json.dumps([JOB | {"slo": True}]): "job 0: slo=True must be of type float",
    json.dumps([JOB | {"name": 1}]): "job 0: name=1 must be of type str",
    json.dumps(
        [JOB | {"rollout_nodes": 99}]
    ): "job a: rollout_nodes=99 exceeds the 16 nodes that a group may use",
    json.dumps(
        [JOB | {"training_bytes": 2 * 10**12}]
    ): "job a: training_bytes=2000000000000 exceeds the 10000",
}


@pytest.fixture
def refused(tmp_path, capsys):
    def run_it(*args):
        assert multiplex(*args, "--out", tmp_path / "out") == 2
        assert not (tmp_path / "out").exists()
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        return line

    return run_it


@pytest.mark.parametrize("text", BAD_JOBS)
def test_multiplex_reports_bad_job_files(refused, tmp_path, text):
    path = tmp_path / "jobs.json"
    path.write_text(text)
    assert BAD_JOBS[text] in refused(path)


def test_multiplex_refuses_numbers_of_nodes_that_no_job_has(refused):
    assert "rollout_nodes=-1 must be an integer of at least 1" in refused("--rollout-nodes", -1)
    assert "training_nodes=0 must be an integer of at least 1" in refused("--training-nodes", 0)


BAD_LINES = {
    "no learning step": (json.dumps({"kind": WARM_UP}), "none of the 1 lines in 1 files has kind 'learn'"),
    "no metrics": ("step 1", "line 1 is not a line of metrics"),
    "no kind": ("{}", "line 1 is not a line of metrics"),
    "missing metric": (
        json.dumps({"kind": LEARN}),
        "line 1: time/generate_seconds=None must be a number of seconds",
    ),
    "too long": (
        learn_line(1e308, 1.0),
        "line 1: time/generate_seconds=1e+308 must be a number of seconds from 0 to",
    ),
    "not a number": (
        learn_line(float("nan"), 1.0),
        "line 1: time/generate_seconds=nan must be a number of seconds",
    ),
}


def test_multiplex_reports_metrics_that_are_not_text(refused, tmp_path, run):
    broken = run / "seed-1" / "metrics.jsonl"
    whole = broken.read_bytes()
    broken.write_bytes(whole + b"\xe4")
    assert len(read_durations(run).rollout) == 42, "an incomplete character at the end of a file is ignored"
    broken.write_bytes(b"\xff" + whole)
    assert f"{broken} is not UTF-8 text (" in refused(run)


@pytest.mark.parametrize("inside", ["", "folder", "a/b"])
def test_multiplex_reports_a_file_where_its_folder_should_be(tmp_path, capsys, monkeypatch, inside):
    monkeypatch.setattr("experiments.multiplex.__main__.compare_ways", None)
    (tmp_path / "file").write_text("mine")
    assert multiplex("--out", tmp_path / "file" / inside) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{tmp_path / 'file'} is a file, not a folder")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("fault", BAD_LINES)
def test_multiplex_reports_bad_lines_of_metrics(refused, tmp_path, fault):
    line, message = BAD_LINES[fault]
    assert message in refused(make_run(tmp_path / "run", [line]))


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "--drawn 0": "drawn=0 must be an integer of at least 1 and at most 256",
        "--seeds 0": "seeds=0 must be an integer of at least 1 and at most 1000",
        "--spread 2": "spread=2.0 must be at least 0 and at most 1",
        "--steps 0": "steps=0 must be an integer of at least 1 and at most 10000",
        "--rollout-price -1": "rollout_price=-1.0 must be positive: at least 1e-09 and at most 1e+09",
        "--host-gigabytes 0": "host_gigabytes=0 must be an integer of at least 1",
        "--max-nodes 1": "exceeds the 1 nodes that a group may use",
        "--rollout-price 1e308": "rollout_price=1e+308 must be positive: at least",
        "--rollout-speed 0": "rollout_speed=0.0 must be positive: at least",
        "--rollout-speed 1e-308": "rollout_speed=1e-308 must be positive: at least",
        "missing.json": "missing.json does not exist; give a file of jobs or the folder of a run",
        "missing.json --drawn 3": "drawn and seeds are for jobs drawn at random, but 1 paths are given",
    }.items(),
)
def test_multiplex_reports_options_that_do_not_fit(refused, options, message):
    assert message in refused(*options.split())


def test_multiplex_reports_a_folder_without_a_run(refused, tmp_path, run):
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").endswith("has no files seed-*/metrics.jsonl")
    assert "quantile=0.0 must be above 0 and at most 1" in refused(run, "--quantile", "0")
