"""The workflows call make targets that exist, and all files name the same versions."""

import re
import tomllib
from pathlib import Path

import pytest

import relibra_jax

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("name", ["ci", "release"])
def test_workflows_call_targets_that_exist(name):
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    called = set(re.findall(r"run: make ([a-z-]+)", text))
    for row in re.findall(r"target: \[(.*)\]", text):
        called |= set(row.split(", "))
    assert called
    assert called <= TARGETS, called - TARGETS


def test_workflows_pin_actions_by_commit():
    """Every action is named by a whole commit, with the version beside it for readers and for updates."""
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        actions = re.findall(r"uses: (.*)", path.read_text())
        assert actions
        for action in actions:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), f"{path.name}: {action}"


def test_make_help_lists_every_target():
    listed = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.MULTILINE))
    assert listed == TARGETS


def test_workflows_name_environments_that_can_be_made():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for folder in re.findall(r"venv: (\S+)", text):
        assert f"\n{folder}/installed:" in MAKEFILE, folder


def test_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert relibra_jax.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    latest = re.search(
        r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert latest
    assert latest[1] == version
