"""Raise an error on all processes if one of them fails, so that no process waits for one that has stopped."""

import contextlib
from collections.abc import Iterator

import jax

from relibra_jax.execution.plan_agreement import processes_where


@contextlib.contextmanager
def fail_together(operation: str) -> Iterator[None]:
    """Run the body of the ``with`` statement on every process, and continue only if no process raised an error.

    Args:
        operation: a description of the body, for the error message on the processes that succeeded.

    Raises:
        ValueError: if the body failed on another process; the message gives its number. The process that failed raises
            its own error.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = processes_where(error is not None)
    if error is not None:
        raise error
    if failed.size:
        raise ValueError(f"{operation}: failed on processes {failed.tolist()} of {jax.process_count()}")
