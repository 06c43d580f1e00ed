"""Configuration files of runs, in TOML: settings that differ from the defaults, and variants that are compared.

description = "one line for the list of configurations"
needs = "what it needs: memory, ranks, engine"

[settings]
task = "numbers"
ranks = {nodes = 2, ranks_per_node = 4}

[variants.grpo]

[variants.tppo]            # a sweep: every variant is a run with these further settings
algorithm = "tppo"
window = 24
"""

import contextlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from experiments.rl.configs import Train
from experiments.rl.settings import check_name, convert, flat, make_settings
from relibra_jax.support.suggestions import suggest_names

FOLDER: Final = Path(__file__).parents[1] / "configs"
"""The folder of the configurations that have a name."""
TABLES: Final = {"description": str, "needs": str, "settings": dict, "variants": dict}
"""The keys of a file, with their types."""


class ConfigFile(NamedTuple):
    """The contents of a configuration file."""

    name: str
    """The name of the runs: that of the file without its ending."""
    description: str
    """A description in one line."""
    needs: str
    """What the runs need: memory, ranks, an engine."""
    settings: dict[str, Any]
    """The settings of all runs by dotted name."""
    variants: dict[str, dict[str, Any]]
    """The settings in which each variant differs, by the variant's name. Without variants there is a single run."""
    places: Mapping[tuple[str | None, str], str] = MappingProxyType({})
    """``file:line`` of every setting, by the name of the variant (None for the settings of all) and of the setting."""

    def train(self, variant: str | None = None) -> Train:
        """Return the settings of a run.

        Args:
            variant: the name of the variant. None takes the settings of all.

        Raises:
            ValueError: if settings contradict each other.
        """
        with self.place_in_errors(variant):
            return make_settings(Train, self.all_settings(variant))

    def all_settings(self, variant: str | None) -> dict[str, Any]:
        """Return the settings of a variant with those of all, by dotted name."""
        return self.settings | ({} if variant is None else self.variants[variant])

    @contextlib.contextmanager
    def place_in_errors(self, variant: str | None) -> Iterator[None]:
        """Add the place of the setting that a ValueError in the block names, and the name of the variant."""
        try:
            yield
        except ValueError as error:
            [name] = re.findall(r"^[\w.]*", str(error))
            places = [self.places[key] for key in ((variant, name), (None, name)) if key in self.places]
            place = "".join(f"{place}: " for place in places[:1])
            if variant is not None:
                place += f"{self.name}, variant {variant}: "
            raise ValueError(f"{place}{error}") from error


def config_names() -> list[str]:
    """Return the names of the configurations in `FOLDER`."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_config(name: str) -> ConfigFile:
    """Read a configuration by its name, or a file.

    Args:
        name: a name of `config_names`, or the path of a TOML file.

    Raises:
        ValueError: if there is no such configuration, or something in the file is wrong. The message has the file, the
            line and the key.

    >>> read_config("demo").train().task
    'count'
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
        if not path.exists():
            names = config_names()
            hint = ", before all options" if name.startswith("-") else suggest_names(name, names)
            raise ValueError(
                f"configuration {name!r} must be a file with the ending .toml or one of {', '.join(names)}{hint}"
            )
    if not path.is_file():
        raise ValueError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}")
    try:
        return parse_config(path.read_text("utf-8"), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason})") from error


def parse_config(text: str, path: Path) -> ConfigFile:
    """Parse the text of a configuration file.

    Args:
        text: the text.
        path: the path of the file, for its name and for errors.

    Raises:
        ValueError: under the conditions of `read_config`.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    for key, value in tables.items():
        place = f"{path}:{_line(text, key)}: {key}"
        if key not in TABLES:
            raise ValueError(f"{place} must be one of {', '.join(TABLES)}{suggest_names(key, TABLES)}")
        if not isinstance(value, TABLES[key]):
            kind = "a table" if TABLES[key] is dict else "a text"
            raise ValueError(f"{place}={value!r} must be {kind}")
    settings: dict[tuple[str, ...], dict[str, Any]] = {("settings",): tables.get("settings", {})}
    for variant, own in tables.get("variants", {}).items():
        if not isinstance(own, dict):
            raise ValueError(f"{path}:{_line(text, variant)}: variant {variant} must be a table of settings")
        if not re.fullmatch(r"\w[\w.,=+-]*", variant):
            raise ValueError(
                f"{path}:{_line(text, variant)}: variant {variant!r} must be a name for a folder: letters, digits and"
                " any of . , = + -"
            )
        settings["variants", variant] = own
    places: dict[tuple[str | None, str], str] = {}
    for header, own in settings.items():
        for key, value in flat(own).items():
            place = f"{path}:{_line(text, key, header)}"
            places[header[1] if len(header) > 1 else None, key] = place
            try:
                convert(key, value, check_name(key, Train))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    common, *own_settings = map(flat, settings.values())
    return ConfigFile(
        name=path.stem,
        description=tables.get("description", ""),
        needs=tables.get("needs", ""),
        settings=common,
        variants=dict(zip(tables.get("variants", {}), own_settings, strict=True)),
        places=places,
    )


def parse_value(text: str) -> Any:
    """Return the value of a text on the command line: a TOML value, or the text itself.

    >>> parse_value("1e-4"), parse_value("[0, 1]"), parse_value("relibra"), parse_value("true")
    (0.0001, [0, 1], 'relibra', True)
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_assignments(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Return settings that the command line gives as ``key=value``.

    Args:
        texts: the assignments.
        option: the name of the option, for errors.

    Raises:
        ValueError: if a text is no assignment, a name is unknown or a value has another type than its setting.
    """
    settings = {}
    for text in texts:
        name, value = split_assignment(text, option)
        settings[name] = parse_value(value)
        _check(name, settings[name], f"{option} {text}")
    return settings


def split_assignment(text: str, option: str) -> tuple[str, str]:
    """Split ``key=value``.

    Raises:
        ValueError: if there is no ``=``.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} {text}: must be a setting and a value, as in steps=10")
    return name.strip().replace("-", "_"), value


def sweep_variants(sweeps: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the variants of a sweep: every combination of the values of its settings.

    Args:
        sweeps: settings with their values, ``key=a,b,c``.

    Raises:
        ValueError: if a text is no assignment or has no value, a name is unknown, or a value has another type than its
            setting.

    >>> sweep_variants(["algorithm=grpo,ppo", "seeds=[0]"])
    {'algorithm=grpo,seeds=[0]': {'algorithm': 'grpo', 'seeds': [0]}, 'algorithm=ppo,seeds=[0]': ...}
    """
    variants: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for text in sweeps:
        name, values = split_assignment(text, "--sweep")
        if name in names:
            raise ValueError(f"--sweep {text}: {name} is swept twice")
        names.add(name)
        if not (given := _split(values)):
            raise ValueError(f"--sweep {text}: must have at least one value, as in {name}=A,B")
        parsed: dict[str, dict[str, Any]] = {}
        for value in given:
            variant = f"{name}={value}".replace("/", "-")
            if variant in parsed:
                raise ValueError(f"--sweep {text}: {value} is given twice")
            parsed[variant] = {name: parse_value(value)}
            _check(name, parsed[variant][name], f"--sweep {name}={value}")
        pairs = itertools.product(variants.items(), parsed.items())
        variants = (
            {f"{one},{other}": {**two, **own} for (one, two), (other, own) in pairs} if variants else parsed
        )
    return variants


def _split(values: str) -> list[str]:
    """Split values at the commas that are not in brackets.

    >>> _split("[0,1],[2]"), _split("1e-4, 3e-4")
    (['[0,1]', '[2]'], ['1e-4', '3e-4'])
    """
    return [value.strip() for value in re.findall(r"(?:\[[^\]]*\]|[^,])+", values)]


def _check(name: str, value: Any, place: str) -> None:
    try:
        convert(name, value, check_name(name, Train))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _line(text: str, key: str, table: Sequence[str] = ()) -> int:
    """Return the number of the line that sets a key in a table, or of the closest line above it that can be found."""
    *tables, last = (*table, *key.split("."))
    names = [rf"""\[[^\]]*\b{re.escape(name)}\b|\b{re.escape(name)}["']?\s*[.=]""" for name in tables]
    names.append(rf"""(?:\[[^\]]*\b|\b){re.escape(last)}["']?\s*[=\]]""")
    number = 0
    lines = ["" if line.lstrip().startswith("#") else line for line in text.splitlines()]
    for name in names:
        # An inline table has its keys on the line of its name.
        number = next((at for at in range(number, len(lines)) if re.search(name, lines[at])), number)
    return number + 1
