"""Faults of a miniature's network and ranks in a training run: the right result, or one line on every rank."""

import re
import sys
import time

import pytest
from test_rl_processes import PROGRAM, lines_of

from experiments.miniature.cluster import Miniature
from experiments.miniature.faults import Fault
from experiments.miniature.inside import GRACE_SECONDS
from experiments.miniature.launch import run_on_ranks, why_not
from experiments.rl.metrics_log import read_metrics

PRIVILEGES = why_not()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PRIVILEGES is not None, reason=f"no miniature here: {PRIVILEGES}"),
]
MINIATURE = Miniature(nodes=2, ranks=1, slow="400mbit", core=0.9)
STEPS, LASTS, PATIENCE, HUNG_AFTER = 14, 10, 18, 27
"""The steps of the run, the seconds of a fault that ends, and the time limit for a fault that does not."""


def metrics(folder):
    return read_metrics(folder / "seed-0" / "metrics.jsonl")


def longest_step(folder):
    """Return the seconds of the longest step after those that compile."""
    return max(line.get("time/step_seconds", 0) for line in metrics(folder)[2:])


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("SHARED_PROGRAMS", "yes")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(PROGRAM.parents[1] / ".jax_cache"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("PYTHONPATH", f"{PROGRAM.parent}:{PROGRAM.parents[1]}")
        yield


def train(*options, faults=()):
    limits = ["--patience", str(PATIENCE), "--hung-after", str(HUNG_AFTER)]
    command = [sys.executable, str(PROGRAM), "small", *limits, *map(str, options)]
    return run_on_ranks(MINIATURE, command, faults=faults)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Train without faults; return the folder, and the seconds from the start to the middle of the training."""
    for name in ("compiles", "timed"):
        folder, begin = tmp_path_factory.mktemp(name) / "run", time.time()
        assert train("--steps", STEPS, "--out", folder) == 0
    end = (folder / "seed-0" / "metrics.jsonl").stat().st_mtime
    learning = sum(line.get("time/step_seconds", 0) for line in metrics(folder)[2:])
    return folder, end - begin - learning / 2


@pytest.mark.parametrize("kind", ["down", "stop", "slow", "lose"])
def test_training_survives_a_fault_that_ends_and_learns_the_same(kind, unbroken, tmp_path, capfd):
    folder, middle = unbroken
    assert train("--steps", STEPS, "--out", tmp_path / "run", faults=[Fault(kind, 1, middle, LASTS)]) == 0
    assert lines_of(tmp_path / "run") == lines_of(folder)
    if kind == "lose":
        lost = re.findall(r"qdisc pfifo.*\n.*dropped (\d+)", capfd.readouterr().out)
        assert sum(map(int, lost)) > 0, "packets were lost"
    if kind in ("down", "stop"):
        assert longest_step(tmp_path / "run") > longest_step(folder) + LASTS / 2, "the fault came in a step"


@pytest.mark.parametrize("kind", ["down", "stop"])
def test_fault_for_good_ends_every_rank_in_one_line_and_the_run_resumes(kind, unbroken, tmp_path, capfd):
    folder, middle = unbroken
    begin = time.monotonic()
    assert train("--steps", STEPS, "--out", tmp_path / "run", faults=[Fault(kind, 1, middle, None)]) == 1
    assert time.monotonic() - begin < middle + 3 * PATIENCE + GRACE_SECONDS
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert 1 <= len(errors) <= 2, errors
    # A stopped process says nothing, so the miniature says it.
    said = r"start all of them again with: .* --resume |rank1 did not end within"
    assert all(re.search(said, line) for line in errors), errors
    assert train("--resume", tmp_path / "run") == 0
    assert lines_of(tmp_path / "run") == lines_of(folder)
