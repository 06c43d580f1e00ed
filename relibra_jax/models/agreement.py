"""An error on one process is an error on all, so that none waits for another that has given up."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


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
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.bool_(error is not None)))
        if error is None and failed.size:
            raise ValueError(f"{what}: failed on processes {failed.tolist()} of {jax.process_count()}")
    if error is not None:
        raise error
