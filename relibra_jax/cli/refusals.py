"""How a command refuses bad input: exit status 2, and one line on standard error."""

import sys
from collections.abc import Callable


def exit_status(command: Callable[[], object]) -> int:
    """Run a command and turn what it refuses into an exit status.

    Args:
        command: the command, which raises ValueError or OSError for bad input.

    Returns:
        0, or 2 after the error's message has gone to standard error.
    """
    try:
        command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
