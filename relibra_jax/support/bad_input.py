"""How a command reports bad input: exit status 2, and one line on standard error."""

import sys
from collections.abc import Callable

import jax


def exit_status(command: Callable[[], int | None]) -> int:
    """Run a command, and convert its errors about the input to an exit status.

    Args:
        command: the command. It raises ValueError or OSError for bad input. For input that is too large for this
            machine it raises MemoryError, or JAX raises its error that memory is exhausted.

    Returns:
        The status that the command returns, with 0 for None; or 2 after one of these errors, whose message is printed
        on standard error as one line.
    """
    try:
        return command() or 0
    except (ValueError, OSError, MemoryError) as error:
        return _report_error(error)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return _report_error(error)


def _report_error(error: Exception) -> int:
    text = " ".join(str(error).splitlines()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    return 2
