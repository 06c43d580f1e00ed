"""Steps for the ladder that need no JAX: they say something, fail, hang, or leave a process behind."""

import subprocess
import sys
import time

from experiments.gpu_day.facts import say


def count_up(last, *, rehearsal):
    for number in range(last):
        say(number=number, rehearsed=rehearsal)
    print("a line of a library")


def fail(*, rehearsal):
    say(before="the end")
    raise ValueError("the rows are wrong")


def hang(*, rehearsal):
    say(before="the hang")
    time.sleep(600)


def leave_a_process(*, rehearsal):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(child=child.pid)
