"""Suggestions of similar names for error messages about unknown names."""

import difflib
import itertools
from collections.abc import Iterable, Mapping


def suggest_names(name: str, *tables: Iterable[str]) -> str:
    """Return the end of an error message that suggests names similar to an unknown one.

    Args:
        name: the unknown name.
        tables: collections of the valid names.

    Returns:
        A clause with up to three similar names, or the empty string if none is similar.

    >>> suggest_names("relibre", ["static", "relibra"])
    '; did you mean relibra?'
    """
    names = {valid_name.casefold(): valid_name for valid_name in itertools.chain(*tables)}
    matches = difflib.get_close_matches(name.casefold(), names, n=3)
    return did_you_mean(names[match] for match in matches)


def look_up[Value](label: str, name: str, table: Mapping[str, Value]) -> Value:
    """Return the entry of a table under a name.

    Args:
        label: the beginning of an error message, which names what is looked up, for example ``cluster=``.
        name: the name.
        table: the entries by their valid names.

    Raises:
        ValueError: if the table has no entry of this name. The message suggests similar names.

    >>> look_up("planner ", "relibre", {"static": 1, "relibra": 2})
    Traceback (most recent call last):
    ValueError: planner 'relibre' must be one of static, relibra; did you mean relibra?
    """
    if name not in table:
        raise ValueError(f"{label}{name!r} must be one of {', '.join(table)}{suggest_names(name, table)}")
    return table[name]


def did_you_mean(names: Iterable[str]) -> str:
    """Return the clause "; did you mean ...?" with the given names, or the empty string if there are none."""
    alternatives = " or ".join(names)
    return f"; did you mean {alternatives}?" if alternatives else ""
