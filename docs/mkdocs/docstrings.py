"""Griffe extension: make docstrings that are written for ``help()`` read well as Markdown.

Doctests and tables that are aligned by spaces become code blocks, and underlined headings become bold. A name in
backticks becomes a link where the reference shows what it names.
"""

import re
from collections.abc import Iterator

import griffe

NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
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


def linked(line: str, scope: griffe.Object) -> str:
    """The line with a link at each name that is known in the scope and that the site shows."""

    def link(match: re.Match) -> str:
        name = match[1]
        try:
            path = name if name.startswith(("relibra_jax.", "pallas_kernels.")) else scope.resolve(name)
        except griffe.NameResolutionError:
            return match[0]
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'

    return NAME.sub(link, line)


def to_markdown(text: str, scope: griffe.Object) -> str:
    """A docstring whose doctests and tables are code blocks, and whose names are links.

    Args:
        text: the docstring.
        scope: the object that it describes.
    """
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
            result += [linked(re.sub(r"(?<=\w)::$", ":", line), scope) for line in lines]
    return "\n".join(result)


class MarkdownDocstrings(griffe.Extension):
    """Rewrite the docstrings of everything that is loaded, and show the columns of an outcome as attributes."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs) -> None:
        for name, member in list(cls.members.items()):
            if isinstance(member, griffe.Function) and any(
                decorator.callable_path.endswith(".column") for decorator in member.decorators
            ):
                cls.set_member(
                    name,
                    griffe.Attribute(
                        name,
                        lineno=member.lineno,
                        endlineno=member.endlineno,
                        annotation=member.returns,
                        docstring=member.docstring,
                    ),
                )

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value, obj)
