"""Types of arguments, checked where callers enter: a wrong one is a TypeError that names the argument.

The checks follow the annotations. An array is everything that has a shape with the annotated number of dimensions and a
dtype of numbers, which are integers or booleans if the annotation says so. Ranges and shapes are left to the functions.
"""

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
from jaxtyping import AbstractArray, PyTree

ANY: Final = "biufcV"
"""The kinds of NumPy dtypes of numbers. JAX's small floats are of kind V."""
KINDS: Final = {("bool",): "b", ("int", "uint", "bool"): "biu"}
"""The kinds of dtypes that fit an annotated array, by the beginnings of the names of all of its dtypes."""
CONTENTS: Final = {"b": " of booleans", "biu": " of integers", ANY: ""}
"""What is in an array of these kinds."""
KEY: Final = "prng_key"
"""The dtype of an annotated random key, which is no dtype of NumPy."""
NUMBERS: Final = {bool: "b", int: "iu", float: ANY, complex: ANY}
"""The kinds of dtypes that fit an annotated number."""


_MANY: Final[dict[Any, Callable[[Any], Any]]] = {
    inspect.Parameter.VAR_POSITIONAL: tuple,
    inspect.Parameter.VAR_KEYWORD: dict.values,
}
"""The values of the arguments that stand for several."""


def checks_arguments[F: Callable](function: F) -> F:
    """Decorate a public function, so that it refuses arguments whose types do not fit its annotations.

    Args:
        function: a function or method with annotations, or a dataclass.

    Returns:
        The function, which raises TypeError before anything else; or the class, whose constructor does.

    >>> @checks_arguments
    ... def repeat(text: str, times: int = 2) -> str:
    ...     return text * times
    >>> repeat("ab"), repeat("ab", np.int8(1))
    ('abab', 'ab')
    >>> repeat("ab", "3")
    Traceback (most recent call last):
    TypeError: repeat: times must be an integer, found str
    """
    if isinstance(function, type):
        function.__init__ = checks_arguments(function.__init__)  # type: ignore[misc]
        return function
    signature, where = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

    @functools.cache
    def hints() -> dict[str, Any]:
        # Not before the first call, since annotations may name what is defined further down.
        return typing.get_type_hints(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python says what is missing
        for name, value in arguments.items():
            hint, parameter = hints().get(name, Any), signature.parameters[name]
            for each in _MANY.get(parameter.kind, lambda value: (value,))(value):
                if each is not parameter.default and not fits(each, hint):
                    raise TypeError(f"{where}: {name} must be {_words(hint)}, found {_found(each)}")
        return function(*args, **kwargs)

    return cast(F, checked)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type, as far as that is decided here."""
    hint = _resolved(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return isinstance(value, str) or any(value is each for each in args)
    if args and origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is tuple and Ellipsis not in args:
        return isinstance(value, tuple) and len(value) == len(args) and all(map(fits, value, args))
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, collections.abc.Mapping)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        if not isinstance(value, collections.abc.Iterable) or isinstance(value, str | bytes):
            return False
        if issubclass(origin, collections.abc.Sequence) and not _is_sequence(value):
            return False
        # A generator would be consumed.
        return not hasattr(value, "__len__") or all(fits(each, args[0]) for each in value)
    if hint is Any or not isinstance(origin or hint, type) or issubclass(origin or hint, PyTree):
        return True
    if issubclass(origin or hint, AbstractArray):
        return _is_array(value, hint)
    if hint in NUMBERS:
        return _is_number(value, NUMBERS[hint])
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in hint.__protocol_attrs__)
    return isinstance(value, origin or hint)


def _resolved(hint: Any) -> Any:
    return hint.__value__ if isinstance(hint, typing.TypeAliasType) else hint


def _is_sequence(value: Any) -> bool:
    """Return whether a value has elements in an order, as arrays have too."""
    is_sized = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return is_sized and not isinstance(value, collections.abc.Mapping)


def _is_number(value: Any, kinds: str) -> bool:
    """Return whether a value is a number of these kinds of dtypes; an array without dimensions is one too."""
    if hasattr(value, "dtype"):
        return getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "V") in kinds
    kind = "b" if isinstance(value, bool) else "i" if isinstance(value, numbers.Integral) else "f"
    return isinstance(value, numbers.Number) and kind in kinds


def _is_array(value: Any, hint: Any) -> bool:
    """Return whether a value is an array of numbers with the annotated number of dimensions; numbers have none."""
    if isinstance(value, numbers.Number) and not hasattr(value, "dtype"):
        value = np.asarray(value)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    if isinstance(value.dtype, np.dtype):
        if not _has_kind(value.dtype, _kinds(hint)):
            return False
    elif str(value.dtype).startswith("key<") and KEY not in hint.dtypes:
        return False
    if hint.index_variadic is None:
        return len(value.shape) == len(hint.dims)
    return len(value.shape) >= len(hint.dims) - 1 and (value.shape != () or hint.dim_str != "...")


def _kinds(hint: Any) -> str:
    """Return the kinds of dtypes that fit an annotated array; none of NumPy's fits a random key."""
    if KEY in hint.dtypes:
        return ""
    fitting = (
        kinds for names, kinds in KINDS.items() if all(str(each).startswith(names) for each in hint.dtypes)
    )
    return next(fitting, ANY)


def _has_kind(dtype: np.dtype, kinds: str) -> bool:
    if dtype.kind == "V":
        return kinds == ANY or ("i" in kinds and dtype.name.startswith(("int", "uint")))
    return dtype.kind in kinds


def _words(hint: Any) -> str:
    """Describe an annotated type.

    >>> from jaxtyping import Int
    >>> _words(int | list[str] | Int[np.ndarray, "M *E"] | None)
    'an integer, a list, an array [M *E] of integers or None'
    """
    hint = _resolved(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if args and origin in (typing.Union, types.UnionType):
        *most, last = dict.fromkeys(map(_words, args))
        return f"{', '.join(most)} or {last}" if most else last
    if hint in NUMBERS:
        return {bool: "True or False", int: "an integer"}.get(hint, "a number")
    if hint is types.NoneType:
        return "None"
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    name = (origin or hint).__name__
    if issubclass(origin or hint, AbstractArray):
        return "a random key" if KEY in hint.dtypes else f"an array [{hint.dim_str}]{CONTENTS[_kinds(hint)]}"
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _found(value: Any) -> str:
    """Describe a value: a number, the dtype and shape of an array, else its type."""
    if value is None or (isinstance(value, numbers.Number) and np.ndim(value) == 0):  # type: ignore[arg-type]
        return repr(value)
    if isinstance(value, list | tuple) and value and not hasattr(value, "_fields"):
        return f"a {type(value).__name__} of {_found(value[0])}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None or dtype is None else f"{dtype}{list(shape)}"
