"""The files and commands that the README names exist. tests/test_docs.py tests its examples."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from experiments.count_buffers import Buffers
from experiments.miniature.compare import Compare
from experiments.miniature.report import speeds
from experiments.rl.config_file import config_names
from experiments.rl.configs import Train
from relibra_jax.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_readme_shows_what_the_miniature_measured_and_each_balancer_expected():
    """The figures are those of the kept run, and near what the Balancer of each run expects of its plan."""
    path = "experiments/results/miniature/qwen3-30b-2x2-16"
    of = speeds(json.loads((ROOT / f"{path}.json").read_text())["rows"])
    best = max(("LPLB", "UltraEP", "MoonEP"), key=lambda name: of[f"{name}, fitted"].measured)
    shown = [of[f"{name}, fitted"] for name in ("static", best, "ReLibra", "ReLibra, 1 resident")]
    rows = [
        re.search(rf"^\| {start}[^|]*\|(.*)\|", TEXT, re.MULTILINE).group(1)
        for start in ("whole updates", "the same, as the `Balancer`")
    ]
    measured, expected = (re.findall(r"[\d.]+%", row) for row in rows)
    assert f"({best})" in rows[0]
    assert measured == [f"{speed.measured:.1%}" for speed in shown]
    assert expected == [f"{speed.predicted:.1%}" for speed in shown]
    for speed in shown:
        assert speed.predicted == pytest.approx(speed.modelled, rel=0.01)
        assert speed.measured == pytest.approx(speed.predicted, rel=0.035)
    for speed in shown[2:]:
        assert speed.measured == pytest.approx(speed.predicted, rel=0.01)
    assert f"]({path}.png)" in TEXT
    assert len(TEXT.splitlines()) <= 140


def test_contributing_shows_a_structure_that_exists():
    tree = re.search(r"```text\n(relibra_jax/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert tree
    folders = []
    for line in tree.group(1).splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        assert ROOT.joinpath(*folders).exists(), folders


def options(config):
    """Yield the command-line names of a configuration's fields, including those of its parts."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        yield from options(value) if dataclasses.is_dataclass(value) else (name, f"no-{name}")


def test_readme_names_options_that_exist():
    configs = [command() for command, _ in COMMANDS.values()] + [Train(), Buffers(), Compare()]
    valid = {name for config in configs for name in options(config)}
    used = set(re.findall(r" --([a-z-]+)", TEXT))
    assert used <= valid | {"list", "help"}, used - valid


def test_readme_names_commands_that_exist():
    assert set(re.findall(r"(?:^|`)relibra ([a-z]+)", TEXT, re.MULTILINE)) <= COMMANDS.keys()
    assert set(re.findall(r"experiments\.run ([a-z]+)", TEXT)) <= set(config_names())
    for program in set(re.findall(r"python -m (experiments\.[a-z_.]*[a-z])", TEXT)):
        assert importlib.util.find_spec(program), program
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", TEXT, re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
