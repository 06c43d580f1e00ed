"""Tests of expert parallelism over two real processes that communicate through gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = [
    "node_axis_is_the_process",
    "all_trust_a_kernel_or_none",
    "both_hold_the_same_plan_or_stop",
    "plans_do_not_change_the_mathematics",
    "training_goes_on_where_it_stopped",
    "a_damaged_checkpoint_stops_both",
    "batches_are_prepared_and_trained_on",
    "routes_stay_with_the_process_that_has_them",
    "checkpoints_are_read_in_part_and_saved_together",
    "a_checkpoint_that_one_cannot_write_or_read_stops_both",
]


@pytest.mark.long
def test_two_processes_execute_and_restore_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("two_processes.py")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    environment = os.environ | {
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, script.parents[:2])),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(number), port, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(2)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, printed, strict=True):
        passed = [line.removeprefix("passed: ") for line in text.splitlines() if line.startswith("passed: ")]
        assert (process.returncode, passed) == (0, CHECKS), text[-4000:]
