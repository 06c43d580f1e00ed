"""``python -m experiments.ablation [TRACE]``: compare the parts of ReLibra, each alone, and alternatives to them.

The options, the table, the figures and the files are those of ``relibra compare``; the rows are those of
`relibra_jax.cli.ablation`. Invalid input ends with exit status 2 and one line on standard error.
"""

import sys
from pathlib import Path

from rich.console import Console

from experiments.program import run_program
from relibra_jax.cli.ablation import ablation
from relibra_jax.cli.compare import Compare, compare_contenders

PROGRAM = "python -m experiments.ablation"


def main(args: list[str] | None = None) -> int:
    """Run the ablation.

    Args:
        args: the command-line options. None takes those of the process.

    Returns:
        The exit status: 0, or 2 for invalid input.
    """

    def run(options: Compare) -> None:
        compare_contenders(ablation(), options, Console(), program=PROGRAM)

    default = Compare(out=Path("out/ablation"))
    return run_program(run, Compare, args, default=default, prog=PROGRAM, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
