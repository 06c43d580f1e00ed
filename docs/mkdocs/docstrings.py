"""Griffe extension: make docstrings that are written for ``help()`` read well as Markdown.

Doctests become code blocks, so do tables that are aligned by spaces, and headings that are underlined become bold.
"""

import re
from collections.abc import Iterator

import griffe

ALIGNED = re.compile(r"\S {2,}\S")
"""Words that stand apart, as the columns of a table do."""


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines without a blank one, and the blank ones between them."""
    run: list[str] = []
    for line in lines:
        if run and bool(run[-1].strip()) != bool(line.strip()):
            yield run
            run = []
        run.append(line)
    yield run


def fenced(lines: list[str], language: str) -> list[str]:
    """The lines as a code block, at their own indentation."""
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    return [f"{indent}```{language}", *lines, f"{indent}```"]


def to_markdown(text: str) -> str:
    """A docstring whose doctests and tables are code blocks."""
    result: list[str] = []
    for lines in paragraphs(text.splitlines()):
        if len(lines) > 1 and set(lines[1].strip()) == {"-"}:
            result += [f"**{lines[0].strip()}**", ""]
            lines = lines[2:]
        if not lines:
            continue
        if lines[0].lstrip().startswith(">>> "):
            result += fenced(lines, "pycon")
        elif not lines[0].startswith("    ") and sum(bool(ALIGNED.search(line)) for line in lines) * 2 > len(
            lines
        ):
            result += fenced(lines, "text")
        else:
            result += [re.sub(r"(?<=\w)::$", ":", line) for line in lines]
    return "\n".join(result)


class MarkdownDocstrings(griffe.Extension):
    """Rewrite the docstrings of everything that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
