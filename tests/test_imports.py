"""Arrows between modules point down: planning and execution meet in the plan and never import each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("relibra_jax", "pallas_kernels")
# A module may import what stands in a lower or the same room.
ROOMS = [
    {"relibra_jax.types", "relibra_jax.atomic_write"},
    {f"relibra_jax.{name}" for name in ("plan", "replay", "routes", "capacities", "formats", "rollout")}
    | {"pallas_kernels"},
    {"relibra_jax.planning", "relibra_jax.execution"},
    {"relibra_jax.nnx.layer"},
    {"relibra_jax"},
]
APART = ("relibra_jax.planning", "relibra_jax.execution", "pallas_kernels")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def height(module):
    """The room of a module, by the longest prefix that names one."""
    found = [
        (len(name), floor)
        for floor, room in enumerate(ROOMS)
        for name in room
        if f"{module}.".startswith(f"{name}.")
    ]
    return max(found)[1]


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module):
    for target in imports_of(MODULES[module]):
        if target.startswith(PACKAGES):
            assert height(target) <= height(module), f"{module} imports {target}"
            for name in APART:
                if module.startswith(name) and target.startswith(APART):
                    assert target.startswith(name) or (name, target.split(".")[0]) == (
                        "relibra_jax.execution",
                        "pallas_kernels",
                    ), f"{module} imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_outer_packages_stay_outside(module):
    roots = {target.split(".")[0] for target in imports_of(MODULES[module])}
    assert not roots & {"experiments", "tests", "pickle", "torch"}
    if module != "relibra_jax.nnx.layer":
        assert "flax" not in roots
    if module.startswith("pallas_kernels"):
        assert not roots & {"relibra_jax"}
