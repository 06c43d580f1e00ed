"""What a step finds out: lines of JSON on its standard output, for the process that started it."""

import json
from typing import Any, Final

MARK: Final = "FACT "
"""How a line begins that holds a fact; all other output is what libraries print."""


def say(**facts: Any) -> None:
    """Print facts as one line, at once: a step that is killed later has said them.

    >>> say(rows=8, error=0.5)
    FACT {"rows": 8, "error": 0.5}
    """
    print(MARK + json.dumps(facts), flush=True)


def facts_of(line: str) -> dict[str, Any] | None:
    """The facts of a line of output; None if it holds none.

    >>> facts_of('FACT {"rows": 8}'), facts_of("a warning")
    ({'rows': 8}, None)
    """
    return json.loads(line[len(MARK) :]) if line.startswith(MARK) else None
