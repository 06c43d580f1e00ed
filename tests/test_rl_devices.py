"""The environment variables that a run sets for host devices and their compiler."""

import os

import pytest

from experiments.rl.devices import compile_quickly, host_devices, overlap_exchanges
from relibra_jax.execution import OVERLAP_OPTIONS

OLDER_EMITTERS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", OLDER_EMITTERS),
        ("--other=1", f"--other=1 {OLDER_EMITTERS}"),
        ("--xla_backend_extra_options=mine", "--xla_backend_extra_options=mine"),
    ],
)
def test_compile_quickly_keeps_the_options_of_the_caller(monkeypatch, before, after):
    monkeypatch.setenv("XLA_FLAGS", before)
    for _ in range(2):
        compile_quickly()
        assert os.environ["XLA_FLAGS"] == after


def test_runs_overlap_exchanges_on_gpus_unless_the_caller_says_otherwise(monkeypatch):
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false"
    monkeypatch.setenv("XLA_FLAGS", mine)
    overlap_exchanges()
    first, *others = os.environ["XLA_FLAGS"].split()
    assert first == mine
    assert {flag.removeprefix("--").partition("=")[0] for flag in others} == set(OVERLAP_OPTIONS) - {
        "xla_gpu_enable_latency_hiding_scheduler"
    }
    assert "--xla_gpu_experimental_collective_start_as_early_as_possible=true" in others


def test_host_devices_have_two_threads_each(monkeypatch):
    """The caller's own NPROC stays."""
    monkeypatch.delenv("NPROC")
    host_devices(8)
    assert int(os.environ["NPROC"]) >= 16
    monkeypatch.setenv("NPROC", "3")
    host_devices(8)
    assert os.environ["NPROC"] == "3"
