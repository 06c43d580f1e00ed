"""``python -m experiments.float8``: the errors of float8 on hot ranks, and the time that it could save."""

import sys
from typing import Annotated

import tyro
from rich.console import Console

from experiments.float8.policy_error import Float8Error, measure_errors
from experiments.float8.recompute_time import Float8Time, model_times
from experiments.program import run_program

type Command = (
    Annotated[Float8Error, tyro.conf.subcommand("error")]
    | Annotated[Float8Time, tyro.conf.subcommand("time")]
)
"""The options of the two programs."""


def main(options: Float8Error | Float8Time) -> None:
    """Run the program that the options are for.

    Args:
        options: the options of the command line.
    """
    if isinstance(options, Float8Error):
        measure_errors(options, Console())
    else:
        model_times(options, Console())


if __name__ == "__main__":
    sys.exit(
        run_program(
            main,
            Command.__value__,
            description="The errors of float8 on hot ranks, and the time that it could save.",
        )
    )
