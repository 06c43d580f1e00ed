"""Attacks on programs of their own processes, for ``make attack``: processes are killed, stopped or fail.

The other processes must end too, each with one line. Run again, the program must go on where it was, and end as it does
without an attack, bit for bit.
"""

import signal
import time

import numpy as np
from test_rl_processes import PROGRAM, killed_at_last, lines_of, start

ENDS_WITHIN = 400
"""The seconds after which a process counts as one that hangs."""


class Program:
    """A program on a number of processes, whose whole runs take ``seconds`` and end with ``whole``."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        for number in range(2):  # the first one compiles
            begin = time.monotonic()
            ends = self.run(folder / f"whole{number}")
            self.seconds = time.monotonic() - begin
            assert all(status == 0 for _, status in ends), ends
        self.whole = self.result(folder / "whole1")

    def rebuild(self):
        """Do nothing: every attack has a run of its own."""

    def run(self, folder, during=None, **variables):
        """Begin a run or go on with it, to its end; return the lines of errors and the exit status of each process."""
        folder.mkdir(exist_ok=True, parents=True)
        shared = {"SHARED_PROGRAMS": "yes"} if self.count > 1 else {}
        command = self.command(folder)
        with killed_at_last(start(self.count, command=command, **shared | variables)) as processes:
            if during is not None:
                during(processes)
            ends = [
                (process.communicate(timeout=ENDS_WITHIN)[1], process.returncode) for process in processes
            ]
        # Notices, such as the exchanges that were chosen, are no errors.
        lines = [
            [line for line in error.strip().splitlines() if not line.startswith("relibra_jax")]
            for error, _ in ends
        ]
        return [(each, status) for each, (_, status) in zip(lines, ends, strict=True)]


class Learning(Program):
    """A run of ``experiments.run`` with the smallest policy."""

    begins_with = "config.json"

    def command(self, folder):
        return PROGRAM, "small", "--resume" if (folder / self.begins_with).exists() else "--out", folder

    def result(self, folder):
        return lines_of(folder)

    def trouble(self, rng):
        return f"{rng.integers(self.count)} {rng.integers(1, 4)} fail"


class Loop(Program):
    """The Flax loop of `loop_process`."""

    begins_with = "checkpoints"

    def command(self, folder):
        return PROGRAM.with_name("loop_process.py"), folder

    def result(self, folder):
        with np.load(folder / "end.npz") as file:
            return [file[name].tobytes() for name in file]

    def trouble(self, rng):
        return f"{rng.integers(self.count)} {rng.integers(3)} {rng.integers(1500)}"


def attacked(program, rng, send=None, **variables):
    """Run a program under an attack, and again without one; return how it ended.

    Args:
        program: the program.
        rng: the random numbers of the attack.
        send: the signal that a process gets at a random moment. None for no signal.
        variables: the variables of its environment.
    """
    folder, victim = program.folder / f"attacked{rng.integers(2**31)}", int(rng.integers(program.count))
    moment = rng.uniform(0, 1) * program.seconds

    def attack(processes):
        if send != signal.SIGKILL:
            # Before that, Python imports modules and JAX starts, which print tracebacks if they are interrupted.
            while not (folder / program.begins_with).exists() and processes[victim].poll() is None:
                time.sleep(0.1)
        time.sleep(moment if send == signal.SIGKILL else moment / 2)
        processes[victim].send_signal(send)

    ends = program.run(folder, during=None if send is None else attack, **variables)
    for number, (lines, status) in enumerate(ends):
        assert len(lines) <= 1 or status == 0 or (number, send) == (victim, signal.SIGINT), lines[-5:]
    resumed = program.run(folder)
    assert all(status == 0 for _, status in resumed), resumed
    assert program.result(folder) == program.whole, "it ended otherwise"
    status = "ended whole" if all(status == 0 for _, status in ends) else "ended with a line"
    return f"{status}, then right"


def killed(program, rng):
    """SIGKILL to one process."""
    return attacked(program, rng, signal.SIGKILL)


def stopped(program, rng):
    """SIGTERM or SIGINT to one process."""
    return attacked(program, rng, (signal.SIGTERM, signal.SIGINT)[int(rng.integers(2))])


def failing(program, rng):
    """An error of one process."""
    return attacked(program, rng, TROUBLE=program.trouble(rng))


PROCESSES = (killed, stopped, failing)


def programs(folder):
    """Make a Flax loop on two processes, and a training run on one and on two."""
    return Loop(folder / "loop", 2), Learning(folder / "one", 1), Learning(folder / "two", 2)
