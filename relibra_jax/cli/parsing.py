"""Options parsed by tyro, whose refusals become errors of one line.

tyro prints what it refuses as a box of several lines and exits. Its public interface has nothing else to tell what is
wrong, so the box is read: its first paragraph says it, and options that it names further down are those meant.
"""

import contextlib
import functools
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import tyro

from relibra_jax.cli.refusals import exit_status
from relibra_jax.suggestions import did_you_mean

HELP: Final = frozenset({"-h", "--help"})
WIDE: Final = "100000"
"""Columns in which no message is wrapped: words that are broken over lines could not be put together again."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NO_TEXT: Final = "╭╮╰╯│─ "


def parse_options(parse: Callable[..., Any], args: Sequence[str]) -> Any:
    """Parse options.

    Args:
        parse: one of tyro's parsers with all its arguments but ``args``, for example
            ``functools.partial(tyro.cli, Options)``.
        args: the options as the command line gives them.

    Returns:
        What ``parse`` returns.

    Raises:
        ValueError: if tyro refuses an option or its value: one line that names both and what is allowed.
        SystemExit: if help was asked for, which tyro prints.

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


def run_program(
    main: Callable[[Any], int | None], options: type, args: Sequence[str] | None = None, **about: Any
) -> int:
    """Parse options and run a program with them.

    Args:
        main: the program, a function of its options.
        options: the type of the options, as `tyro.cli` takes it.
        args: the options as the command line gives them; those of the process when None.
        **about: further arguments of `tyro.cli`, for example ``description``.

    Returns:
        The exit status, from `exit_status`.
    """
    parse = functools.partial(tyro.cli, options, **about)
    return exit_status(lambda: main(parse_options(parse, sys.argv[1:] if args is None else args)))


def one_line(box: str) -> str:
    """What a box of tyro's says, as one line.

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
    # Behind the title, paragraphs are parted by blank lines and by rules, of dashes where a terminal has no more.
    paragraphs = [list(group) for text, group in itertools.groupby(lines[1:], key=_is_text) if text]
    if not paragraphs:
        return " ".join(lines)
    message, *rest = (" ".join(paragraphs[0]), *itertools.chain(*paragraphs[1:]))
    given = message.replace(",", " ").split()
    options = [line for line in rest if line.startswith("--") and line.split()[0] not in given]
    if message.startswith("Error parsing "):
        name, _, problem = message.removeprefix("Error parsing ").partition(": ")
        # What a dataclass refuses names the number itself.
        option = next((line for line in options if line.startswith(name)), name)
        return f"{option}: {problem}" if name.startswith("-") else problem
    return message + did_you_mean(dict.fromkeys(line.split()[0].rstrip(",") for line in options))


def _is_text(line: str) -> bool:
    return bool(line.strip("-"))


@contextlib.contextmanager
def _wide_terminal(*, unless: bool) -> Iterator[None]:
    """Let what is printed be as wide as it is, unless it is help."""
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
