"""Compiled programs: kept on disk for later processes, and named while a compilation takes long."""

import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax

from relibra_jax.support.argument_types import checks_arguments

LOWERED: Final = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""JAX's event between lowering a program and compiling it, with the program's name."""
COMPILED: Final = "/jax/core/compile/backend_compile_duration"
"""JAX's event at the end of a compilation, or when a kept program has been loaded."""
LEAST_SECONDS: Final = 0.0
"""The compilation time from which a program is kept. JAX's default of 1 s leaves out most programs of a small model,
which take as long together."""
SLOW_SECONDS: Final = 2.0
"""The compilation time from which a program is named. Tracing and lowering, which come before, do not count."""
KEEP_NOTHING: Final = "--no-keep-programs"
"""The option of commands that turns `keep_programs` off."""


@checks_arguments
def keep_programs(folder: str | os.PathLike | None = None) -> Path | None:
    """Make JAX keep compiled programs on disk, so that later processes load them instead of compiling again.

    It turns on JAX's persistent compilation cache, unless the caller has set ``jax_compilation_cache_dir`` or turned
    the cache off (``JAX_ENABLE_COMPILATION_CACHE=false``). One line says where programs are kept, if the folder is new.

    Args:
        folder: the folder. None takes ``programs`` in the user's cache folder, ``~/.cache/relibra_jax``.

    Returns:
        The folder in which programs are kept; None if the cache is off.

    >>> keep_programs() is None  # the tests have set a folder of their own
    False
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_dir is None:
        path = _user_folder() if folder is None else Path(folder)
        if not path.exists():
            print(f"relibra_jax: compiled programs are kept in {path}", file=sys.stderr)
        jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return Path(jax.config.jax_compilation_cache_dir)


def _user_folder() -> Path:
    """Return ``programs`` in the cache folder of `pallas_kernels.user_cache`, which this level may not import."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relibra_jax" / "programs"


def keep_programs_unless(args: list[str]) -> list[str]:
    """Keep compiled programs unless the arguments of a command have `KEEP_NOTHING`; returns the other arguments."""
    if KEEP_NOTHING not in args:
        keep_programs()
    return [arg for arg in args if arg != KEEP_NOTHING]


@functools.cache
def announce_compilation() -> None:
    """Say on standard error what is being compiled, once a compilation has taken longer than `SLOW_SECONDS`.

    The first call takes effect for the whole process. Of several processes the first one says it.
    """
    jax.monitoring.register_event_duration_secs_listener(compilation_listener(SLOW_SECONDS))


def compilation_listener(seconds: float) -> Callable[..., None]:
    """Return a listener to JAX's events that prints the line of `announce_compilation`."""
    timers: dict[int, threading.Timer] = {}

    def say(program: str) -> None:
        if not jax.process_index():
            print(f"relibra_jax: compiling {program}, which takes more than {seconds:g} s", file=sys.stderr)

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event not in (LOWERED, COMPILED):
            return
        thread = threading.get_ident()
        if timer := timers.pop(thread, None):
            timer.cancel()
        if event == LOWERED:
            timers[thread] = timer = threading.Timer(seconds, say, (program_name(details),))
            timer.daemon = True
            timer.start()

    return listen


def program_name(details: dict[str, str | int]) -> str:
    """Return the name of the program that an event of JAX is about, as the user wrote it.

    >>> program_name({"fun_name": "jit(_train_step)"})
    'train_step'
    """
    return str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")").strip("_")
