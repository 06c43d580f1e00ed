"""A pool of processes for reward functions, with a limit of time for each reward.

A process that takes longer than the limit is killed, with all processes that it has started, and another one takes its
place. So a reward that hangs, or that ends its process, costs that reward alone. The processes are programs of their
own (`experiments.rl.reward_worker`) and not forks of the run, whose threads and devices a fork would damage.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, Final

from experiments.rl.reward_worker import ENDED, RAISED, TIMED_OUT, RewardFunction
from relibra_jax.support.limits import check_integer, check_positive

START_SECONDS: Final = 120.0
"""The most seconds in which a process imports the reward functions."""
MOST_PROCESSES: Final = 8
"""The largest number of processes, unless the settings give one."""
_WORKER: Final = str(Path(__file__).with_name("reward_worker.py"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The processes that run the reward functions of ``--reward`` and of tasks given as module:function.

    Raises:
        ValueError: if a number is out of its range.
    """

    processes: int | None = None
    """The number of processes. None takes one for each core, at most 8."""
    seconds: float = 10.0
    """The most seconds of one reward. After them its process is killed, and the response has no reward."""

    def __post_init__(self) -> None:
        if self.processes is not None:
            check_integer("reward_pool.processes", self.processes, least=1)
        check_positive("reward_pool.seconds", self.seconds)


class RewardPool:
    """A pool of processes that have imported some reward functions.

    Args:
        functions: the reward functions.
        settings: the number of processes, and the limit of time.
    """

    def __init__(self, functions: Sequence[RewardFunction], settings: PoolSettings):
        cores = min(os.cpu_count() or 1, MOST_PROCESSES)
        self._functions, self._seconds = tuple(functions), settings.seconds
        self._workers = [_Worker(self._functions) for _ in range(settings.processes or cores)]
        # Without a reference to the pool itself.
        self.close = weakref.finalize(self, _kill_all, self._workers)
        """Kill all processes."""

    def call(self, calls: Sequence[tuple[RewardFunction, tuple[Any, ...]]]) -> list[tuple[str | None, Any]]:
        """Call reward functions, several at a time.

        Args:
            calls: a function of the pool and its arguments, for every call.

        Returns:
            For every call, None and the reward, or the kind of failure and a text.

        Raises:
            ValueError: if a process ends before it has imported the functions.
        """
        answers: list[tuple[str | None, Any]] = [(ENDED, "")] * len(calls)
        waiting = deque(range(len(calls)))
        while waiting or any(worker.call is not None for worker in self._workers):
            for worker in self._workers:
                while waiting and worker.ready and worker.call is None:
                    function, arguments = calls[number := waiting.popleft()]
                    try:
                        worker.ask(number, self._functions.index(function), arguments, self._seconds)
                    except Exception as error:  # the user's objects may raise anything when they are pickled
                        answers[number] = (RAISED, f"the example cannot be sent to a process: {error!r}")
            busy = [worker for worker in self._workers if worker.call is not None or not worker.ready]
            first = min((worker.deadline for worker in busy), default=0.0)
            heard = wait([worker.connection for worker in busy], max(first - time.monotonic(), 0))
            for worker in busy:
                call = worker.call
                if worker.connection in heard:
                    answer = worker.hear()
                elif time.monotonic() >= worker.deadline:
                    answer = worker.kill(
                        TIMED_OUT, f"it took more than reward_pool.seconds={self._seconds:g}"
                    )
                else:
                    continue
                if call is not None:
                    answers[call] = answer
                if worker.ended:
                    self._workers[self._workers.index(worker)] = _Worker(self._functions)
        return answers


class _Worker:
    """A process of the pool: it starts, or is ready, or works on a call."""

    def __init__(self, functions: Sequence[RewardFunction]):
        self.connection, other = Pipe()
        self._process = subprocess.Popen(
            # -P: the modules beside the program must not take the places of others.
            [sys.executable, "-P", _WORKER, str(other.fileno())],
            stdin=subprocess.PIPE,
            stdout=2,  # what rewards print must not go into the output of the run
            pass_fds=(other.fileno(),),
            start_new_session=True,  # signals to the run are not for it, and it ends with all processes that it starts
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        other.close()
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which the pool finds later
            self.connection.send((sys.path, [tuple(function) for function in functions]))
        self.names = ", ".join(function.name for function in functions)
        self.deadline = time.monotonic() + START_SECONDS
        self.call: int | None = None
        self.ready = self.ended = False

    def ask(self, call: int, function: int, arguments: tuple[Any, ...], seconds: float) -> None:
        """Begin a call."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((function, arguments))
        self.call, self.deadline = call, time.monotonic() + seconds

    def hear(self) -> tuple[str | None, Any]:
        """Read the answer to the call, or that the process is ready, or that it has ended."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            return self.kill(ENDED, "its process ended")
        self.ready, self.call = True, None
        return answer

    def kill(self, kind: str, reason: str) -> tuple[str, str]:
        """End the process with all that it started.

        Args:
            kind: the kind of failure of its call.
            reason: the reason in words.

        Returns:
            The kind, and a text.

        Raises:
            ValueError: if it was not ready yet.
        """
        status = self._process.poll()
        self.end()
        if not self.ready:
            cause = f"exit status {status}" if status is not None else f"more than {START_SECONDS:g} s"
            raise ValueError(f"reward {self.names}: a process could not import it ({cause})")
        return kind, reason if status is None else f"{reason} with exit status {status}"

    def end(self) -> None:
        """End the process with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.connection.close()
        self.ended, self.call = True, None


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
