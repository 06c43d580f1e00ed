"""Chat templates: the Jinja template of a tokenizer that formats messages as its model expects them.

Templates may use what Hugging Face's documentation promises ("Writing a chat template"): trimmed blocks, ``break`` and
``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML characters, and
``generation`` around the assistant's messages. Templates are code by other people, so they run in Jinja's sandbox.
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
    """The tag ``{% generation %}``, which marks the assistant's messages. Its content is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012  # the form that Jinja's own extensions use

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def chat_renderer(template: str, special_tokens: Mapping[str, str], *, place: str) -> Callable[[str], str]:
    """Compile a chat template into a function that renders a prompt as the only message of a chat.

    Args:
        template: the Jinja source of the template.
        special_tokens: the text of each special token by its name, for example ``{"bos_token": "<s>"}``.
        place: the origin of the template, for error messages.

    Returns:
        A function from a prompt to the text of the chat, up to the start of the assistant's response. It raises
        ValueError, with the template's message, if the template raises.

    Raises:
        ValueError: if the template is not valid Jinja. The message names the line.

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
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{place}: {_one_line(error)}") from error

    return render


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
