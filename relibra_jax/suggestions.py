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
    names = {known.casefold(): known for known in itertools.chain(*tables)}
    near = difflib.get_close_matches(name.casefold(), names, n=3)
    return did_you_mean(names[each] for each in near)


def did_you_mean(names: Iterable[str]) -> str:
    """The clause of `suggest_names` for names that are near; the empty string if there are none."""
    meant = " or ".join(names)
    return f"; did you mean {meant}?" if meant else ""
