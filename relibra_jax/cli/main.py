"""The entry point of the console script ``relibra``.

The commands need the packages of the extra ``cli``. This module imports them only when a command runs, so that a
missing package ends with one line that says how to install it.
"""

import sys
from typing import Final

EXTRA: Final = ("jinja2", "matplotlib", "rich", "tyro")
"""The packages that ``relibra-jax[cli]`` installs."""


def main(args: list[str] | None = None) -> int:
    """Run one command of ``relibra``.

    Args:
        args: the command and its options. None takes the arguments of the process.

    Returns:
        The exit status: 0 for success, or 2 after bad input or with a missing extra package. With status 2, one line on
        standard error says why.
    """
    try:
        from relibra_jax.cli.commands import run_command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        print(f'error: relibra needs {error.name}: pip install "relibra-jax[cli]"', file=sys.stderr)
        return 2
    return run_command(sys.argv[1:] if args is None else args)
