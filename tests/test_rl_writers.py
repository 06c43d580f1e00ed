"""Writers by name, with stand-ins that have the signatures of the packages' documentation."""

import sys
import types

import numpy as np
import pytest
from support.watched import line_of

from experiments.rl.metrics import FAILURES, lists_of, scalars_of
from experiments.rl.metrics_log import MetricsLog, read_metrics
from experiments.rl.rewards import Rewards, measure_solved
from experiments.rl.writers import NAMED_WRITERS, find_writer, open_checked

SETTINGS = {"task": "copy", "clip": {"low": 0.2}, "seed": 1, "step": 4}


def tensorboard(calls):
    """A stand-in for tensorboardX (tensorboardx.readthedocs.io/en/latest/tensorboard.html)."""

    class SummaryWriter:
        def __init__(self, logdir=None, comment="", purge_step=None, max_queue=10, flush_secs=120):
            calls.append(("open", logdir, purge_step))

        def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
            calls.append((tag, scalar_value, global_step))

        def add_histogram(self, tag, values, global_step=None, bins="tensorflow", walltime=None):
            calls.append((tag, list(values), global_step))

        def close(self):
            calls.append("closed")

    return types.SimpleNamespace(SummaryWriter=SummaryWriter)


def wandb(calls):
    """A stand-in for wandb (docs.wandb.ai/models/ref/python/functions/init)."""

    class Run:
        def log(self, data, step=None, commit=None):
            calls.append((data, step))

        def finish(self, exit_code=None, quiet=None):
            calls.append("closed")

    def init(*, project, name, dir, config, allow_val_change, id, resume):
        assert resume == "allow"
        calls.append(("open", name, dir, config["task"], id))
        return Run()

    return types.SimpleNamespace(init=init, Histogram=lambda sequence: ("histogram", sequence))


def mlflow(calls):
    """A stand-in for mlflow (mlflow.org/docs/latest/api_reference/python_api/mlflow.html)."""

    def start_run(run_id=None, experiment_id=None, run_name=None, nested=False):
        calls.append(("open", run_name, run_id))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "abc"))

    return types.SimpleNamespace(
        set_experiment=lambda experiment_name: None,
        start_run=start_run,
        log_params=lambda params: calls.append(params),
        log_metrics=lambda metrics, step=None: calls.append((metrics, step)),
        end_run=lambda status="FINISHED": calls.append("closed"),
    )


MODULES = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


@pytest.fixture
def calls(request, monkeypatch):
    """Install the stand-in of a writer; return the list of the calls that it gets."""
    module, calls = NAMED_WRITERS[request.param].module, []
    stand_in = MODULES[request.param](calls)
    stand_in.__spec__ = object()
    monkeypatch.setitem(sys.modules, module, stand_in)
    return calls


def write(name, folder, line):
    writer = open_checked(find_writer(name), folder, SETTINGS)
    with MetricsLog(folder, 4, writer) as log:
        log.write(4, line)


LINE = line_of(4) | {
    "reward/mean": None,
    "mismatch/log_prob_by_position": [0.5, None, 0.25],
    FAILURES: ["why"],
}
LISTS = lists_of(LINE) | {"mismatch/log_prob_by_position": [0.5, 0.25]}


@pytest.mark.parametrize("calls", ["tensorboard"], indirect=True)
def test_tensorboard_gets_scalars_and_histograms(calls, tmp_path):
    write("tensorboard", tmp_path, LINE)
    assert calls[0] == ("open", str(tmp_path), 4), "events of repeated steps are dropped"
    assert calls[-1] == "closed"
    written = {name: value for name, value, step in calls[1:-1] if step == 4}
    assert written == scalars_of(LINE) | LISTS
    assert written["response/tokens_quantiles/0.5"] == LINE["response/tokens_quantiles"][1]
    assert "reward/mean" not in written
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert line["reward/mean"] is None


@pytest.mark.parametrize("calls", ["wandb"], indirect=True)
def test_wandb_continues_its_run_when_a_run_resumes(calls, tmp_path):
    folder = tmp_path / "run" / "seed-1"
    folder.mkdir(parents=True)
    for _ in range(2):
        write("wandb", folder, LINE)
    half = len(calls) // 2
    (_, name, directory, task, run_id), (numbers, step), (histograms, _), end = calls[:half]
    assert calls[half:] == calls[:half], "the same run"
    assert (name, directory, task, step, end) == ("run/seed-1", str(folder), "copy", 4, "closed")
    assert len(run_id) == 8
    assert numbers == scalars_of(LINE)
    assert histograms == {name: ("histogram", values) for name, values in LISTS.items()}


@pytest.mark.parametrize("calls", ["mlflow"], indirect=True)
def test_mlflow_gets_settings_once_and_every_number_of_a_list(calls, tmp_path):
    for _ in range(2):
        write("mlflow", tmp_path, LINE)
    name = f"{tmp_path.parent.name}/{tmp_path.name}"
    assert calls[:2] == [("open", name, None), {"task": "copy", "clip.low": 0.2, "seed": 1, "step": 4}]
    numbers, step = calls[2]
    assert step == 4
    assert numbers["balance/load_by_rank/7"] == LINE["balance/load_by_rank"][7]
    assert "mismatch/log_prob_by_position/1" not in numbers
    assert numbers.items() >= scalars_of(LINE).items()
    assert calls[3:] == ["closed", ("open", None, "abc"), (numbers, 4), "closed"]


@pytest.mark.parametrize("name", NAMED_WRITERS)
def test_find_writer_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    package = NAMED_WRITERS[name].package
    with pytest.raises(ValueError, match=f"writer '{name}' is not installed; .*: pip install {package}$"):
        find_writer(name)


@pytest.mark.parametrize("calls", ["mlflow"], indirect=True)
def test_errors_of_a_package_are_one_line(calls, monkeypatch, tmp_path):
    def fail(experiment_name):
        raise RuntimeError("no server")

    monkeypatch.setattr(sys.modules["mlflow"], "set_experiment", fail)
    with pytest.raises(ValueError, match=r"^writer 'mlflow' does not open: no server$"):
        open_checked(find_writer("mlflow"), tmp_path, SETTINGS)


def test_metrics_log_drops_samples_of_steps_that_are_repeated(tmp_path):
    text = {"prompt": "a", "response": "b", "reward": 1.0, "tokens": 2}
    for start, steps in ((0, (0, 1, 2)), (1, (1,))):
        with MetricsLog(tmp_path, start) as log:
            for step in steps:
                log.write(step, {"kind": "learn", "value": start})
                log.write_samples(step, [text])
    assert [line["step"] for line in read_metrics(tmp_path / "samples.jsonl")] == [0, 1]
    assert [line["value"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_measure_solved_equals_a_loop_over_prompts():
    rng = np.random.default_rng(0)
    reward, scored = rng.choice([0.0, 0.5, 1.0], 60).astype(np.float32), rng.random(60) < 0.7
    groups = [
        [r for r, s in zip(reward[i : i + 3], scored[i : i + 3], strict=True) if s] for i in range(0, 60, 3)
    ]
    groups = [group for group in groups if group]
    for correct in (0.5, 1.0):
        measured = measure_solved(Rewards(reward, scored, []), 3, correct)
        by_all, by_any = ([fold(group) >= correct for group in groups] for fold in (min, max))
        assert measured["reward/solved_by_all"] == pytest.approx(np.mean(by_all))
        assert measured["reward/solved_by_none"] == pytest.approx(1 - np.mean(by_any))
    assert measure_solved(Rewards(reward, np.zeros(60, bool), []), 3, 1.0)["reward/solved_by_all"] is None
