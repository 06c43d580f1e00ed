"""``python -m experiments.ablation [TRACE]``: ReLibra's parts compared, each alone, and their alternatives.

The options, the table, the figures and the numbers are those of ``relibra compare``, with the contenders of
`experiments.ablation.variants`. Bad input ends with exit status 2 and one line on standard error.
"""

import functools
import sys
from pathlib import Path

import tyro
from rich.console import Console

from experiments.ablation.variants import ablation
from relibra_jax.cli.compare import Compare, compare_contenders
from relibra_jax.cli.parsing import parse_options
from relibra_jax.cli.refusals import exit_status

PROGRAM = "python -m experiments.ablation"


def main(args: list[str] | None = None) -> int:
    """Run the ablation.

    Args:
        args: the options; those of the process when None.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    return exit_status(lambda: _run(sys.argv[1:] if args is None else args))


def _run(args: list[str]) -> None:
    default = Compare(out=Path("out/ablation"))
    parse = functools.partial(tyro.cli, Compare, default=default, prog=PROGRAM, description=__doc__)
    compare_contenders(ablation, parse_options(parse, args), Console())


if __name__ == "__main__":
    sys.exit(main())
