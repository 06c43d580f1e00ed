"""What users bring along, by its name on the command line: ``my_module:my_planner``."""

import importlib
import os
import sys
from typing import Any

from relibra_jax.suggestions import suggest_names


def import_outside(what: str, name: str) -> Any:
    """Import an attribute of a module by its name.

    Args:
        what: the word for what is imported, for errors.
        name: ``module:attribute``. The module is looked for in the current folder and where Python finds modules.

    Returns:
        The attribute.

    Raises:
        ValueError: if the name is of another form, or there is no such module or attribute.

    >>> import_outside("function", "os.path:basename")("folder/file")
    'file'
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{what} {name!r} must be written module:attribute, for example my_module:my_{what}")
    if os.getcwd() not in sys.path:  # a console script starts without it
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{what} {name!r}: no module {error.name!r} here or where Python looks") from error
    if not hasattr(module, attribute):
        raise ValueError(
            f"{what} {name!r}: {module_name} has no {attribute!r}{suggest_names(attribute, vars(module))}"
        )
    return getattr(module, attribute)
