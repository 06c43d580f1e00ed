"""The columns of a comparison. Each is one method of `relibra_jax.evaluation.outcome.Outcome`.

The method's name is the name in the JSON file, its docstring the meaning, its result the number. The decorator `column`
adds the heading and the text of a cell. The table, the HTML page, the JSON file and the site read these records.
"""

import functools
from collections.abc import Callable
from typing import Any

type Cell = Callable[[Any], str]
"""A function that makes the text of a cell from an outcome."""


class Column[Number](functools.cached_property[Number]):
    """A number of an outcome, which is computed when it is first read. The decorator `column` makes one."""

    def __init__(
        self, compute: Callable[[Any], Number], heading: str, cell: Cell, balanced: Cell, with_residents: bool
    ) -> None:
        super().__init__(compute)
        self.name, self.meaning = compute.__name__, " ".join((compute.__doc__ or "").split())
        self.heading, self.cell, self.balanced = heading, cell, balanced
        self.with_residents = with_residents


def column[Number](
    heading: str = "",
    cell: Cell = str,
    *,
    balanced: Cell = lambda outcome: "",
    with_residents: bool = False,
) -> Callable[[Callable[[Any], Number]], Column[Number]]:
    """Make a decorator that turns a method of an outcome into a `Column`.

    Args:
        heading: the heading in the table. Empty for a number that only the JSON file has.
        cell: the text of the cell of an outcome.
        balanced: the text of the cell of the perfectly balanced run, from any outcome on the same batches.
        with_residents: whether the table has the column only if there are resident slots.

    >>> class Sum:
    ...     @column("1 + 2", lambda outcome: f"{outcome.total:.1f}")
    ...     def total(self) -> int:
    ...         '''The sum of both numbers.'''
    ...         return 1 + 2
    >>> Sum().total, Sum.total.heading, Sum.total.cell(Sum()), Sum.total.meaning
    (3, '1 + 2', '3.0', 'The sum of both numbers.')
    """
    return lambda compute: Column(compute, heading, cell, balanced, with_residents)
