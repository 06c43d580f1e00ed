"""The page on systems of the literature: every module, planner, trace, command and option that it names exists."""

import contextlib
import functools
import importlib.util
import inspect
import io
import re
import shlex
from pathlib import Path

import pytest
import tyro

import relibra_jax
from experiments.rl.configs import Train
from relibra_jax import cost, execution, nnx
from relibra_jax.cli.commands import COMMANDS
from relibra_jax.cli.palette import SYSTEMS
from relibra_jax.planning import baselines
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.traces.read import NAMED_TRACES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "concepts" / "systems.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
NAMES = sorted(set(re.findall(r"`([^`]+)`", PAGE)))
VALUES = {"nccl_ep"}
"""Names of values: the exchange that `ExpertParallel(exchange=)` takes."""


@functools.cache
def options_of(settings):
    """Return the options that the help of a command line shows."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        tyro.cli(settings, args=["--help"], prog="program")
    return set(re.findall(r"--[\w.-]+", shown.getvalue()))


def exists_in_python(name):
    """Return whether a dotted name is a module or an attribute of one, without importing modules that need extras."""
    module, _, attribute = name.rpartition(".")
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return False
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    return hasattr(importlib.import_module(module), attribute)


def callable_named(name):
    if name in PLANNERS:
        return getattr(importlib.import_module(f"{baselines.__name__}.{name}"), name)
    return next(
        getattr(package, name) for package in (relibra_jax, nnx, execution, cost) if hasattr(package, name)
    )


def check(name):
    words = shlex.split(name)
    if name.startswith("relibra "):
        settings, _ = COMMANDS[words[1]]
        assert {word for word in words if word.startswith("--")} <= options_of(settings)
    elif name.startswith("python -m "):
        assert exists_in_python(words[2])
    elif name.startswith("--"):
        assert words[0] in options_of(Train)
    elif call := re.fullmatch(r"(\w+)\((.+)=\)", name):
        parameters = inspect.signature(callable_named(call[1])).parameters
        assert set(call[2].split("=, ")) <= parameters.keys()
    elif name.endswith(".py"):
        assert (ROOT / name).exists()
    elif "." in name:
        assert exists_in_python(name)
    else:
        assert name in PLANNERS or name in NAMED_TRACES or name in VALUES or hasattr(relibra_jax, name)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_names_exists(name):
    check(name)


@pytest.mark.parametrize(
    "name",
    ["eplp", "relibra_jax.planning.placements", "--float8", "relibra compare --ablate", "llep(floor=)"],
)
def test_a_wrong_name_would_be_found(name):
    with pytest.raises((AssertionError, AttributeError)):
        check(name)


def test_every_planner_is_on_the_page_and_every_reconstruction_has_its_star():
    for name, entry in PLANNERS.items():
        system = name.partition("_")[0]
        row = next(row for row in ROWS if re.search(rf"`{system}(_\w+)?`", row.split("|")[2]))
        assert SYSTEMS[system].label.partition(",")[0] in row.split("|")[1]
        assert ("*" in row.split("|")[1]) == entry.reconstruction


def test_every_row_has_a_cell_for_each_column():
    assert {row.count("|") for row in ROWS} == {6}
