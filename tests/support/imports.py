"""The imports of a module, read from its text."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module_name(path):
    """Return the name under which a file of the project is imported; that of tests has no ``tests.`` in front."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "tests" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path):
    """Return every name that a module imports, inside functions too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def with_packages(names):
    """Add to imported names the packages or modules that they are imported from."""
    return set(names) | {name.rpartition(".")[0] for name in names}
