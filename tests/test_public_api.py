"""The public names of the packages: each has a docstring and types, and importing them is cheap."""

import ast
import importlib
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PACKAGES = (
    "relibra_jax",
    "relibra_jax.cost",
    "relibra_jax.evaluation",
    "relibra_jax.execution",
    "relibra_jax.nnx",
    "relibra_jax.models",
    "relibra_jax.integrations",
    "pallas_kernels",
)
"""The packages whose ``__all__`` is the public interface."""
PUBLIC = {package: importlib.import_module(package).__all__ for package in PACKAGES}
MODULES = {"relibra_jax.integrations": PUBLIC.pop("relibra_jax.integrations")}
"""The package that lists modules, because each of them needs other packages."""
# Values have no __doc__ of their own; a string after their definition documents them.
VALUES = {
    "BALANCE": "relibra_jax.contract.types",
    "EMPTY": "relibra_jax.contract.types",
    "PLANNERS": "relibra_jax.planning.planners",
    "CLUSTERS": "relibra_jax.cost.hardware",
    "COLUMNS": "relibra_jax.evaluation.outcome",
    "MODELS": "relibra_jax.cost.models",
    "OVERLAP_OPTIONS": "relibra_jax.execution.mesh",
    "GATINGS": "relibra_jax.execution.gating",
}


def string_below(module, name):
    """Return the string directly below the assignment of ``name`` in a module's source."""
    body = ast.parse(Path(importlib.import_module(module).__file__).read_text()).body
    for assignment, after in itertools.pairwise(body):
        targets = getattr(assignment, "targets", None) or [getattr(assignment, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(after, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


@pytest.mark.parametrize("package", PUBLIC)
def test_package_has_its_public_names(package):
    module = importlib.import_module(package)
    assert module.__doc__
    for name in PUBLIC[package]:
        assert hasattr(module, name), name


def test_package_lists_modules_that_exist():
    for package, names in MODULES.items():
        for name in names:
            assert importlib.util.find_spec(f"{package}.{name}"), name


def test_all_is_defined_by_public_packages_alone():
    paths = [path for root in ("relibra_jax", "pallas_kernels") for path in (ROOT / root).rglob("*.py")]
    having = [path for path in paths if re.search(r"^__all__", path.read_text(), re.MULTILINE)]
    named = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in having}
    assert named == set(PACKAGES)
    assert all(path.name == "__init__.py" for path in having)


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_shows_public_packages_alone(package):
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert f"::: {package}\n" in pages[package.removeprefix("relibra_jax.")]
    assert len(pages) == len(PACKAGES) + 1  # and the index


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in PUBLIC.items() for name in names]
)
def test_public_name_has_a_docstring(package, name):
    value = getattr(importlib.import_module(package), name)
    documented = string_below(VALUES[name], name) if name in VALUES else value.__doc__
    assert documented
    # Without a docstring, that of a dataclass or a NamedTuple is its signature.
    assert not documented.startswith(f"{name}(")


def test_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert importlib.import_module("relibra_jax").__version__ == project["version"]


@pytest.mark.parametrize("package", ["relibra_jax", "pallas_kernels"])
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


HEAVY = ("flax", "optax", "orbax", "chex", "scipy", "matplotlib", "tyro", "rich", "torch")


@pytest.mark.parametrize(
    "module",
    [
        "relibra_jax",
        "relibra_jax.evaluation",
        "relibra_jax.integrations.maxtext",
        "relibra_jax.integrations.megatron",
    ],
)
def test_planning_core_loads_jax_and_numpy_alone(module):
    """Planning, and following a plan in another trainer, imports no framework in a fresh process."""
    program = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ran.stdout.split() == []


def test_page_of_public_names_lists_them():
    text = (ROOT / "docs" / "public-api.md").read_text()
    for module, names in {**PUBLIC, **MODULES}.items():
        listed = re.search(rf"\n`{re.escape(module)}`\n\n(.*?)\n\n", text, re.DOTALL)
        assert listed, module
        assert re.findall(r"`(\w+)`", listed[1]) == names
