"""Names that a person may have meant."""

import difflib
import itertools
from collections.abc import Iterable


def nearest(name: str, *tables: Iterable[str]) -> str:
    """A hint for an error message.

    >>> nearest("relibre", ["static", "relibra"])
    '; did you mean relibra?'
    """
    near = difflib.get_close_matches(name, itertools.chain(*tables), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
