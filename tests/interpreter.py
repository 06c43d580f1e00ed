"""Where the Hopper kernels are tested: JAX's GPU interpreter, which detects races."""

import contextlib

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def interpreter(implementation):
    """Where the Hopper kernels can run; none of them may race."""
    if implementation != "mosaic":
        yield
        return
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
        assert not get_races().races_found
