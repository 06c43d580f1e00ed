"""Steps for tests of the ladder, without JAX: they print results, fail, hang, are killed, or leave a process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments.ladder.facts import print_facts


def count_up(last, *, rehearsal=False):
    for number in range(last):
        print_facts(number=number, rehearsed=rehearsal)
    print("a line of a library")


def fail(*, rehearsal=False):
    print_facts(before="the end")
    raise ValueError("the rows are wrong")


def hang(*, rehearsal=False):
    print_facts(before="the hang", process=os.getpid())
    if folder := os.environ.get("MOSAIC_GPU_DUMP_TO"):
        Path(folder, "kernel.ptx").write_text("wgmma")
    time.sleep(600)


def kill_itself(*, rehearsal=False):
    print_facts(before="the kill")
    os.kill(os.getpid(), signal.SIGKILL)


def write(path, *, rehearsal=False):
    Path(path).write_text("a table")


def leave_a_process(*, own_session=False, rehearsal=False):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=own_session)
    print_facts(child=child.pid)


def leave_a_daemon(*, rehearsal=False):
    leave_a_process(own_session=True)
