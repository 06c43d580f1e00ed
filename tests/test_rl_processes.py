"""A run on several processes learns what one process learns, and if one of them ends, none hangs."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.rl.metrics_log import read_metrics

PROGRAM = Path(__file__).with_name("learning_process.py")
# Sums over ranks have a different order when half of the ranks are in another process.
TOLERANCE = 1e-4
ENDS_WITHIN = 60
STEPS = 4


def start(count, *args, command=(PROGRAM, "small"), **variables):
    """Start a run, or another command, on a number of processes, with 8 devices in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={8 // count}")
    shared = (
        os.environ
        | variables
        | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(PROGRAM.parents[1] / ".jax_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join(map(str, PROGRAM.parents[:2])),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
        }
    )
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, (*command, *args))],
            env=shared | {"JAX_PROCESS_ID": str(index)},
            **options,
        )
        for index in range(count)
    ]


@contextlib.contextmanager
def killed_at_last(processes):
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # also closes its pipes


def run(count, *args, **variables):
    """Run a number of processes to their end; return standard output, standard error and exit status of each."""
    with killed_at_last(start(count, *args, **variables)) as processes:
        printed = [process.communicate(timeout=400) for process in processes]
        return [(*texts, process.returncode) for texts, process in zip(printed, processes, strict=True)]


def lines_of(folder):
    """Read the metrics of a run, without times."""
    lines = read_metrics(folder / "seed-0" / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]


def assert_close(one, other):
    """Assert that metrics are equal up to the last digits of floats."""
    assert [line.keys() for line in one] == [line.keys() for line in other]
    assert [line["step"] for line in one] == list(range(STEPS))
    for one_line, other_line in zip(one, other, strict=True):
        for name, value in one_line.items():
            exact = value is None or isinstance(value, str | list)
            if exact and not np.issubdtype(np.asarray(value).dtype, np.floating):
                assert other_line[name] == value, name
            else:
                np.testing.assert_allclose(other_line[name], value, rtol=TOLERANCE, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Make a run on one process, and return its folder."""
    folder = tmp_path_factory.mktemp("one") / "run"
    [(_, error, status)] = run(1, "--out", folder)
    assert status == 0, error
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Make the same run on two processes, which also record the processes that score samples; return its folder."""
    folder = tmp_path_factory.mktemp("two")
    first, second = run(2, "--out", folder / "run", "--record", 1, SCORED=str(folder / "scored"))
    assert (first[2], second) == (0, ("", "", 0)), first[1] + second[1]
    return folder / "run"


@pytest.mark.long
def test_two_processes_learn_the_same_as_one(one, two):
    assert_close(lines_of(one), lines_of(two))
    for folder in (one, two):
        _, *learn_lines = read_metrics(folder / "seed-0" / "metrics.jsonl")
        assert all(line["time/plan_ahead_seconds"] > 0 for line in learn_lines), (
            "homes are searched beside rollouts"
        )
    assert (two / "seed-0" / "replay.npz").exists()
    assert (two / "summary.json").exists()


@pytest.mark.long
def test_two_processes_learn_the_same_with_dense_parameters_sharded_and_arrays_on_the_host(tmp_path):
    memory = ("--state-memory", "pinned_host", "--activation-memory", "pinned_host")
    for processes in (1, 2):
        ended = run(processes, "--out", tmp_path / str(processes), "--shard-dense", *memory)
        assert [status for *_, status in ended] == [0] * processes, ended[0][1] + ended[-1][1]
    assert_close(lines_of(tmp_path / "1"), lines_of(tmp_path / "2"))


@pytest.mark.long
def test_two_processes_score_every_sample_once(two):
    assert (two.parent / "scored").read_text().split() == ["0"] * 32 * (STEPS - 1)


def kill(victim, moment, folder):
    """Kill a process some seconds after a number of lines of metrics.

    Returns the last line that the other process prints, its exit status, and the seconds until its end.
    """
    lines, seconds = moment
    log = folder / "seed-0" / "metrics.jsonl"
    with killed_at_last(start(2, "--out", folder)) as processes:
        while len(read_metrics(log)) < lines:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        time.sleep(seconds)
        assert all(process.poll() is None for process in processes), "over before the moment"
        processes[victim].send_signal(signal.SIGKILL)
        killed, other = time.monotonic(), processes[1 - victim]
        _, error = other.communicate(timeout=ENDS_WITHIN)
        return error.splitlines()[-1], other.returncode, time.monotonic() - killed


def assert_survives(victim, moment, folder, unbroken):
    line, status, seconds = kill(victim, moment, folder)
    assert status == 1
    print(f"process {victim} killed at {moment}: {seconds:.1f} s, {line}")
    name = rf"process {victim} of 2 on {socket.gethostname()} died"
    if (folder / "config.json").exists():
        assert line.startswith(f"error: {name}; start all of them again with: "), line
        assert line.endswith(f"--resume {folder}")
        resumed = run(2, "--resume", folder)
    else:
        resumed = run(2, "--out", folder)
    assert [status for *_, status in resumed] == [0, 0], resumed
    assert lines_of(folder) == lines_of(unbroken)


@pytest.mark.long
@pytest.mark.parametrize(("victim", "lines"), [(0, 1), (1, 2)])
def test_killed_process_ends_the_other_and_the_run_can_resume(victim, lines, two, tmp_path):
    moment = lines, random.Random(victim).uniform(0, 0.3)
    assert_survives(victim, moment, tmp_path / "run", two)


@pytest.mark.long
@pytest.mark.parametrize("number", range(10))
def test_process_killed_at_any_moment_ends_the_other(number, two, tmp_path):
    chance = random.Random(number)
    # Before the first line, processes start and compile, which takes longer than any step.
    lines = chance.randrange(STEPS)
    moment = lines, chance.uniform(0, 1 if lines else 20)
    assert_survives(chance.randrange(2), moment, tmp_path / "run", two)


@pytest.mark.long
def test_stop_signal_to_one_process_stops_both_and_one_can_resume_alone(one, tmp_path):
    folder = tmp_path / "run"
    first, second = run(2, "--out", folder, TROUBLE="1 2 stop")
    assert (first[2], second) == (0, ("", "", 0)), first
    assert "stopped and saved; resume with: " in first[0]
    assert [line["step"] for line in lines_of(folder)] == [0, 1, 2]
    [(_, error, status)] = run(1, "--resume", folder)
    assert status == 0, error
    assert_close(lines_of(one), lines_of(folder))


@pytest.mark.long
def test_two_processes_resume_a_run_of_one_and_an_error_ends_both(one, tmp_path):
    folder = shutil.copytree(one, tmp_path / "run")
    shutil.rmtree(folder / "seed-0" / "checkpoints" / str(STEPS))
    first, second = run(2, "--resume", folder, TROUBLE="1 3 fail")
    assert (second[1:], first[2]) == (("error: no room for this\n", 2), 1)
    message = (
        f"error: process 1 of 2 on {socket.gethostname()} stopped: no room for this; start all of them again"
    )
    assert first[1].splitlines()[-1].startswith(f"{message} with: ")
    run(2, "--resume", folder)
    assert_close(lines_of(one), lines_of(folder))
