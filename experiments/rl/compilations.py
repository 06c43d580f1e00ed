"""Notices of the programs that JAX compiles, for progress bars."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

import jax

LOWERED: Final = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""The event between tracing a program and compiling it, with the program's name."""
COMPILED: Final = "/jax/core/compile/backend_compile_duration"
"""The event at the end of a compilation."""


@contextlib.contextmanager
def tell_compilations(tell: Callable[[str], None]) -> Iterator[None]:
    """Call a function at the start and the end of every compilation in the block.

    Args:
        tell: the function to call, on the thread that compiles. At the start of a compilation its argument is the name
            of the compiled function. At the end it is the name of a program that another thread is still compiling, or
            "" if there is none.

    >>> def double(x):
    ...     return 2 * x
    >>> names = []
    >>> with tell_compilations(names.append):
    ...     _ = jax.jit(double)(1.0)
    >>> names
    ['double', '']
    """

    running: dict[int, str] = {}

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == LOWERED:
            name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")").strip("_")
            running[threading.get_ident()] = name
            tell(name)
        elif event == COMPILED:
            running.pop(threading.get_ident(), None)
            tell(next(iter(list(running.values())), ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
