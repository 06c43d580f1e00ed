"""The entry point of the console script ``relibra``, which starts without the extra that the commands need."""

import sys
from typing import Final

EXTRA: Final = ("jinja2", "matplotlib", "rich", "tyro")
"""The packages that ``relibra-jax[cli]`` brings."""


def main(args: list[str] | None = None) -> int:
    """Run one command.

    Args:
        args: the command and its options; those of the process when None.

    Returns:
        The exit status: 0, or 2 for bad input and for a missing extra, with one line on standard error.
    """
    try:
        from relibra_jax.cli.commands import run_command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        print(f'error: relibra needs {error.name}: pip install "relibra-jax[cli]"', file=sys.stderr)
        return 2
    return run_command(sys.argv[1:] if args is None else args)
