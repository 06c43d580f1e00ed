"""``python -m experiments.ladder.child STEP``: the process of one step, which the ladder starts."""

import importlib
import json
import os
import signal
import sys
import threading


def run_function(function: str, arguments: list, *, rehearsal: bool) -> None:
    """Import a step's function and call it.

    Args:
        function: the function, as ``module:function``.
        arguments: the arguments of the function.
        rehearsal: whether to run at small sizes without a GPU.
    """
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    call(*arguments, **({"rehearsal": True} if rehearsal else {}))


def end_with_the_ladder() -> None:
    """Kill this process and its group as soon as standard input closes, which the ladder holds open.

    The process has a session of its own, so it would outlive a ladder that is killed, and keep its GPU.
    """

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_the_ladder()
    run_function(**json.loads(sys.argv[1]))
