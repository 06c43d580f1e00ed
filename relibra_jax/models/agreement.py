"""An error on one process is an error on all, so that none waits for another that has given up."""

import contextlib
from collections.abc import Iterator

import jax

from relibra_jax.execution.plan_agreement import processes_where


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Do something on every process, each for itself, and go on only if all of them have managed.

    Args:
        what: what is done, for the error on processes that have managed.

    Raises:
        ValueError: if another process has failed, with its number. On that one, its own error.
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
        raise ValueError(f"{what}: failed on processes {failed.tolist()} of {jax.process_count()}")
