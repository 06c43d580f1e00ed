"""A comparison of the planner's search as one kernel with its jitted form on the same GPU: same homes, and times."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.gpu_day.facts import print_facts
from experiments.gpu_day.timing import median_seconds
from pallas_kernels.implementation import why_not_hopper
from relibra_jax.planning.annealing import Bins, anneal
from relibra_jax.planning.annealing_on_gpu import anneal_on_gpu

STEPS: Final = 10_000
"""The number of annealing steps, as in `relibra_jax.planning.relibra` between nodes."""


def check_search(layers: int, experts: int, micro_batches: int, *, rehearsal: bool) -> None:
    """Assign the experts of all layers to two nodes with both forms, and check that they give the same homes.

    Loads are multiples of a power of two, so sums are exact in any order.

    Args:
        layers: the number of layers, which are the rows of the search.
        experts: the number of experts, which are the items to assign.
        micro_batches: the number of micro-batches to balance.
        rehearsal: whether to run a few steps at small sizes in JAX's interpreter.

    Raises:
        ValueError: if the homes of a layer differ.
    """
    steps = STEPS
    if rehearsal:
        layers, experts, micro_batches, steps = 2, 8, 3, 12
    elif reason := why_not_hopper(jax.devices()[0].device_kind):
        print_facts(cannot_run=reason)
        return
    draw = np.random.default_rng(0)
    share = draw.integers(0, 1024, (experts, micro_batches, layers)) / 1024
    cost = draw.integers(0, 64, (2, experts, layers)) / 1024
    item = np.tile(np.arange(experts, dtype=np.int32)[:, None], (1, layers))
    start = Bins(jnp.asarray(share, jnp.float32), jnp.asarray(cost, jnp.float32), jnp.asarray(item))
    kernel, jitted = (
        functools.partial(
            jax.jit(functools.partial(search, steps=steps, hottest=0.3)), start, jax.random.key(0)
        )
        for search in (anneal_on_gpu, anneal)
    )

    def in_kernel():
        if not rehearsal:
            return kernel()
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            return kernel()

    result, expected = np.asarray(in_kernel()), np.asarray(jitted())
    differing_layers = int((result != expected).any(0).sum())
    print_facts(layers=layers, experts=experts, steps=steps, layers_that_differ=differing_layers)
    if differing_layers:
        raise ValueError(
            f"the kernel and the jitted form differ in the homes of {differing_layers} of {layers} layers"
        )
    runs: dict[str, Callable[[], Any]] = {"kernel": in_kernel, "jitted": jitted}
    seconds = median_seconds(runs, 1 if rehearsal else 5, reading=1e-4)
    print_facts(milliseconds={name: measurement.median * 1e3 for name, measurement in seconds.items()})
