"""What a number may be: the limits of int32, of seeds, of finite costs, and of this machine's memory.

Numbers are held to them at the edges where data enters: a topology, a file, a command line.
"""

import contextlib
import math
import os
import sys
from numbers import Integral
from pathlib import Path
from typing import Final

INT32_MAX: Final = 2**31 - 1
"""Expert ids, slots and token copies are int32."""
SEED_MAX: Final = 2**32 - 1
"""Without JAX's 64-bit mode a random key has the low 32 bits of its seed: larger seeds, and negative ones, would draw
what a smaller one draws."""
COST_MAX: Final = 1e9
"""Beyond it a cost would swallow, in float32, whatever it is weighed against."""


def check_integer(name: str, value: object, *, least: int, most: int = INT32_MAX) -> None:
    """Raise unless ``value`` is an integer in its range.

    Args:
        name: what the number is called where it was given.
        value: the number; booleans are none.
        least: the smallest that is allowed.
        most: the largest that is allowed.

    Raises:
        ValueError: if it is something else, with the name, the value and the range.

    >>> check_integer("tile", 0, least=1)
    Traceback (most recent call last):
    ValueError: tile=0 must be an integer of at least 1 and at most 2147483647
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least} and at most {most}")


def check_seed(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a seed that draws what no other seed draws: 0 to `SEED_MAX`."""
    check_integer(name, value, least=0, most=SEED_MAX)


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is above 0 and finite.

    >>> check_positive("context", float("inf"))
    Traceback (most recent call last):
    ValueError: context=inf must be positive and finite
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be positive and finite")


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is 0 or more, and float32 holds it with room for what it is multiplied by."""
    if not 0 <= value <= COST_MAX:
        raise ValueError(f"{name}={value} must be at least 0 and at most {COST_MAX:g}")


def check_memory(purpose: str, needed: int) -> None:
    """Raise before memory is allocated of which this machine has too little.

    Args:
        purpose: what the memory is for, with the numbers that make it large.
        needed: the bytes that are needed at least.

    Raises:
        ValueError: if they are more than the machine's memory, with both sizes.

    >>> check_memory("a table of 2**60 rows", 2**63)
    Traceback (most recent call last):
    ValueError: a table of 2**60 rows needs 8589934592 GiB of memory, this machine has ...
    """
    there = machine_memory()
    if needed > there:
        raise ValueError(
            f"{purpose} needs {-(-needed // 2**30)} GiB of memory, this machine has {there // 2**30} GiB"
        )


def machine_memory() -> int:
    """The bytes of memory that this process may have at most; unlimited where the system does not tell."""
    sizes = [sys.maxsize]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ValueError, OSError):  # in a container; "max" where it has no limit of its own
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)
