"""The results of a step: lines of JSON on its standard output, which the process that started it reads."""

import json
from typing import Any, Final

MARK: Final = "FACT "
"""The prefix of lines with results; other lines are the output of libraries."""


def print_facts(**facts: Any) -> None:
    """Print results as one line, and flush it, so that it is not lost if the step is killed later.

    >>> print_facts(rows=8, error=0.5)
    FACT {"rows": 8, "error": 0.5}
    """
    print(MARK + json.dumps(facts), flush=True)


def facts_of(line: str) -> dict[str, Any] | None:
    """Return the results in a line of output, or None if it has none.

    >>> facts_of('FACT {"rows": 8}'), facts_of("a warning")
    ({'rows': 8}, None)
    """
    return json.loads(line[len(MARK) :]) if line.startswith(MARK) else None
