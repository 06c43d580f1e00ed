"""Call every public function with arguments of wrong types: ``python tests/wrong_arguments.py``.

The calls come from the examples in the docstrings. Each is repeated with one of its arguments replaced, and the error
must be a TypeError or ValueError of one line that names the argument. The program prints those that are not, and the
number of calls.
"""

import contextlib
import doctest
import importlib
import inspect
import io
import os
import re
import sys
import tempfile
import typing
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_public_api import PUBLIC

from relibra_jax.support.argument_types import fits

WRONG = (None, 3, "wrong", 2.5, ["wrong"], [[1, 2]], object(), lambda *_: 0)


def public_functions(package):
    """Return the public functions of a package, and the public methods of its classes, by name."""
    module, found = importlib.import_module(package), {}
    for name in PUBLIC[package]:
        value = getattr(module, name)
        if not inspect.isclass(value):
            found |= {name: value} if callable(value) else {}
        elif not hasattr(value, "_fields") and not getattr(value, "_is_protocol", False):
            # NamedTuples are trees, whose leaves JAX replaces.
            methods = {key: each for key, each in vars(value).items() if inspect.isfunction(each)}
            found |= {
                f"{name}.{key}": each
                for key, each in methods.items()
                if key[0] != "_" or key in ("__init__", "__call__")
            }
    return found


def calls(package):
    """Return the first call of each public function in the examples: the function and its bound arguments, by name."""
    recorded, public = {}, public_functions(package)

    def recording(name, function):
        def call(*args, **kwargs):
            with contextlib.suppress(TypeError):
                recorded.setdefault(name, (function, inspect.signature(function).bind(*args, **kwargs)))
            return function(*args, **kwargs)

        return call

    for name, function in public.items():
        documented = getattr(importlib.import_module(package), name.split(".")[0])
        owner = vars(importlib.import_module(documented.__module__))
        namespace = owner | {key: recording(key, each) for key, each in public.items() if "." not in key}
        examples = doctest.DocTestParser().get_examples(f"{documented.__doc__}\n\n{function.__doc__}")
        with contextlib.ExitStack() as changes:
            changes.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if "." in name:
                changes.enter_context(
                    mock.patch.object(documented, name.split(".")[1], recording(name, function))
                )
            for example in examples:
                with contextlib.suppress(Exception):
                    exec(compile(example.source, f"<{name}>", "single"), namespace)
    return recorded


def problems(function, bound):
    """Yield what is wrong with the errors of a call whose arguments are replaced one by one; None for a right one."""
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    for key, value in bound.arguments.items():
        if key == "self" or signature.parameters[key].kind.name.startswith("VAR_"):
            continue
        for wrong in WRONG:
            if type(wrong) is type(value):
                continue
            changed = signature.bind(*bound.args, **bound.kwargs)
            changed.arguments[key] = wrong
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    function(*changed.args, **changed.kwargs)
            except (TypeError, ValueError) as error:
                named = re.search(rf"\b{re.escape(key)}\b", str(error))
                yield None if named and len(str(error).splitlines()) == 1 else f"{key}={wrong!r}: {error!r}"
            except Exception as error:
                yield f"{key}={wrong!r}: {error!r}"
            else:
                yield None if fits(wrong, hints.get(key, typing.Any)) else f"{key}={wrong!r}: accepted"


def main():
    count = wrong = 0
    os.chdir(tempfile.mkdtemp())  # some of the calls write files
    for package in PUBLIC:
        for name, (function, bound) in calls(package).items():
            for problem in problems(function, bound):
                count += 1
                wrong += problem is not None
                if problem is not None:
                    print(f"{package}.{name}, {problem[:200]}")
    print(f"{count} calls, {wrong} of them with a wrong end")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
