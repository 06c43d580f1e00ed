"""``python -m experiments.ablation [TRACE]``: ReLibra's parts compared, each alone, and their alternatives.

The options, the table, the figures and the numbers are those of ``relibra compare``, with the contenders of
`relibra_jax.cli.ablation`. Bad input ends with exit status 2 and one line on standard error.
"""

import sys
from pathlib import Path

from rich.console import Console

from relibra_jax.cli.ablation import ablation
from relibra_jax.cli.compare import Compare, compare_contenders
from relibra_jax.cli.parsing import run_program

PROGRAM = "python -m experiments.ablation"


def main(args: list[str] | None = None) -> int:
    """Run the ablation.

    Args:
        args: the options; those of the process when None.

    Returns:
        The exit status: 0, or 2 for bad input.
    """

    def run(options: Compare) -> None:
        compare_contenders(ablation, options, Console(), program=PROGRAM)

    default = Compare(out=Path("out/ablation"))
    return run_program(run, Compare, args, default=default, prog=PROGRAM, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
