"""What every check of a compiled program starts and ends with: the program as read, and a line of the table."""

from typing import NamedTuple

import jax

from experiments.aot.bytes import Sent
from experiments.aot.hlo import Program


class Finding(NamedTuple):
    """A line of the table; ``good`` is None for figures that are stated without a promise."""

    program: str
    promise: str
    found: str
    good: bool | None


def read_compiled(compiled: jax.stages.Compiled) -> tuple[Program, int]:
    """The program and its temporary memory in bytes."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("this backend says neither what it compiled nor what memory that takes")
    return Program.parse(text), memory.temp_size_in_bytes


def judge_bytes(program: str, sent: Sent, expected: Sent) -> Finding:
    """Whether a program sends what its buffer sizes say, to the byte."""
    wrong = [key for key in sorted({*sent, *expected}) if sent.get(key, 0) != expected.get(key, 0)]
    found = ", ".join(f"{what} ({axes}) {size / 1e6:.1f}" for (what, axes), size in sorted(sent.items()))
    if wrong:
        found = ", ".join(
            f"{what} ({axes}): {sent.get((what, axes), 0)}, expected {expected.get((what, axes), 0)}"
            for what, axes in wrong
        )
    return Finding(
        program, "MB sent by a device, as the sizes of its buffers say to the byte", found, not wrong
    )
