"""Tests of the check that kernels must pass on a machine before ``implementation=None`` chooses them there."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import gpu_interpreter

from pallas_kernels import (
    agree_on_kernels,
    agreement,
    flash_attention,
    grouped_dot_float8,
    grouped_mlp,
    implementation,
    self_check,
    verdicts,
)
from pallas_kernels.grouped_dot.api import IMPLEMENTATIONS
from pallas_kernels.implementation import choose_implementation
from pallas_kernels.self_check import check_here, main
from pallas_kernels.verdicts import Verdict, find_verdict, is_trusted, read_verdict, run_check, verdicts_path


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    is_trusted.cache_clear()
    yield
    is_trusted.cache_clear()


@pytest.fixture
def processes(monkeypatch):
    """Replace the processes that a check starts; a test sets how they end: exit status and stderr, or a hang."""
    started, ends = [], []

    class Process:
        def __init__(self, command, *, stderr, **_):
            started.append(command)
            self.end = ends.pop(0)
            if self.end:
                stderr.write(self.end[1])

        def wait(self, seconds):
            if self.end is None:
                raise subprocess.TimeoutExpired("a check", seconds)
            return self.end[0]

        def kill(self):
            """Do nothing, like SIGKILL to a process that waits for a driver."""

    monkeypatch.setattr(verdicts.subprocess, "Popen", Process)
    return SimpleNamespace(started=started, ends=ends)


def test_is_trusted_reads_a_passed_verdict(processes, capsys):
    processes.ends += [(0, "a warning\n")]
    assert is_trusted("mosaic", "cpu")
    is_trusted.cache_clear()
    assert is_trusted("mosaic", "cpu")
    assert processes.started == [[sys.executable, "-m", "pallas_kernels.self_check", "--here", "mosaic"]]
    assert read_verdict("mosaic") == Verdict(True, "")
    assert read_verdict("triton") is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ((1, "Traceback\nValueError: 640 rows of 256, array [0]: the error is 0.3"), "the error is 0.3"),
        ((-11, ""), "exit status -11"),
        (None, "it hung for 180 s"),
    ],
)
def test_is_trusted_reports_a_failed_check_once(processes, capsys, end, reason):
    processes.ends += [end]
    assert not is_trusted("mosaic", "cpu")
    assert not is_trusted("mosaic", "cpu")
    assert len(processes.started) == 1
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "implementation 'mosaic' is not chosen because it has not passed its check (" in output
    assert reason in output


def test_read_verdict_depends_on_jax_version(processes, monkeypatch):
    processes.ends += [(0, ""), (1, "ValueError: wrong")]
    run_check("mosaic")
    monkeypatch.setattr(verdicts.jax, "__version__", "0.99.0")
    assert read_verdict("mosaic") is None
    assert not run_check("mosaic").passed
    stored = json.loads(verdicts_path().read_text()).values()
    assert sorted(verdict["passed"] for verdict in stored) == [False, True]


def test_read_verdict_ignores_a_damaged_file(processes):
    verdicts_path().parent.mkdir(parents=True)
    verdicts_path().write_text("{")
    processes.ends += [(0, "")]
    assert is_trusted("mosaic", "cpu")
    assert read_verdict("mosaic") == Verdict(True, "")


def test_is_trusted_needs_a_cache_folder_that_can_be_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not is_trusted("mosaic", "cpu")
    assert "(it could not be checked: " in capsys.readouterr().err


def test_check_here_rejects_wrong_and_nondeterministic_results(monkeypatch):
    monkeypatch.setattr(self_check, "SIZES", ((40, 16),))
    monkeypatch.setattr(self_check, "REPEATS", 2)
    check_here("reference")
    runs = itertools.count()

    def wrong(x, weights, sizes, scale, *, implementation):
        out = grouped_mlp(x, weights, sizes, scale, implementation="xla")
        return out if implementation == "xla" else out * jnp.where(jnp.arange(len(out)) == 3, 1.5, 1)[:, None]

    def nondeterministic(x, weights, sizes, scale, *, implementation):
        out = grouped_mlp(x, weights, sizes, scale, implementation="xla")
        if implementation == "xla":
            return out
        # Every second run has an error of the size of rounding errors.
        noise = jax.pure_callback(lambda: np.float32(next(runs) % 2), jax.ShapeDtypeStruct((), jnp.float32))
        return out * (1 + noise / 128).astype(out.dtype)

    monkeypatch.setattr(self_check, "grouped_mlp", wrong)
    with pytest.raises(ValueError, match=r"40 rows of 16, array .*: the error is .* of the largest entry"):
        check_here("mosaic")
    monkeypatch.setattr(self_check, "grouped_mlp", nondeterministic)
    with pytest.raises(ValueError, match="40 rows of 16: two runs gave different bits"):
        check_here("mosaic")


@pytest.mark.slow
def test_check_here_checks_the_kernels_of_attention(monkeypatch):
    monkeypatch.setattr(self_check, "ATTENTION", ((100, 8, "bfloat16"), (60, 12, "float32")))
    monkeypatch.setattr(self_check, "REPEATS", 1)
    with gpu_interpreter("triton"):
        check_here("attention")

    def wrong(*operands, implementation):
        out = flash_attention(*operands, implementation="xla")
        return out if implementation == "xla" else out.at[3].multiply(1.5)

    monkeypatch.setattr(self_check, "flash_attention", wrong)
    with pytest.raises(
        ValueError, match=r"attention of 100 tokens, bfloat16 heads of 8, array .*: the error is"
    ):
        check_here("attention")


@pytest.mark.slow
def test_check_here_checks_the_kernels_of_float8(monkeypatch):
    monkeypatch.setattr(self_check, "SIZES", ((40, 128),))
    monkeypatch.setattr(self_check, "REPEATS", 1)
    with gpu_interpreter("triton"):
        check_here("float8")

    def wrong(*operands, implementation):
        out = grouped_dot_float8(*operands, implementation="xla")
        return out if implementation == "xla" else out.at[3].multiply(1.5)

    monkeypatch.setattr(self_check, "grouped_dot_float8", wrong)
    with pytest.raises(ValueError, match=r"40 float8 rows of 128, array .*: the error is"):
        check_here("float8")


def test_main_skips_implementations_that_cannot_run(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": not checked, ")[0] for line in lines] == ["mosaic", "triton", "attention", "float8"]
    assert not verdicts_path().exists()


def test_choose_implementation_needs_a_passed_check(monkeypatch, capsys):
    """The mesh describes an H100, which this machine does not have; then verdicts are faked as if it did."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    rows = jnp.zeros((8, 64), jnp.bfloat16)

    def chosen(name=None):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
            return choose_implementation(name, IMPLEMENTATIONS, rows, rows.dtype, k=64, n=64)

    assert chosen() == "xla"
    output = capsys.readouterr().err
    assert output.count("(this machine has no NVIDIA H100 80GB HBM3)") == 2
    assert chosen("mosaic") == "mosaic"
    assert chosen("triton") == "triton"
    for trusted, expected in ({"mosaic", "triton"}, "mosaic"), ({"triton"}, "triton"), (set(), "xla"):
        monkeypatch.setattr(implementation, "is_trusted", lambda name, _, trusted=trusted: name in trusted)
        assert chosen() == expected


@pytest.fixture
def two_processes(monkeypatch):
    """Pretend that this is process 0 of 2, and that the kernels can run on CPUs; returns what process 1 trusts."""
    other = {"mosaic": True, "triton": True, "attention": True, "float8": True}

    def gather(own):
        return np.stack([own, [other[name] for name in agreement.reasons_not_to_check()]])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(agreement, "PLATFORM", "cpu")
    monkeypatch.setattr(agreement, "reasons_not_to_check", lambda: dict.fromkeys(other))
    monkeypatch.setattr(verdicts, "_AGREED", {})
    devices = [SimpleNamespace(process_index=index, platform="cpu") for index in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    return other


def test_several_processes_trust_what_all_of_them_trust(two_processes, processes, capsys):
    assert not is_trusted("mosaic", "cpu")
    assert (
        "the processes have not agreed: all must call pallas_kernels.agree_on_kernels"
        in capsys.readouterr().err
    )
    two_processes["mosaic"] = False
    processes.ends += [(0, ""), (0, ""), (1, "ValueError: wrong"), (0, "")]
    agree_on_kernels(jax.devices()[:1])  # a program of one process
    assert not processes.started
    agree_on_kernels()
    trusted = {name: is_trusted(name, "cpu") for name in two_processes}
    assert trusted == {"mosaic": False, "triton": True, "attention": False, "float8": True}
    mosaic, attention = capsys.readouterr().err.splitlines()
    assert "'mosaic' is not chosen because it has not passed its check (processes [1] of 2); run" in mosaic
    assert (
        "'attention' is not chosen because it has not passed its check (processes [0] of 2: ValueError: wrong)"
        in (attention)
    )
    agree_on_kernels()
    assert len(processes.started) == 4


def test_one_process_checks_while_others_wait_for_its_verdict(processes):
    """The others read the verdict. Threads stand for processes, since each opens the file of the lock anew."""
    processes.ends += [(0, "")]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(find_verdict, ["mosaic"] * 3))
    assert found == [Verdict(True, "")] * 3
    assert len(processes.started) == 1
