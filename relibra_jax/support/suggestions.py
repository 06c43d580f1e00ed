"""Suggestions of similar names for error messages about unknown names."""

import difflib
import itertools
from collections.abc import Iterable


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


def did_you_mean(names: Iterable[str]) -> str:
    """Return the clause "; did you mean ...?" with the given names, or the empty string if there are none."""
    alternatives = " or ".join(names)
    return f"; did you mean {alternatives}?" if alternatives else ""
