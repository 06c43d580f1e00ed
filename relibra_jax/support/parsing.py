"""Parsing of options with a tyro parser, with its error boxes turned into errors of one line.

For invalid options tyro prints a box of several lines and exits. Its public interface has no other way to learn what is
wrong, so this module reads the box: the first paragraph is the message, and options named in later paragraphs are
tyro's suggestions.
"""

import contextlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from relibra_jax.support.suggestions import did_you_mean

HELP: Final = frozenset({"-h", "--help"})
WIDE: Final = "100000"
"""A terminal width in columns at which tyro wraps no message. Words that it breaks over lines cannot be rejoined."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NO_TEXT: Final = "╭╮╰╯│─ "


def parse_options(parse: Callable[..., Any], args: Sequence[str]) -> Any:
    """Parse options, and turn a tyro error into a ValueError of one line.

    Args:
        parse: a tyro parser with all its arguments bound except ``args``, for example
            ``functools.partial(tyro.cli, Options)``.
        args: the options, as strings of the command line.

    Returns:
        The parsed options, as ``parse`` returns them.

    Raises:
        ValueError: if tyro rejects an option or its value. The message is one line that names both and what is allowed.
        SystemExit: if ``args`` asks for help, which tyro prints.

    >>> import tyro
    >>> def main(steps: int = 1): ...
    >>> parse_options(lambda args: tyro.cli(main, args=args), ["--steps", "many"])
    Traceback (most recent call last):
    ValueError: --steps INT: invalid literal for int() with base 10: 'many'
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), _wide_terminal(unless=bool(HELP & set(args))):
            return parse(args=args)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise ValueError(one_line(box.getvalue()))


def one_line(box: str) -> str:
    """Convert an error box of tyro to a message of one line.

    >>> print(one_line('''
    ... ╭─ Unrecognized options ────────────────╮
    ... │ Unrecognized options: --sead, 3       │
    ... │ ───────────────────────────────────── │
    ... │ Perhaps you meant:                    │
    ... │     --seed INT                        │
    ... │         The seed.                     │
    ... ╰───────────────────────────────────────╯'''))
    Unrecognized options: --sead, 3; did you mean --seed?
    """
    lines = [line.strip(_NO_TEXT) for line in _COLOUR.sub("", box).strip().splitlines()]
    # After the title, blank lines and rules separate the paragraphs. Some terminals draw the rules with dashes.
    paragraphs = [list(group) for text, group in itertools.groupby(lines[1:], key=_is_text) if text]
    if not paragraphs:
        return " ".join(lines)
    message, *rest = (" ".join(paragraphs[0]), *itertools.chain(*paragraphs[1:]))
    words = message.replace(",", " ").split()
    options = [line for line in rest if line.startswith("--") and line.split()[0] not in words]
    if message.startswith("Error parsing "):
        name, _, problem = message.removeprefix("Error parsing ").partition(": ")
        # An error that the dataclass itself raises names the field, and needs no option name before it.
        option = next((line for line in options if line.startswith(name)), name)
        return f"{option}: {problem}" if name.startswith("-") else problem
    return message + did_you_mean(dict.fromkeys(line.split()[0].rstrip(",") for line in options))


def _is_text(line: str) -> bool:
    return bool(line.strip("-"))


@contextlib.contextmanager
def _wide_terminal(*, unless: bool) -> Iterator[None]:
    """Set a terminal width at which tyro wraps nothing, except when ``unless`` is true (for help pages)."""
    before = os.environ.get("COLUMNS")
    if not unless:
        os.environ["COLUMNS"] = WIDE
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before
