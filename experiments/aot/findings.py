"""The parts that all checks of compiled programs share: reading a program, and a line of the table."""

from collections.abc import Iterable
from typing import NamedTuple

import jax

from experiments.aot.bytes import Sent
from experiments.aot.hlo import Program
from experiments.ladder.facts import print_facts


class Finding(NamedTuple):
    """A line of the table: one checked property of one program."""

    program: str
    """The name of the program."""
    requirement: str
    """The property that the program must have."""
    result: str
    """The measured value of the property."""
    good: bool | None
    """Whether the program has the property; None if the value is only reported."""


def print_findings(findings: Iterable[Finding]) -> None:
    """Print the findings of a step as its results.

    Raises:
        ValueError: if a program lacks a property.
    """
    found = list(findings)
    for finding in found:
        print_facts(**finding._asdict())
    if failed := sum(finding.good is False for finding in found):
        raise ValueError(f"{failed} of {len(found)} checks failed")


def read_compiled(compiled: jax.stages.Compiled) -> tuple[Program, int]:
    """Parse a compiled program; returns it and its temporary memory in bytes.

    Raises:
        RuntimeError: if the backend provides neither the program's text nor its memory.
    """
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("this backend does not provide the text or the memory use of the compiled program")
    return Program.parse(text), memory.temp_size_in_bytes


def judge_bytes(program: str, sent: Sent, expected: Sent) -> Finding:
    """Check that a program sends exactly the bytes that follow from its buffer sizes.

    Args:
        program: the name of the program.
        sent: the counted bytes that a device sends.
        expected: the bytes that it should send.
    """
    wrong = [key for key in sorted({*sent, *expected}) if sent.get(key, 0) != expected.get(key, 0)]
    result = ", ".join(
        f"{content} ({axes}) {size / 1e6:.1f}" for (content, axes), size in sorted(sent.items())
    )
    if wrong:
        result = ", ".join(
            f"{content} ({axes}): {sent.get((content, axes), 0)}, expected {expected.get((content, axes), 0)}"
            for content, axes in wrong
        )
    return Finding(
        program, "MB sent by a device: exactly those that follow from its buffer sizes", result, not wrong
    )
