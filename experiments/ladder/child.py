"""``python -m experiments.ladder.child STEP``: the process of one step, which the ladder starts."""

import importlib
import json
import sys


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


if __name__ == "__main__":
    run_function(**json.loads(sys.argv[1]))
