"""Modules import only from lower or equal levels; planning and execution never import each other."""

import sys

import pytest
from support.imports import ROOT, imports_of, module_name, with_packages

PACKAGES = ("relibra_jax", "pallas_kernels")
# A module may import modules of its own level and of the levels above it in this list.
LEVELS = [
    {"relibra_jax.support"},
    {"relibra_jax.contract"},
    {"relibra_jax.routing", "relibra_jax.rollout", "pallas_kernels"},
    {"relibra_jax.cost"},
    {"relibra_jax.planning", "relibra_jax.execution"},
    {"relibra_jax.traces"},
    {"relibra_jax.evaluation"},
    {"relibra_jax.nnx"},
    {"relibra_jax.models", "relibra_jax.integrations"},
    {"relibra_jax.cli"},
]
PLANNING_CORE = "relibra_jax"
"""The top-level module of the package. It is above all levels, but imports only planning and what is below it."""

# The packages of a pair do not import each other, regardless of their levels.
SEPARATE = [
    ("relibra_jax.planning", "relibra_jax.execution"),
    ("relibra_jax.cost", "relibra_jax.execution"),
    ("pallas_kernels", "relibra_jax"),
]
ALLOWED = [("relibra_jax.execution", "pallas_kernels"), ("relibra_jax.models", "pallas_kernels")]
"""Exceptions: ``(importing, imported)``."""

# External packages that only some of our packages may import, and those packages.
CONFINED = {
    "flax": {"relibra_jax.nnx", "relibra_jax.models", "relibra_jax.integrations"},
    "safetensors": {"relibra_jax.models"},
    "tunix": {"relibra_jax.integrations"},
    "tyro": {"relibra_jax.cli"},
    "rich": {"relibra_jax.cli"},
    "jinja2": {"relibra_jax.cli"},
    "matplotlib": {"relibra_jax.cli"},
    "scipy": {"relibra_jax.integrations.engine_placements"},
    "optax": {"relibra_jax.execution", "relibra_jax.nnx"},
    "orbax": {"relibra_jax.execution", "relibra_jax.nnx"},
}
# What experiments may take from the command line: its drawing.
DRAWING = {
    f"relibra_jax.cli.{name}" for name in ("drawing", "figures", "pages", "palette", "terminal", "timeline")
}
EVERYWHERE = {"jax", "numpy"} | set(sys.stdlib_module_names) - {"pickle"}


def inside(module, level):
    return f"{module}.".startswith(f"{level}.")


def level_of(module):
    """Return the index of a module's level; the top-level module of the package is above all levels."""
    indices = [index for index, level in enumerate(LEVELS) for name in level if inside(module, name)]
    return indices[0] if indices else len(LEVELS)


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
PRODUCT = MODULES | {module_name(path): path for path in sorted((ROOT / "experiments").rglob("*.py"))}


def imported_modules(module):
    """Return the modules of the product that a module imports, inside functions too, with packages it imports from."""
    return with_packages(imports_of(PRODUCT[module])) & set(PRODUCT)


def own_imports(module):
    return [target for target in imports_of(MODULES[module]) if target.split(".")[0] in PACKAGES]


def test_modules_have_one_level_each():
    for module in MODULES:
        levels = [name for level in LEVELS for name in level if inside(module, name)]
        assert len(levels) == (0 if module == PLANNING_CORE else 1), f"{module} in {levels}"
    assert all(name in MODULES for level in LEVELS for name in level), "a level names an unknown module"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    for target in own_imports(module):
        assert level_of(target) <= level_of(module), f"{module} imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_nothing_of_a_separate_package(module):
    for target in own_imports(module):
        for one, other in SEPARATE:
            for importing, imported in ((one, other), (other, one)):
                if inside(module, importing) and inside(target, imported):
                    allowed = any(inside(module, a) and inside(target, b) for a, b in ALLOWED)
                    assert allowed, f"{module} imports {target}"


def test_relibra_jax_imports_only_planning_and_what_is_below():
    """It offers arrays and pure functions, without a device mesh, traces or a framework."""
    planning = level_of("relibra_jax.planning")
    for target in own_imports(PLANNING_CORE):
        at_most_planning = level_of(target) <= planning and not inside(target, "relibra_jax.execution")
        assert at_most_planning, f"relibra_jax imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_external_packages_only_where_allowed(module):
    for package in {target.split(".")[0] for target in imports_of(MODULES[module])} - set(PACKAGES):
        # The kernels have plain annotations, so that their package needs only jax.
        shapes = package == "jaxtyping" and not inside(module, "pallas_kernels")
        levels = CONFINED.get(package, ())
        allowed = package in EVERYWHERE or shapes or any(inside(module, level) for level in levels)
        assert allowed, f"{module} imports {package}"


EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=module_name)
def test_experiments_take_only_drawing_from_the_command_line(path):
    for target in imports_of(path):
        allowed = not inside(target, "relibra_jax.cli") or any(inside(target, name) for name in DRAWING)
        assert allowed, f"{module_name(path)} imports {target}"


def test_imports_form_no_circle():
    """Remove modules that import only removed ones, again and again: what stays is in a circle, or imports one."""
    remaining = {module: imported_modules(module) - {module} for module in PRODUCT}
    while free := [module for module, imported in remaining.items() if not imported & remaining.keys()]:
        for module in free:
            del remaining[module]
    assert not remaining, f"circle of imports among {', '.join(sorted(remaining))}"
