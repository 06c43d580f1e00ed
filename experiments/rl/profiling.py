"""Profiles of single steps, for TensorBoard, XProf or Perfetto."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Write a profiler trace of the block into a folder.

    The trace names the phases of a step on the host, and the operations of the layers in programs;
    docs/guides/metrics.md lists these names. It leaves out calls of Python functions, which would be most of it.

    Args:
        folder: the folder of the trace. None writes no trace.
    """
    if folder is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        yield
