"""Settings as plain values, as JSON and TOML have them, and back: every value is checked against its field's type."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from relibra_jax.support.suggestions import suggest_names

NOTHING: Final = "none"
"""The text that stands for None where a setting may be None: TOML has no such value."""


def plain_settings(config: Any) -> dict[str, Any]:
    """Return all settings of a dataclass as JSON has them."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with one dotted name for each value.

    >>> flat({"steps": 3, "critic": {"width": 64}})
    {'steps': 3, 'critic.width': 64}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        result |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return result


@functools.cache
def setting_types(kind: type) -> Mapping[str, Any]:
    """Return the type of every setting of a dataclass by its dotted name.

    >>> from relibra_jax.evaluation import Ranks
    >>> setting_types(Ranks)["nodes"]
    <class 'int'>
    """
    return types.MappingProxyType(dict(_types(kind, "")))


def _types(kind: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _types(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def check_name(name: str, kind: type) -> Any:
    """Return the type of a setting.

    Args:
        name: the dotted name of the setting.
        kind: the dataclass.

    Raises:
        ValueError: if there is no such setting. The message suggests similar names.
    """
    known = setting_types(kind)
    if name not in known:
        raise ValueError(f"{name} is not a setting{suggest_names(name, known)}")
    return known[name]


def make_settings[Settings](kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Make a dataclass from plain settings. Fields that are not given have their defaults.

    Args:
        kind: the dataclass, whose fields may be dataclasses.
        settings: the values by dotted name, as `flat` returns them.

    Raises:
        ValueError: if a name is unknown, a value has another type than its field, or ``kind`` rejects the values.

    >>> from relibra_jax.evaluation import Ranks
    >>> make_settings(Ranks, {"nodes": "two"})
    Traceback (most recent call last):
    ValueError: nodes='two' must be of type int
    """
    return kind(**_fields(kind, _converted(kind, settings)))


def unchecked_settings[Settings](kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Make a dataclass as `make_settings` does, without its own check: options may mend settings that do not fit.

    Args:
        kind: the dataclass. All its fields have defaults, which fit together.
        settings: the values by dotted name.

    Raises:
        ValueError: if a name is unknown, or a value has another type than its field.
    """
    result = object.__new__(kind)
    for name, value in (vars(kind()) | _fields(kind, _converted(kind, settings))).items():
        object.__setattr__(result, name, value)
    return result


def _converted(kind: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: convert(name, value, check_name(name, kind)) for name, value in settings.items()}


def _fields(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        head, dot, rest = name.partition(".")
        if dot:
            parts.setdefault(head, {})[rest] = value
        else:
            fields[head] = value
    hints = typing.get_type_hints(kind)
    return fields | {name: hints[name](**_fields(hints[name], part)) for name, part in parts.items()}


def convert(name: str, value: Any, hint: Any) -> Any:
    """Convert a plain value to the type of its field: lists to tuples, texts to paths, integers to floats.

    Args:
        name: the dotted name of the setting, for errors.
        value: the value.
        hint: the type: bool, int, float, str, Path, a tuple of one of them, or one of them or None.

    Raises:
        ValueError: if the value has another type.
    """
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in allowed and value in (None, NOTHING):
        return None
    for kind in allowed:
        if typing.get_origin(kind) is tuple and isinstance(value, list):
            return tuple(convert(name, element, typing.get_args(kind)[0]) for element in value)
        if kind is float and type(value) is int:
            return float(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
        if type(value) is kind:
            return value
    names = [NOTHING if kind is types.NoneType else _name(kind) for kind in allowed]
    raise ValueError(f"{name}={value!r} must be of type {' or '.join(names)}")


def _name(kind: Any) -> str:
    arguments = typing.get_args(kind)
    return f"list of {_name(arguments[0])}" if arguments else kind.__name__
