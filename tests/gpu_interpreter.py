"""What tests of the GPU kernels share: the interpreters that run them on a CPU, and sizes that suit these."""

import contextlib

# JAX would import this with the first kernel, and trace every program again that was traced before.
import jax.experimental.pallas.fuser  # noqa: F401
import numpy as np
from gpu_multicast import multicast
from jax._src import config
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def gpu_interpreter(implementation):
    """Let kernels run in an interpreter; nothing for implementations without kernels.

    The Hopper kernels run in JAX's GPU interpreter, which detects races, and fail if there is one. The Triton kernels,
    whose blocks share nothing, run one block after the other; what no block wrote is NaN there, and so is what lies
    beyond the end of an array.

    Args:
        implementation: the name of the implementation that is tested.
    """
    if implementation == "mosaic":
        with multicast(), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
            assert not get_races().races_found
    elif implementation == "triton":
        mode = config.pallas_tpu_interpret_mode_context_manager
        before = mode.swap_local(True)
        try:
            yield
        finally:
            mode.set_local(before)
    else:
        yield


def sizes_of_every_pattern():
    """Return sizes of 263 groups of which any 8 in a row are empty in another way: all 2^8 patterns in one launch.

    The interpreter is slow. What is zero and what is not is a de Bruijn sequence.
    """
    ring, seen = [0] * 8, {(0,) * 8}
    while len(seen) < 256:
        one = (*ring[-7:], 1)
        ring.append(0 if one in seen else 1)
        seen.add(tuple(ring[-8:]))
    assert len(ring) == 263
    sizes = np.array(ring) * np.random.default_rng(0).integers(1, 4, size=263)
    return sizes.astype(np.int32)
