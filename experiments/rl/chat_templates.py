"""Chat templates: how a model wants its messages written down, as a Jinja template that comes with its tokenizer.

What a template may use is what Hugging Face's documentation promises to writers of templates ("Writing a chat
template"): blocks that take their line's blanks with them, ``break`` and ``continue``, ``raise_exception``,
``strftime_now``, a ``tojson`` that leaves HTML characters alone, and ``generation`` around what an assistant says.
Templates are other people's programs, so they run in Jinja's sandbox.
"""

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what an assistant says; what stands in it is rendered like all else."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja's own extensions have it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def chat_renderer(template: str, special_tokens: Mapping[str, str], *, place: str) -> Callable[[str], str]:
    """Compile a chat template for prompts that are the only message of a chat.

    Args:
        template: the Jinja source of the template.
        special_tokens: the texts of special tokens by their names: ``{"bos_token": "<s>"}``, for instance.
        place: where the template comes from, for messages.

    Returns:
        A function from a prompt to the text of the chat, up to where the assistant's response begins.
        It raises ValueError if the template does, with the template's message.

    Raises:
        ValueError: if the template is not valid Jinja, with the line.

    >>> template = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    >>> chat_renderer(template, {"bos_token": "<s>"}, place="a template")("How many?")
    '<s>[user] How many?'
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        compiled = environment.from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"{place}, line {error.lineno}: {_one_line(error)}") from error

    def render(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        try:
            return compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **special_tokens
            )
        except Exception as error:  # a template is a program of somebody else
            raise ValueError(f"{place}: {_one_line(error)}") from error

    return render


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
