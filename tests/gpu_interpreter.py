"""Helpers for tests of the GPU kernels: interpreters that run the kernels on a CPU, and group sizes for them."""

import contextlib

# Without this import, JAX imports the module at the first kernel, and then traces all earlier programs again.
import jax.experimental.pallas.fuser  # noqa: F401
import numpy as np
from gpu_multicast import multicast
from jax._src import config
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def gpu_interpreter(implementation):
    """Run kernels in an interpreter; this does nothing for implementations without kernels.

    The Hopper kernels run in JAX's GPU interpreter, and the test fails if it detects a race. The blocks of the Triton
    kernels share nothing, so they run sequentially. There, entries that no block wrote are NaN, and so are entries
    beyond the end of an array.

    Args:
        implementation: the name of the tested implementation.
    """
    if implementation == "mosaic":
        with multicast(), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
            assert not get_races().races_found
    elif implementation == "triton":
        mode = config.pallas_tpu_interpret_mode_context_manager
        old_mode = mode.swap_local(True)
        try:
            yield
        finally:
            mode.set_local(old_mode)
    else:
        yield


def sizes_of_every_pattern():
    """Return sizes of 263 groups in which every pattern of 8 consecutive empty and non-empty groups occurs.

    A de Bruijn sequence decides which sizes are zero. One launch then tests all 2^8 patterns, since the interpreter is
    slow.
    """
    ring, seen = [0] * 8, {(0,) * 8}
    while len(seen) < 256:
        candidate = (*ring[-7:], 1)
        ring.append(0 if candidate in seen else 1)
        seen.add(tuple(ring[-8:]))
    assert len(ring) == 263
    sizes = np.array(ring) * np.random.default_rng(0).integers(1, 4, size=263)
    return sizes.astype(np.int32)
