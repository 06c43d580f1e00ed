"""The lowest versions in pyproject.toml are those of requirements-lowest.lock, and the development lock is allowed."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# The packages of the extra rl that the tests need.
TOKENIZERS = set(EXTRAS["rl"]) & set(EXTRAS["dev"])
NEEDED = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["cli"], *sorted(TOKENIZERS))]


def locked(name):
    """Return the version of every package in a lock file."""
    lines = re.findall(r"^([\w-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    return {package: Version(version) for package, version in lines}


@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_requirements_have_their_floors_in_the_lock_of_lowest_versions(needed):
    (floor,) = (Version(bound.version) for bound in needed.specifier if bound.operator == ">=")
    assert locked("requirements-lowest.lock")[needed.name] == floor, "make lock, and make lowest"


@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_requirements_allow_what_is_developed_with(needed):
    assert locked("requirements-dev.lock")[needed.name] in needed.specifier
