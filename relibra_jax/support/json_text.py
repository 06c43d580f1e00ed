"""JSON from outside: every text that cannot be parsed is a ValueError."""

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: if it is not JSON, or is nested so deeply that Python cannot read it.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
