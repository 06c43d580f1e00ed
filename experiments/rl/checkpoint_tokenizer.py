"""The tokenizer of a Hugging Face checkpoint, read from the files beside its weights.

The library tokenizers reads ``tokenizer.json``. The tokens that end a response are ``eos_token`` of
``tokenizer_config.json``, and ``eos_token_id`` of ``generation_config.json`` (or of ``config.json`` if the former has
none). The chat template is ``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from experiments.rl.tokens import Prompt, Tokenizer, plain_text
from relibra_jax.support.json_text import parse_json

if TYPE_CHECKING:
    import tokenizers

TURN: Final = "\ue000"
"""The text that stands for the policy's turn when a template renders a reply: a character of private use."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint, with its chat template if it has one.

    With a chat template, a prompt is the first message of a chat or a whole chat, and a reply is a further message of
    the user: every template has users, but tools only answer calls in the model's own format. Without one, both are
    plain text, and a prompt is preceded by what ``tokenizer.json`` puts before a text: BOS or nothing. Like
    transformers 5, this ignores ``add_bos_token`` of ``tokenizer_config.json``.

    Args:
        folder: the folder of the checkpoint, with ``tokenizer.json``.

    Returns:
        The tokenizer. Its ``pad`` is the pad token, or the first of its ``ends`` if it has none. Responses never
        contain the pad token or the BOS token, unless that token is one of the ``ends``.

    Raises:
        ValueError: if a file is missing or cannot be read, no token ends a response, an end token is not in
            ``tokenizer.json``, the chat template is invalid or raises, or the extra ``rl`` is not installed.
    """
    backend = _read_backend(folder / "tokenizer.json")
    settings = _read_settings(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(settings)
    ends = _ends(folder, backend, special_tokens)
    pad, bos = (backend.token_to_id(special_tokens.get(name, "")) for name in ("pad_token", "bos_token"))
    encode_prompt, encode_reply = _encoders(folder, backend, settings, special_tokens, ends)
    tokenizer = Tokenizer(
        encode_prompt=encode_prompt,
        encode_text=lambda text: backend.encode(text, add_special_tokens=False).ids,
        encode_reply=encode_reply,
        decode_text=lambda tokens: backend.decode(tokens, skip_special_tokens=True),
        ends=ends,
        pad=ends[0] if pad is None else pad,
        size=1 + max([*backend.get_vocab().values(), *ends]),
        never=tuple(token for token in (pad, bos) if token is not None and token not in ends),
    )
    # A template that rejects all prompts fails here, before the model is loaded.
    tokenizer.encode_prompt("?")
    return tokenizer


def _read_backend(path: Path) -> "tokenizers.Tokenizer":
    try:
        import jinja2  # noqa: F401  # part of the same extra
        import tokenizers
    except ImportError as error:
        raise ValueError(f'{path}: reading a tokenizer needs the extra rl: pip install -e ".[rl]"') from error
    if not path.is_file():
        raise ValueError(f"{path.parent}: no tokenizer.json, which the model of this checkpoint needs")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from error
    # Truncation and padding that were saved with the tokenizer would silently change texts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. A missing file gives an empty object."""
    if not path.is_file():
        return {}
    try:
        settings = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(settings).__name__}")
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Get the text of each special token by its name. A token is a string, or an object with its ``content``."""
    tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _ends(
    folder: Path, backend: "tokenizers.Tokenizer", special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """Get the tokens that end a response: the tokenizer's own first, then those of the generation config."""
    ends = []
    if "eos_token" in special_tokens:
        text, path = special_tokens["eos_token"], folder / "tokenizer_config.json"
        end = backend.token_to_id(text)
        if end is None:
            raise ValueError(f"{path}: eos_token {text!r} is not in tokenizer.json")
        ends.append(end)
    for name in ("generation_config.json", "config.json"):
        ids = _read_settings(folder / name).get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(end) is int and end >= 0 for end in ids):
                raise ValueError(f"{folder / name}: eos_token_id={ids} must be token ids, 0 or more")
            ends += ids
            break
    if not ends:
        raise ValueError(
            f"{folder}: no token ends a response: set eos_token in tokenizer_config.json, or eos_token_id in"
            " generation_config.json or config.json"
        )
    return tuple(dict.fromkeys(ends))


def _encoders(
    folder: Path,
    backend: "tokenizers.Tokenizer",
    settings: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    ends: tuple[int, ...],
) -> tuple[Callable[[Prompt], list[int]], Callable[[str], list[int]]]:
    """Make the functions that encode a prompt and a reply."""
    template, place = _chat_template(folder, settings)

    def encode_text(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    if template is not None:
        from experiments.rl.chat_templates import chat_renderer

        render = chat_renderer(template, special_tokens, place=place)

        def encode_reply(reply: str) -> list[int]:
            _, turn, rest = render("?", TURN, reply).partition(TURN)
            if not turn:
                raise ValueError(
                    f"{place}: it leaves out the assistant's message before the last of the user"
                )
            tokens = encode_text(rest)
            # The policy's turn has its end already. Templates may put blanks before it.
            for end, token in enumerate(tokens):
                if token in ends:
                    return tokens[end + 1 :]
                if backend.decode([token], skip_special_tokens=False).strip():
                    break
            return tokens

        def encode_chat(prompt: Prompt) -> list[int]:
            # The template writes all special tokens itself.
            return encode_text(render(prompt) if isinstance(prompt, str) else render(messages=prompt))

        return encode_chat, encode_reply

    def encode_prompt(prompt: Prompt) -> list[int]:
        encoding = backend.encode(plain_text(prompt))
        tokens, added = encoding.ids, encoding.special_tokens_mask
        # The response follows the prompt, so drop an end token that the tokenizer added after the text.
        while tokens and added[len(tokens) - 1] and tokens[-1] in ends:
            tokens.pop()
        return tokens

    return encode_prompt, encode_text


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """Find the chat template, None if there is none, and the file that has it."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    template, place = settings.get("chat_template"), f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(template, list):
        names = [entry.get("name") if isinstance(entry, dict) else None for entry in template]
        if "default" not in names:
            raise ValueError(f"{place}: none of the templates {names} is named default")
        template = template[names.index("default")].get("template")
    if not isinstance(template, str | None):
        raise ValueError(f"{place}: expected a text or named texts, found {type(template).__name__}")
    return template, place
