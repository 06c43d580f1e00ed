"""Import of a user's own functions and planners, named on the command line as ``my_module:my_planner``."""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from relibra_jax.support.suggestions import suggest_names

NOT_OF_USERS: Final = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
    "<frozen ",
)
"""The beginnings of paths of files that are not a user's: those of Python, of installed packages, and of this one."""


def import_outside(kind: str, name: str) -> Any:
    """Import an attribute of a module by its name.

    Args:
        kind: the kind of thing to import, for error messages, for example ``planner``.
        name: the name, written ``module:attribute``. The module is searched in the current folder and on Python's path.

    Returns:
        The attribute.

    Raises:
        ValueError: if the name is not written ``module:attribute``, there is no such module or attribute, or the import
            raises an error or ends the process.

    >>> import_outside("function", "os.path:basename")("folder/file")
    'file'
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{kind} {name!r} must be written module:attribute, for example my_module:my_{kind}")
    if os.getcwd() not in sys.path:  # Python does not add the current folder for a console script
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{kind} {name!r}: no module {missing!r} in the current folder or on Python's path"
            ) from error
        raise ValueError(
            f"{kind} {name!r}: the import of {module_name} raised {error_place(error)}"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(
            f"{kind} {name!r}: {module_name} has no {attribute!r}{suggest_names(attribute, vars(module))}"
        )
    return getattr(module, attribute)


def error_place(error: BaseException) -> str:
    """Return the first line of an error, with the last file and line of a user's code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(NOT_OF_USERS)]
    last = (of_user or frames)[-1]
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line} ({last.filename}:{last.lineno})"


def import_function(kind: str, name: str, *parameters: str) -> Callable[..., Any]:
    """Import a function by its name, and check that it can be called with some positional arguments.

    Args:
        kind: the kind of function, for error messages, for example ``writer``.
        name: the name, written ``module:function``.
        parameters: what the function is called with, for error messages.

    Returns:
        The function.

    Raises:
        ValueError: under the conditions of `import_outside`, or if the function cannot be called so.

    >>> import_function("reward", "os.path:basename", "completion", "example")
    Traceback (most recent call last):
    ValueError: reward 'os.path:basename' must be a function of (completion, example): too many positional arguments
    """
    function = import_outside(kind, name)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ValueError(
            f"{kind} {name!r} must be a function of ({', '.join(parameters)}): {error}"
        ) from error
    return function
