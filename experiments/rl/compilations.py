"""What JAX compiles, told as it happens."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

import jax

LOWERED: Final = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""The event between tracing a program and compiling it; names the program."""
COMPILED: Final = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def tell_compilations(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell the name of each program that is compiled within, before the compiler starts, and "" when none is.

    Args:
        tell: called on the thread that compiles, with the name of the compiled function; when it is compiled, with that
            of a program that another thread still compiles, or "".

    >>> def double(x):
    ...     return 2 * x
    >>> told = []
    >>> with tell_compilations(told.append):
    ...     _ = jax.jit(double)(1.0)
    >>> told
    ['double', '']
    """

    under_way: dict[int, str] = {}

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == LOWERED:
            name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")").strip("_")
            under_way[threading.get_ident()] = name
            tell(name)
        elif event == COMPILED:
            under_way.pop(threading.get_ident(), None)
            tell(next(iter(list(under_way.values())), ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
