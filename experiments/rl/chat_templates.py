"""Chat templates: the Jinja template of a tokenizer that formats messages as its model expects them.

Templates may use what Hugging Face's documentation promises ("Writing a chat template"): trimmed blocks, ``break`` and
``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML characters, and
``generation`` around the assistant's messages. Templates are code by other people, so they run in Jinja's sandbox, and
with limits of time and of size.
"""

import functools
import itertools
import json
import resource
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS: Final = 1 << 20
"""The most characters of a template and of a rendered chat."""
MOST_SECONDS: Final = 10.0
"""The most seconds in which a template is compiled, or renders a prompt."""
MOST_BYTES: Final = 1 << 30
"""The most memory of the process that renders."""


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


def chat_renderer(template: str, special_tokens: Mapping[str, str], *, place: str) -> Callable[..., str]:
    """Compile a chat template into a function that renders a chat.

    Args:
        template: the Jinja source of the template.
        special_tokens: the text of each special token by its name, for example ``{"bos_token": "<s>"}``.
        place: the origin of the template, for error messages.

    Returns:
        A function from the texts of the messages, the first from the user, the second from the assistant and so on in
        turn, to the text of the chat, up to the start of the assistant's next response. With ``messages=``, pairs of
        role and content, it renders these messages. It raises ValueError, with the
        template's message, if the template raises, takes more than `MOST_SECONDS`, or gives more than
        `MOST_CHARACTERS`.

    Raises:
        ValueError: if the template is too long or not valid Jinja. The message names the line.

    >>> template = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    >>> chat_renderer(template, {"bos_token": "<s>"}, place="a template")("How many?")
    '<s>[user] How many?'
    >>> chat_renderer(template, {"bos_token": "<s>"}, place="a template")("How many?", "Two.", "And now?")
    '<s>[user] How many?[assistant] Two.[user] And now?'
    """
    if len(template) > MOST_CHARACTERS:
        raise ValueError(f"{place}: a template of {len(template)} characters; at most {MOST_CHARACTERS}")
    renderer = _Renderer(place)
    renderer.ask({"template": template, "special_tokens": dict(special_tokens)})

    def render(*texts: str, messages: Iterable[tuple[str, str]] = ()) -> str:
        return renderer.ask(
            {"messages": [*messages, *zip(itertools.cycle(("user", "assistant")), texts, strict=False)]}
        )

    return render


class _Renderer:
    """A process of its own that renders one template, with limits of time and memory. It ends with this object."""

    def __init__(self, place: str):
        self._place, self._lock = place, threading.Lock()
        # -P: the modules beside this file must not take the places of others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, request: Mapping[str, Any]) -> str:
        """Send a request and return its answer.

        Raises:
            ValueError: if the template fails, or exceeds a limit.
        """
        with self._lock:
            questions, answers = self._process.stdin, self._process.stdout
            assert questions is not None
            assert answers is not None
            try:
                questions.write(json.dumps(request) + "\n")
                questions.flush()
                if not select.select([answers], [], [], MOST_SECONDS)[0]:
                    self._process.kill()
                    raise ValueError(f"{self._place}: it takes more than {MOST_SECONDS:g} s")
                answer = json.loads(answers.readline() or '{"error": "its process has ended"}')
            except BrokenPipeError as error:
                raise ValueError(f"{self._place}: its process has ended") from error
        if "error" in answer:
            raise ValueError(f"{self._place}{answer['error']}")
        if len(answer["text"]) > MOST_CHARACTERS:
            raise ValueError(f"{self._place}: it gives more than {MOST_CHARACTERS} characters")
        return answer["text"]


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def _answer_requests() -> None:
    """Answer requests, a line each, in the process of a `_Renderer`."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    render: Callable[[list[list[str]]], str] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if render is None:
                render, text = _compile(request["template"], request["special_tokens"]), ""
            else:
                text = render(request["messages"])
            answer = {"text": text}
        except TemplateSyntaxError as error:
            answer = {"error": f", line {error.lineno}: {_one_line(error)}"}
        except Exception as error:  # a template may raise anything
            answer = {"error": f": {_one_line(error)}"}
        print(json.dumps(answer), flush=True)


def _compile(template: str, special_tokens: Mapping[str, str]) -> Callable[[list[list[str]]], str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    compiled = environment.from_string(template)

    def render(pairs: list[list[str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in pairs]
        return compiled.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **special_tokens
        )

    return render


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    _answer_requests()
