"""One compilation for all ranks: rank 0 compiles a program, and the other ranks load it.

JAX does this for programs of several GPU hosts. On CPUs its keys contain the process, so every rank would compile
everything; on the few cores of a miniature that takes longer than the updates. This module replaces private functions
of JAX. It changes where programs are compiled, and not what they are.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import jax
from jax._src import cache_key, compilation_cache, compiler, distributed

from experiments.miniature.quota import whole_core

MOST_SECONDS: Final = 600
"""The time for which a rank waits for a program that rank 0 has begun to compile."""
BEGIN_SECONDS: Final = 15
"""The time for which a rank waits for rank 0 to begin. After it, the rank compiles the program itself."""


@contextmanager
def shared_programs() -> Iterator[None]:
    """Compile on rank 0 what all ranks of a process group run, if they keep programs on disk.

    Raises:
        RuntimeError: from JAX, if rank 0 does not end a compilation within `MOST_SECONDS`.
    """
    hash_options = functools.partial(_without_devices, cache_key._hash_serialized_compile_options)
    replaced = (
        mock.patch.object(cache_key, "_hash_accelerator_config", cache_key._hash_devices),
        mock.patch.object(cache_key, "_hash_serialized_compile_options", hash_options),
        mock.patch.object(
            compiler,
            "_compile_and_write_cache",
            functools.partial(_share, compiler._compile_and_write_cache),
        ),
    )
    with ExitStack() as stack:
        for each in replaced:
            stack.enter_context(each)
        yield


def _without_devices(hash_options: Callable[..., None], hashed: Any, options: Any, **_: bool) -> None:
    """Hash compile options without the devices: a program that runs on a device of its process has the same key."""
    hash_options(hashed, options, strip_device_assignment=True)


def _share(
    compile_: Callable[..., Any], backend: Any, computation: Any, devices: Any, options: Any, *rest: Any
) -> Any:
    """Compile a program on rank 0, with the whole core, and give it to the others."""
    callbacks, _, key = rest
    group = distributed.global_state
    assert group.client is not None
    begun = f"{key}/begun"
    if group.process_id == 0:
        group.client.key_value_set(begun, "", allow_overwrite=True)
        with whole_core():
            program = compile_(backend, computation, devices, options, *rest)
        text = compilation_cache.compress_executable(backend.serialize_executable(program))
        group.client.key_value_set_bytes(key, text, allow_overwrite=True)
        return program
    try:
        group.client.blocking_key_value_get(begun, round(1000 * BEGIN_SECONDS))
    except jax.errors.JaxRuntimeError:
        with whole_core():
            return compile_(backend, computation, devices, options, *rest)
    text = group.client.blocking_key_value_get_bytes(key, 1000 * MOST_SECONDS)
    return backend.deserialize_executable(
        compilation_cache.decompress_executable(text), devices, options, callbacks
    )
