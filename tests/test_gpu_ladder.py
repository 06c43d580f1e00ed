"""Tests of the ladder: results of steps are never lost, and steps that have passed are not repeated."""

import json
import os
from pathlib import Path

import pytest

from experiments.gpu_day.__main__ import main
from experiments.gpu_day.report import report
from experiments.gpu_day.steps import SPEEDS, day_steps, smoke_steps
from experiments.ladder.record import Record, read_record
from experiments.ladder.steps import Step, run_ladder

STEPS = "support.ladder_steps:"
COUNT, FAIL = Step("count", STEPS + "count_up", (2,)), Step("fail", STEPS + "fail")
HANG, LEAVE = Step("hang", STEPS + "hang", seconds=1), Step("leave", STEPS + "leave_a_process")


@pytest.fixture(autouse=True)
def path_of_steps(monkeypatch):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


def states(record):
    return [(line["step"], line["state"]) for line in read_record(record.path) if "state" in line]


def test_run_ladder_keeps_results_of_steps_however_they_end(tmp_path):
    record = Record(tmp_path / "results" / "day.jsonl")
    outcomes = run_ladder((COUNT, HANG, FAIL), record, seconds=300.0)
    assert outcomes == {"count": "passed", "hang": "hung", "fail": "failed"}
    lines = read_record(record.path)
    facts = [line for line in lines if "state" not in line]
    assert [line.get("number", line.get("before")) for line in facts] == [0, 1, "the hang", "the end"]
    assert {(line["rehearsal"], line["source"]) for line in lines} == {(False, record.source)}
    failed = next(line for line in lines if (line["step"], line.get("state")) == ("fail", "failed"))
    assert failed["code"] == 1
    assert failed["tail"].endswith("ValueError: the rows are wrong\n")


def test_run_ladder_repeats_no_passed_step_while_the_code_is_the_same(tmp_path, monkeypatch):
    path = tmp_path / "day.jsonl"
    assert run_ladder((COUNT, FAIL), Record(path), seconds=300.0) == {"count": "passed", "fail": "failed"}
    again = run_ladder((COUNT, FAIL), Record(path), seconds=300.0)
    assert again == {"count": "passed before", "fail": "failed"}
    assert run_ladder((COUNT,), Record(path, rehearsal=True), seconds=300.0) == {"count": "passed"}
    monkeypatch.setattr("experiments.ladder.record.source_digest", lambda folders: "another")
    assert run_ladder((COUNT,), Record(path), seconds=300.0) == {"count": "passed"}
    assert states(Record(path)) == [
        *[("count", "passed"), ("fail", "failed")],
        *[("fail", "failed"), ("count", "passed"), ("count", "passed")],
    ]


def test_run_ladder_skips_a_step_without_its_needs_or_enough_time(tmp_path):
    needy, slow = (
        COUNT._replace(name="needy", needs=("fail", "count")),
        COUNT._replace(name="slow", seconds=400),
    )
    outcomes = run_ladder((COUNT, FAIL, needy, slow), Record(tmp_path / "day.jsonl"), seconds=300.0)
    assert outcomes["needy"] == "skipped: fail must pass first"
    assert outcomes["slow"].startswith("skipped: its limit is 400 s, but only ")


def test_run_ladder_runs_several_steps_at_the_same_time(tmp_path):
    record = Record(tmp_path / "day.jsonl")
    steps = [COUNT._replace(name=f"count {number}") for number in range(4)]
    outcomes = run_ladder([*steps, FAIL], record, seconds=300.0, workers=3)
    assert outcomes == {**{step.name: "passed" for step in steps}, "fail": "failed"}
    assert sum("number" in line for line in read_record(record.path)) == 8
    needy = COUNT._replace(name="needy", needs=("fail", "count 0"))
    outcomes = run_ladder([FAIL, needy], record, seconds=300.0, workers=2)
    assert outcomes == {"fail": "failed", "needy": "skipped: fail must pass first"}


def test_run_ladder_leaves_no_process_of_a_step_behind(tmp_path):
    record = Record(tmp_path / "day.jsonl")
    assert run_ladder((LEAVE,), record, seconds=300.0) == {"leave": "passed"}
    child = read_record(record.path)[0]["child"]
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split(")")[1].split()[0] == "Z"


def test_record_loses_an_incomplete_line_alone(tmp_path):
    record = Record(tmp_path / "day.jsonl")
    record.add(step="count", state="passed", source=record.source)
    with record.path.open("a") as file:
        file.write('{"step": "fail", "sta')
    assert Record(record.path).passed() == {"count"}
    record.add(step="fail", state="passed", source=record.source)
    assert Record(record.path).passed() == {"count", "fail"}
    record.add(step="fail", state="hung", source=record.source)
    assert Record(record.path).passed() == {"count"}


def test_day_steps_each_fit_ten_minutes_and_speeds_wait_for_checks():
    commands = day_steps("folder", None)
    assert list(commands) == ["right", "speed", "why"]
    checks = {step.name for step in commands["right"]} - {"environment", "JAX's example", "self-check"}
    for command in ("speed", "why"):
        plan, *rest = commands[command]
        assert plan.on_cpu
        # Steps without the kernels of experts.
        others = ("attention", "ragged exchange", "branches", "host copies", "planning")
        own = [step for step in rest if not step.name.startswith(others)]
        assert all(set(step.needs) == checks for step in own)
    assert all(step.seconds <= 9.5 * 60 for steps in commands.values() for step in steps)


def test_report_shows_attention_as_far_as_it_was_measured():
    forward = {
        "rehearsal": False,
        "step": "attention, 8192 tokens",
        "attention": "triton",
        "part": "forward",
        "samples": 4,
        "milliseconds": 0.5,
        "teraflops": 100.0,
    }
    gradients = forward | {"part": "with gradients", "milliseconds": 2.5, "teraflops": 140.4}
    assert "| 8,192 | 4 | triton | 0.50 |  |  |" in report([forward])
    assert "| 8,192 | 4 | triton | 0.50 | 2.50 | 140 |" in report([forward, gradients])


def test_report_has_blank_cells_where_nothing_was_measured(tmp_path, capsys):
    record = tmp_path / "day.jsonl"
    assert main(["report", "--record", str(record)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("Nothing has been measured: no step has run on a GPU.")
    for model, rows in SPEEDS:
        assert f"| {model} | {rows:,} |  |  |  |  |  |\n" in output


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_page_of_gpu_results_has_the_tables_of_the_kept_records(gpu):
    folder = Path(__file__).parents[1] / "experiments/results/kernels"
    assert report(read_record(folder / f"{gpu}.jsonl")) in (folder / "gpu.md").read_text()


def test_report_shows_the_last_run_of_a_step_and_no_rehearsal():
    model, rows = SPEEDS[0]
    step = f"speed of {model}, {rows} rows"

    def lines(teraflops, **options):
        fact = {
            "operation": "forward",
            "by": "ours",
            "plan": "relibra",
            "of_roofline": 0.5,
            "teraflops": teraflops,
        }
        end = {"state": "passed", "seconds": 60.0}
        return [{"step": step, "rehearsal": False, **line, **options} for line in (fact, end)]

    text = report([*lines(100.4), *lines(300.4), *lines(900.0, rehearsal=True)])
    assert f"| {model} | {rows:,} | 300, 50% |  |  |  |  |\n" in text
    assert f"| {step} | passed | 60.0 |\n" in text
    stragglers = {"step": "stragglers", "rehearsal": False, "planner": "relibra", "slowest_ms": 2.0}
    text = report([stragglers | {"imbalance_of_time": 1.25, "imbalance_of_rows": 1.125}])
    assert "| ms |  |  | 2.00 |  |\n" in text


def test_smoke_steps_fit_the_devices():
    def layers(devices, rehearsal=False):
        steps = smoke_steps(devices, rehearsal=rehearsal)
        return [step.arguments for step in steps if step.name.startswith("layer")]

    assert layers(1) == [(1, "padded")]
    assert layers(2, rehearsal=True) == [(1, "padded"), (2, "padded")]
    ways = ("fitted", "padded", "ragged", "remote")
    assert layers(8) == [(1, "padded"), *((count, how) for count in (2, 8) for how in ways)]


def test_gpu_day_rejects_invalid_arguments(capsys):
    for arguments in (["fast"], [], ["right", "--minutes", "soon"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "error: " in capsys.readouterr().err


def test_record_is_json_lines(tmp_path):
    record = Record(tmp_path / "day.jsonl", rehearsal=True)
    record.add(step="count", number=1)
    assert [json.loads(line) for line in record.path.read_text().splitlines()] == [
        {"rehearsal": True, "step": "count", "number": 1}
    ]
