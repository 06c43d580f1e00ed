"""The tokenizer of a Hugging Face checkpoint, from the files beside its weights.

``tokenizer.json`` is read by the library tokenizers. Which tokens end a response is said by ``eos_token`` of
``tokenizer_config.json`` and ``eos_token_id`` of ``generation_config.json``, or of ``config.json`` where that has none.
The chat template is ``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.rl.tokens import Tokenizer

if TYPE_CHECKING:
    import tokenizers


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint, with its chat template if there is one.

    Prompts become the one message of a chat. Without a template they are plain text behind what ``tokenizer.json`` puts
    before a text: BOS, or nothing. ``add_bos_token`` of ``tokenizer_config.json`` is not read, as by transformers 5.

    Args:
        folder: the folder of the checkpoint, with ``tokenizer.json``.

    Returns:
        The tokenizer. Its ``pad`` is the pad token, or where there is none, the first of its ``ends``. Responses never
        contain pad and BOS token, unless one of them is an end.

    Raises:
        ValueError: if a file is missing or cannot be read, no token ends a response, the token that does is not in
            ``tokenizer.json``, the chat template is invalid or raises, or the extra ``rl`` is not installed.
    """
    backend = _read_backend(folder / "tokenizer.json")
    settings = _read_settings(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(settings)
    ends = _ends(folder, backend, special_tokens)
    pad, bos = (backend.token_to_id(special_tokens.get(name, "")) for name in ("pad_token", "bos_token"))
    tokenizer = Tokenizer(
        encode_prompt=_prompt_encoder(folder, backend, settings, special_tokens, ends),
        encode_text=lambda text: backend.encode(text, add_special_tokens=False).ids,
        decode_text=lambda tokens: backend.decode(tokens, skip_special_tokens=True),
        ends=ends,
        pad=ends[0] if pad is None else pad,
        size=1 + max([*backend.get_vocab().values(), *ends]),
        never=tuple(token for token in (pad, bos) if token is not None and token not in ends),
    )
    # A template that refuses prompts does so before there is a model.
    tokenizer.encode_prompt("?")
    return tokenizer


def _read_backend(path: Path) -> "tokenizers.Tokenizer":
    try:
        import jinja2  # noqa: F401  # of the same extra
        import tokenizers
    except ImportError as error:
        raise ValueError(f'{path}: tokenizers need the extra rl: pip install -e ".[rl]"') from error
    if not path.is_file():
        raise ValueError(
            f"{path.parent}: no tokenizer.json, and bytes are no tokens for the model of a checkpoint"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{path}: not a tokenizer ({error})") from error
    # What was set for somebody's batches would cut and fill texts silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(settings).__name__}")
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens by name; a token is a string, or an object with its ``content``."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _ends(
    folder: Path, backend: "tokenizers.Tokenizer", special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """The tokens that end a response, the tokenizer's own before those of generation."""
    ends = []
    if "eos_token" in special_tokens:
        text, path = special_tokens["eos_token"], folder / "tokenizer_config.json"
        end = backend.token_to_id(text)
        if end is None:
            raise ValueError(f"{path}: eos_token {text!r} is not in tokenizer.json")
        ends.append(end)
    for name in ("generation_config.json", "config.json"):
        of_file = _read_settings(folder / name).get("eos_token_id")
        if of_file is not None:
            of_file = of_file if isinstance(of_file, list) else [of_file]
            if not all(type(end) is int and end >= 0 for end in of_file):
                raise ValueError(f"{folder / name}: eos_token_id={of_file} must be token ids, 0 or more")
            ends += of_file
            break
    if not ends:
        raise ValueError(
            f"{folder}: no token ends a response: neither eos_token in tokenizer_config.json nor eos_token_id in"
            " generation_config.json or config.json"
        )
    return tuple(dict.fromkeys(ends))


def _prompt_encoder(
    folder: Path,
    backend: "tokenizers.Tokenizer",
    settings: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    ends: tuple[int, ...],
) -> Callable[[str], list[int]]:
    template, place = _chat_template(folder, settings)
    if template is not None:
        from experiments.rl.chat_templates import chat_renderer

        render = chat_renderer(template, special_tokens, place=place)
        # The template has written all special tokens.
        return lambda prompt: backend.encode(render(prompt), add_special_tokens=False).ids

    def encode(prompt: str) -> list[int]:
        encoding = backend.encode(prompt)
        tokens, added = encoding.ids, encoding.special_tokens_mask
        # A response follows: what was put behind the text as its end is none.
        while tokens and added[len(tokens) - 1] and tokens[-1] in ends:
            tokens.pop()
        return tokens

    return encode


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """The template, None without one, and the place where it stands."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    template, place = settings.get("chat_template"), f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(template, list):
        names = [named.get("name") if isinstance(named, dict) else None for named in template]
        if "default" not in names:
            raise ValueError(f"{place}: none is named default, there are {names}")
        template = template[names.index("default")].get("template")
    if not isinstance(template, str | None):
        raise ValueError(f"{place}: expected a text or named texts, found {type(template).__name__}")
    return template, place
