"""Public functions refuse arguments of wrong types before they do anything, with an error that names the argument."""

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, PRNGKeyArray
from test_public_api import PUBLIC
from wrong_arguments import public_functions

from relibra_jax.support.argument_types import checks_arguments, fits

DOORS = [
    ("relibra_jax.nnx", f"Balancer.{name}")
    for name in ("__init__", "prepare", "prepare_stages", "plan_ahead")
]
DOORS += [("relibra_jax.nnx", f"MoELayer.{name}") for name in ("__init__", "__call__", "fetch", "route")]
DOORS += [("relibra_jax.cost", f"CostModel.{name}") for name in ("__init__", "on", "price")]
DOORS += [
    ("relibra_jax.execution", "ExpertParallel.__init__"),
    ("relibra_jax.models", "ModelConfig.__init__"),
]


def checked_arguments(package, name):
    """Return the arguments of a function that cannot be any object."""
    function = public_functions(package)[name]
    hints = typing.get_type_hints(function)
    return [
        key
        for key in inspect.signature(function).parameters
        if not fits(object(), hints.get(key, typing.Any))
    ]


FUNCTIONS = [
    (package, name)
    for package in PUBLIC
    for name in public_functions(package)
    if package != "pallas_kernels" and "." not in name and checked_arguments(package, name)
]


@pytest.mark.parametrize(("package", "name"), [*DOORS, *FUNCTIONS])
def test_public_function_refuses_an_object_by_the_name_of_its_argument(package, name):
    function, (first, *_) = public_functions(package)[name], checked_arguments(package, name)
    parameters = inspect.signature(function).parameters.items()
    given = dict.fromkeys([key for key, each in parameters if each.default is each.empty], object()) | {
        first: object()
    }
    where = f"{name.removesuffix('.__init__')}: {first}"
    with pytest.raises(TypeError, match=f"^{re.escape(where)} must be .*, found object$"):
        function(**given)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (np.int8(3), int, True),
        (jnp.int32(3), int, True),
        (2.5, int, False),
        (np.float32(2), int, False),
        ("3", float, False),
        (1, float, True),
        (True, bool, True),
        (1, bool, False),
        (None, int | None, True),
        (["a", "b"], typing.Sequence[str], True),
        ("ab", typing.Sequence[str], False),
        (["a", 1], typing.Sequence[str], False),
        (np.arange(3), typing.Sequence[int], True),
        (np.arange(3), typing.Sequence[dict], False),
        ((1, "a"), tuple[int, str], True),
        ({}, typing.Mapping[str, int], True),
        ("other", typing.Literal["this"], True),  # the function says which texts there are
        (3, typing.Literal["this"], False),
        (len, typing.Callable[..., int], True),
        (np.zeros((2, 3), np.uint8), Int[np.ndarray, "a b"], True),
        ([[1, 2], [3, 4]], Int[np.ndarray, "a b"], False),  # as in jax.numpy
        (np.zeros((2, 3)), Int[np.ndarray, "a b"], False),
        (np.zeros(3, int), Int[np.ndarray, "a b"], False),
        (np.zeros((5, 2, 3), int), Int[np.ndarray, "*stack a b"], True),
        (jnp.zeros(3, jnp.bfloat16), Float[np.ndarray, " a"], True),
        (jnp.zeros(3, jnp.uint4), Int[np.ndarray, " a"], True),
        (jnp.zeros(3, jnp.bfloat16), Int[np.ndarray, " a"], False),
        (np.ones(3, bool), Bool[np.ndarray, " a"], True),
        (np.ones(3, int), Bool[np.ndarray, " a"], False),
        (jax.random.key(0), PRNGKeyArray, True),
        (jax.random.PRNGKey(0), PRNGKeyArray, True),
        (0, PRNGKeyArray, False),
        (jax.random.key(0), Int[np.ndarray, ""], False),
        (3, Int[np.ndarray, ""], True),
        (3, Int[np.ndarray, "..."], False),
        (jnp.bfloat16, DTypeLike, True),
        ("bfloat16", DTypeLike, True),
        (3, DTypeLike, False),
        (True, int, False),
        ({1, 2}, typing.Sequence[int], False),
        (10**20, int, True),
        (np.array(["a"]), Float[np.ndarray, " a"], False),
    ],
)
def test_types_fit_as_functions_take_them(value, hint, expected):
    assert fits(value, hint) == expected


def test_missing_arguments_are_pythons_own_error():
    @checks_arguments
    def repeat(text: str, *times: int, sep: str = None, **options: str) -> None: ...  # noqa: RUF013

    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'text'"):
        repeat()
    with pytest.raises(TypeError, match=r"times must be an integer, found str$"):
        repeat("a", 1, "b")
    with pytest.raises(TypeError, match=r"options must be a str, found 3$"):
        repeat("a", other=3)
    repeat("a", 1, sep=None)  # a default fits, whatever the annotation says


@pytest.mark.long
def test_every_argument_of_every_example_is_refused_by_name():
    """In a process of its own, without the checks of annotations that tests run with."""
    program = Path(__file__).with_name("wrong_arguments.py")
    shown = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=600)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    print(shown.stdout)
