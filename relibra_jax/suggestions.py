"""Names that a person may have meant."""

import difflib
import itertools
from collections.abc import Iterable


def suggest_names(name: str, *tables: Iterable[str]) -> str:
    """The end of an error message that suggests names near to an unknown one.

    Args:
        name: the name that is in no table.
        tables: the names that are known.

    Returns:
        A clause with up to three names, or the empty string if none is near.

    >>> suggest_names("relibre", ["static", "relibra"])
    '; did you mean relibra?'
    """
    return did_you_mean(difflib.get_close_matches(name, itertools.chain(*tables), n=3))


def did_you_mean(names: Iterable[str]) -> str:
    """The clause of `suggest_names` for names that are near; the empty string if there are none."""
    meant = " or ".join(names)
    return f"; did you mean {meant}?" if meant else ""
