"""Steps for tests of the ladder, without JAX: they print results, fail, hang, or leave a process behind."""

import subprocess
import sys
import time

from experiments.ladder.facts import print_facts


def count_up(last, *, rehearsal=False):
    for number in range(last):
        print_facts(number=number, rehearsed=rehearsal)
    print("a line of a library")


def fail(*, rehearsal=False):
    print_facts(before="the end")
    raise ValueError("the rows are wrong")


def hang(*, rehearsal=False):
    print_facts(before="the hang")
    time.sleep(600)


def leave_a_process(*, rehearsal=False):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print_facts(child=child.pid)
