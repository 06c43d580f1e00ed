"""The environment variables that a run sets for host devices and their compiler."""

import os

import pytest

from experiments.rl.devices import compile_quickly, host_devices

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


def test_host_devices_have_two_threads_each(monkeypatch):
    """The caller's own NPROC stays."""
    monkeypatch.delenv("NPROC")
    host_devices(8)
    assert int(os.environ["NPROC"]) >= 16
    monkeypatch.setenv("NPROC", "3")
    host_devices(8)
    assert os.environ["NPROC"] == "3"
