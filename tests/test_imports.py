"""Arrows between modules point down: planning and execution meet in the plan and never import each other."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("relibra_jax", "pallas_kernels")
# A module may import what stands in a lower or the same room.
ROOMS = [
    {"relibra_jax.types", "relibra_jax.atomic_write", "relibra_jax.limits", "relibra_jax.suggestions"},
    {
        "relibra_jax.plan",
        "relibra_jax.plan_check",
        "relibra_jax.replay",
        "relibra_jax.replay_files",
        "relibra_jax.segments",
        "relibra_jax.token_split",
        "relibra_jax.copy_slots",
        "relibra_jax.node_visits",
        "relibra_jax.capacity",
        "relibra_jax.hot_ranks",
        "relibra_jax.plan_files",
        "relibra_jax.resident_push",
        "relibra_jax.row_packing",
        "relibra_jax.engine_placements",
        "relibra_jax.rollout",
        "pallas_kernels",
    },
    {"relibra_jax.planning", "relibra_jax.execution"},
    {"relibra_jax.cost", "relibra_jax.traces", "relibra_jax.sharing"},
    {"relibra_jax.serving"},
    {"relibra_jax.nnx"},
    {"relibra_jax.models", "relibra_jax.integrations"},
    {"relibra_jax.cli"},
]
PLANNING_CORE = "relibra_jax"
"""The package's own face: it stands on top, and imports only what is below cost."""

# Neither of a pair imports the other, whatever their rooms say.
APART = [
    ("relibra_jax.planning", "relibra_jax.execution"),
    ("relibra_jax.cost", "relibra_jax.execution"),
    ("pallas_kernels", "relibra_jax"),
]
EXCEPT = [("relibra_jax.execution", "pallas_kernels"), ("relibra_jax.planning", "pallas_kernels")]
"""What may import across such a pair, one way."""

# Packages that only some rooms may import, and those rooms.
CONFINED = {
    "flax": {"relibra_jax.nnx", "relibra_jax.models", "relibra_jax.integrations"},
    "safetensors": {"relibra_jax.models"},
    "tunix": {"relibra_jax.integrations"},
    "tyro": {"relibra_jax.cli"},
    "rich": {"relibra_jax.cli"},
    "jinja2": {"relibra_jax.cli"},
    "matplotlib": {"relibra_jax.cli"},
    "scipy": {"relibra_jax.engine_placements", "relibra_jax.cli"},
    "optax": {"relibra_jax.execution", "relibra_jax.nnx"},
    "orbax": {"relibra_jax.execution", "relibra_jax.nnx"},
}
EVERYWHERE = {"jax", "numpy"} | set(sys.stdlib_module_names) - {"pickle"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Every name that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(module, room):
    return f"{module}.".startswith(f"{room}.")


def height(module):
    """The room of a module; the face of the package is above all."""
    floors = [floor for floor, room in enumerate(ROOMS) for name in room if inside(module, name)]
    return floors[0] if floors else len(ROOMS)


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def own_imports(module):
    return [target for target in imports_of(MODULES[module]) if target.split(".")[0] in PACKAGES]


def test_every_module_has_one_room():
    for module in MODULES:
        rooms = [name for room in ROOMS for name in room if inside(module, name)]
        assert len(rooms) == (0 if module == PLANNING_CORE else 1), f"{module} in {rooms}"
    assert all(name in MODULES for room in ROOMS for name in room), "a room that is not there"


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module):
    for target in own_imports(module):
        assert height(target) <= height(module), f"{module} imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_rooms_that_know_nothing_of_each_other(module):
    for target in own_imports(module):
        for one, other in APART:
            for here, there in ((one, other), (other, one)):
                if inside(module, here) and inside(target, there):
                    allowed = any(inside(module, a) and inside(target, b) for a, b in EXCEPT)
                    assert allowed, f"{module} imports {target}"


def test_the_face_of_the_package_is_below_cost():
    cost = height("relibra_jax.cost")
    for target in own_imports(PLANNING_CORE):
        assert height(target) < cost, f"relibra_jax imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_outer_packages_stay_where_they_belong(module):
    for package in {target.split(".")[0] for target in imports_of(MODULES[module])} - set(PACKAGES):
        # Annotations of the kernels are plain, so that the package needs jax alone.
        shapes = package == "jaxtyping" and not inside(module, "pallas_kernels")
        rooms = CONFINED.get(package, ())
        allowed = package in EVERYWHERE or shapes or any(inside(module, room) for room in rooms)
        assert allowed, f"{module} imports {package}"
