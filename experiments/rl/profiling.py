"""The profile of one step, for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Write a trace of the block into a folder.

    On the host it names the phases of a step, in programs what the layers do: docs/guides/metrics.md lists both. Calls
    of Python functions, most of a trace otherwise, are left out.

    Args:
        folder: the folder of the trace; None for no trace.
    """
    if folder is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        yield
