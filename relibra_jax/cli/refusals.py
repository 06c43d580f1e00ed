"""How a command refuses bad input: exit status 2, and one line on standard error."""

import sys
from collections.abc import Callable

import jax


def exit_status(command: Callable[[], int | None]) -> int:
    """Run a command and turn what it refuses into an exit status.

    Args:
        command: the command, which raises ValueError or OSError for bad input, and MemoryError, or JAX's error that
            memory is exhausted, for input too large for this machine.

    Returns:
        What the command returns, 0 for None, or 2 after the error's message has gone to standard error as one line.
    """
    try:
        return command() or 0
    except (ValueError, OSError, MemoryError) as error:
        return _refuse(error)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return _refuse(error)


def _refuse(error: Exception) -> int:
    text = " ".join(str(error).splitlines()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    return 2
