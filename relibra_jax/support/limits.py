"""Range checks for numbers that users pass: int32, seeds, costs, and the memory of this machine.

The library checks numbers where data enters: in a topology, a file or a command line.
"""

import contextlib
import math
import os
import sys
from numbers import Integral
from pathlib import Path
from typing import Final

INT32_MAX: Final = 2**31 - 1
"""The largest int32, the dtype of expert ids, slots and token copies."""
SEED_MAX: Final = 2**32 - 1
"""The largest seed. Without JAX's 64-bit mode a random key uses only the low 32 bits of its seed, so a larger or a
negative seed would give the same random numbers as a smaller one."""
COST_MAX: Final = 1e9
"""The largest cost. In float32, a larger one would absorb the terms that are added to it."""


def check_integer(name: str, value: object, *, least: int, most: int = INT32_MAX) -> None:
    """Raise ValueError unless ``value`` is an integer from ``least`` to ``most``.

    Args:
        name: the name of the number, for the error message.
        value: the number. Booleans are not integers here.
        least: the smallest allowed value.
        most: the largest allowed value.

    Raises:
        ValueError: if ``value`` is not an integer in this range. The message has the name, the value and the range.

    >>> check_integer("tile", 0, least=1)
    Traceback (most recent call last):
    ValueError: tile=0 must be an integer of at least 1 and at most 2147483647
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least} and at most {most}")


def check_seed(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is an integer from 0 to `SEED_MAX`."""
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
    """Raise ValueError unless ``value`` is from 0 to `COST_MAX`."""
    if not 0 <= value <= COST_MAX:
        raise ValueError(f"{name}={value} must be at least 0 and at most {COST_MAX:g}")


def check_memory(purpose: str, needed: int) -> None:
    """Raise ValueError if this machine has too little memory for an allocation.

    Args:
        purpose: what the memory is for, with the numbers that make it large.
        needed: the least number of bytes that are needed.

    Raises:
        ValueError: if ``needed`` exceeds the memory of this machine. The message has both sizes.

    >>> check_memory("a table of 2**60 rows", 2**63)
    Traceback (most recent call last):
    ValueError: a table of 2**60 rows needs 8589934592 GiB of memory, but this machine has ...
    """
    available = machine_memory()
    if needed > available:
        raise ValueError(
            f"{purpose} needs {-(-needed // 2**30)} GiB of memory, but this machine has {available // 2**30} GiB"
        )


def machine_memory() -> int:
    """Return the bytes of memory that this process may use; `sys.maxsize` if the system does not say."""
    sizes = [sys.maxsize]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ValueError, OSError):  # the limit of a container; "max" if it has none
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)
