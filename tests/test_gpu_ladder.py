"""Tests of the ladder: results of steps are never lost, and steps that have passed are not repeated."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from experiments.gpu_day.__main__ import main, resume
from experiments.gpu_day.hang import dump, sanitize, steps_after_hang
from experiments.gpu_day.report import report
from experiments.gpu_day.steps import EXAMPLE, SPEEDS, day_steps, hopper_checks, smoke_steps
from experiments.ladder import steps as ladder_steps
from experiments.ladder.facts import facts_of
from experiments.ladder.record import Record, read_record
from experiments.ladder.steps import Step, run_ladder

STEPS = "support.ladder_steps:"
COUNT, FAIL = Step("count", STEPS + "count_up", (2,)), Step("fail", STEPS + "fail")
HANG, LEAVE = Step("hang", STEPS + "hang", seconds=1), Step("leave", STEPS + "leave_a_process")
KILLED = Step("killed", STEPS + "kill_itself")


@pytest.fixture(autouse=True)
def path_of_steps(monkeypatch):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


def states(record):
    return [(line["step"], line["state"]) for line in read_record(record.path) if "state" in line]


def test_run_ladder_keeps_results_of_steps_however_they_end(tmp_path):
    record = Record(tmp_path / "results" / "day.jsonl")
    outcomes = run_ladder((COUNT, HANG, FAIL, KILLED), record, seconds=300.0)
    assert outcomes == {"count": "passed", "hang": "hung", "fail": "failed", "killed": "failed"}
    lines = read_record(record.path)
    facts = [line for line in lines if "state" not in line]
    assert [line.get("number", line.get("before")) for line in facts] == [
        *(0, 1, "the hang", "the end", "the kill")
    ]
    assert {(line["rehearsal"], line["source"]) for line in lines} == {(False, record.source)}
    failed = next(line for line in lines if (line["step"], line.get("state")) == ("fail", "failed"))
    assert failed["code"] == 1
    assert failed["tail"].endswith("ValueError: the rows are wrong\n")
    assert lines[-1]["code"] == -signal.SIGKILL


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
    assert has_ended(read_record(record.path)[0]["child"])


def has_ended(process):
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().split(")")[1].split()[0] == "Z"


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_run_ladder_waits_for_no_process_that_sigkill_does_not_end(tmp_path, monkeypatch):
    """One process holds the output of its step open, and another one ends only when the ladder closes its input."""
    monkeypatch.setattr(ladder_steps, "END_SECONDS", 0.3)
    record = Record(tmp_path / "day.jsonl")
    daemon = Step("daemon", STEPS + "leave_a_daemon")
    assert run_ladder((daemon,), record, seconds=300.0) == {"daemon": "passed"}
    os.kill(read_record(record.path)[0]["child"], signal.SIGKILL)
    monkeypatch.setattr(ladder_steps, "_kill_group", lambda group: None)
    assert run_ladder((HANG,), record, seconds=300.0) == {"hang": "hung"}
    *_, facts, end = read_record(record.path)
    assert (end["state"], end["code"]) == ("hung", None)
    wait_until(lambda: has_ended(facts["process"]))


def test_run_ladder_diagnoses_the_first_hang(tmp_path):
    """Later steps have 30 s at most, so that one of 400 s still fits into the time that remains."""
    record = Record(tmp_path / "day.jsonl")

    def diagnose(step):
        return step._replace(name="again"), COUNT._replace(name="example", seconds=30)

    slow = COUNT._replace(seconds=400)
    outcomes = run_ladder((HANG, slow), record, seconds=100.0, diagnose=diagnose)
    assert outcomes == {"hang": "hung", "count": "passed"}
    assert states(record) == [
        *[("hang", "hung"), ("again", "hung"), ("example", "passed"), ("count", "passed")],
    ]


def test_steps_after_hang_try_again_and_look_closer(tmp_path, capsys):
    step = hopper_checks()[0]
    names = [each.name for each in steps_after_hang(step, EXAMPLE, "folder")]
    assert names == [
        *("forward, 64 rows, try 2", "forward, 64 rows, try 3", "JAX's example, again"),
        *("forward, 64 rows, compute-sanitizer", "forward, 64 rows, dump"),
    ]
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "========= $2: barrier error"; shift 2; exec "$@"')
    fake.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        sanitize(STEPS + "count_up", [1])
        patch.setenv("PATH", "/nowhere")
        sanitize(STEPS + "count_up", [1])
    dump(STEPS + "hang", [], str(tmp_path), 1)
    memory, barriers, missing, dumped = (facts_of(line) for line in capsys.readouterr().out.splitlines())
    assert memory == {
        "tool": "memcheck",
        "end": 0,
        "lines": 1,
        "report": ["========= memcheck: barrier error"],
    }
    assert barriers["tool"] == "synccheck"
    assert missing == {"cannot_run": "compute-sanitizer is not on the PATH"}
    assert dumped == {"file": str(tmp_path / "dump.tar.gz"), "end": None, "files": 1, "kinds": [".ptx"]}
    with tarfile.open(tmp_path / "dump.tar.gz") as archive:
        assert archive.getnames() == ["kernel.ptx"]


LADDER = """
import sys
from pathlib import Path
from experiments.ladder.record import Record
from experiments.ladder.steps import Step, run_ladder
steps = [Step("count", "support.ladder_steps:count_up", (2,)), Step("hang", "support.ladder_steps:hang")]
run_ladder(steps, Record(Path(sys.argv[1])), seconds=300.0)
"""


def test_a_command_goes_on_where_a_killed_one_ended_on_a_machine_that_kept_nothing(tmp_path):
    """The first command is killed. Only what it wrote beside its record comes to the second one."""
    first, second = tmp_path / "out" / "day.jsonl", tmp_path / "another" / "day.jsonl"
    with subprocess.Popen([sys.executable, "-c", LADDER, first], stdout=subprocess.DEVNULL) as ladder:
        wait_until(lambda: any("process" in line for line in read_record(first)))
        ladder.kill()
    (process,) = [line["process"] for line in read_record(first) if "process" in line]
    wait_until(lambda: has_ended(process))
    (first.parent / "plan.npz").write_text("a plan")
    first.chmod(0o444)
    resume(first, second)
    assert (second.parent / "plan.npz").read_text() == "a plan"
    outcomes = run_ladder((COUNT, HANG, KILLED), Record(second), seconds=300.0)
    assert outcomes == {"count": "passed before", "hang": "hung", "killed": "failed"}
    assert [line.get("before") for line in read_record(second) if "before" in line] == [
        *("the hang", "the hang", "the kill")
    ]


def test_a_step_whose_file_is_lost_runs_again(tmp_path):
    record, file = Record(tmp_path / "day.jsonl"), tmp_path / "table.json"
    write = Step("write", STEPS + "write", (str(file),), file=str(file))
    for outcome in ("passed", "passed before"):
        assert run_ladder((write,), record, seconds=300.0) == {"write": outcome}
    file.unlink()
    assert run_ladder((write,), record, seconds=300.0) == {"write": "passed"}
    assert file.exists()


def test_resume_names_a_record_that_is_missing_or_in_the_way(tmp_path, capsys):
    record = tmp_path / "day.jsonl"
    options = ["plan", "--record", str(record), "--resume"]
    assert main([*options, str(tmp_path / "no.jsonl")]) == 2
    assert capsys.readouterr().err == f"error: --resume {tmp_path}/no.jsonl: there is no such file\n"
    record.write_text("")
    assert main([*options, str(record)]) == 2
    assert f"the record {record} exists already; continue it without --resume" in capsys.readouterr().err


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


def test_day_steps_each_fit_ten_minutes_and_speeds_wait_for_their_own_checks():
    commands = day_steps("folder", None)
    assert list(commands) == ["right", "speed", "why", "more"]
    names = [step.name for step in commands["right"]]
    assert names[:4] == ["environment", "plan", "JAX's example", "self-check"]
    model, rows = SPEEDS[0]
    kernels, mlps, clusters = set(), {"gate and up", "MLP with gradients", "repeats"}, set()
    for name in names:
        if name.startswith(("forward", "transposed", "weight")):
            (clusters if name.endswith("clusters") else kernels).add(name)
    needs = {step.name: {*step.needs} - {"plan"} for command in commands.values() for step in command}
    assert needs[f"speed of {model}, {rows} rows: products"] == kernels
    assert needs[f"speed of {model}, {rows} rows: MLPs"] == needs["layer of full size"] == kernels | mlps
    assert needs["clusters"] == needs["tuning"] == kernels | mlps | clusters
    assert needs[f"speed of {model}, {rows} rows: MLPs, clusters"] == {"clusters"}
    assert needs["attention, 8192 tokens"] == {"self-check"}
    assert not needs["ragged exchange"]
    for command in ("speed", "why", "more"):
        assert commands[command][0].on_cpu
    assert all(step.seconds <= 4 * 60 for steps in commands.values() for step in steps)


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
    dense = [line | {"by": "dense matmul", "teraflops": 600.8} for line in lines(0.0)[:1]]
    (end,) = lines(0.0)[1:]
    text = report([*lines(300.4)[:1], *dense, end])
    assert f"| {model} | {rows:,} | counted | 601 | 50%, 38% |  |  |  |  |\n" in text
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
    assert [step.name for step in smoke_steps(8, rehearsal=False)][-1] == "ragged exchange over 8"


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
