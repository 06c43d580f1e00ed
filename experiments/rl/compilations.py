"""What JAX compiles, told as it happens."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import jax

LOWERED: Final = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""The event between tracing a program and compiling it; names the program."""
COMPILED: Final = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def tell_compilations(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell the name of each program that is compiled within, before the compiler starts, and "" when it has ended.

    Args:
        tell: called with the name of the compiled function, or "", on the thread that compiles.

    >>> def double(x):
    ...     return 2 * x
    >>> told = []
    >>> with tell_compilations(told.append):
    ...     _ = jax.jit(double)(1.0)
    >>> told
    ['double', '']
    """

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == LOWERED:
            tell(str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")").strip("_"))
        elif event == COMPILED:
            tell("")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
