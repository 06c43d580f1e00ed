"""A process that calls reward functions for `experiments.rl.reward_pool`, and the call that it makes.

It imports nothing but the standard library and what the functions need, and it starts from nothing: it has neither
threads nor devices of the run. It ends with the run, also in the middle of a reward, because its standard input then
ends.
"""

import importlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

RAISED, NOT_FINITE, TIMED_OUT, ENDED = "raised", "not_finite", "timed_out", "process_ended"
FAILURE_KINDS: Final = (RAISED, NOT_FINITE, TIMED_OUT, ENDED)
"""The kinds of failures of rewards: the function raised, it returned no finite number, it took longer than its limit,
or it ended its process."""


class RewardFunction(NamedTuple):
    """A reward function that every process imports by its name."""

    name: str
    """The function, as ``module:function``."""
    of_task: bool
    """Whether the function returns a task, whose ``score`` is the reward function."""

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        module, _, attribute = self.name.partition(":")
        function = getattr(importlib.import_module(module), attribute)
        return function().score if self.of_task else function


def call_reward(function: Callable[..., Any], *arguments: Any) -> tuple[str | None, Any]:
    """Call a reward function.

    Returns:
        None and the reward, or the kind of failure and a text.

    >>> call_reward(len, "abc"), call_reward(len, 3)[0], call_reward(float, "nan")
    ((None, 3.0), 'raised', ('not_finite', 'a reward must be a finite number, not nan'))
    """
    try:
        value = function(*arguments)
    except Exception as error:  # the user's reward function may raise anything
        return RAISED, repr(error)
    try:
        reward = float(value)
    except Exception:  # the user's objects may raise anything
        reward = math.nan
    if math.isfinite(reward):
        return None, reward
    return NOT_FINITE, f"a reward must be a finite number, not {value!r}"


def main() -> None:
    """Answer calls until the connection ends, whose file descriptor is the first argument of the program."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the run finishes its step after a signal, and needs the rewards
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_run, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    sys.path[:], names = connection.recv()
    functions = [RewardFunction(*name).load() for name in names]
    connection.send((None, None))
    while True:
        try:
            number, arguments = connection.recv()
        except EOFError:
            return
        connection.send(call_reward(functions[number], *arguments))


def _end_with_run() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
