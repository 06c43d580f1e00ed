"""The planner's search in one kernel beside its jitted form, on the same GPU: the same homes, and the time of each."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.gpu_day.facts import say
from experiments.gpu_day.timing import median_seconds
from pallas_kernels.implementation import why_not_hopper
from relibra_jax.planning.annealing import Bins, anneal
from relibra_jax.planning.annealing_on_gpu import anneal_on_gpu

STEPS: Final = 10_000
"""The annealing steps, as many as `relibra_jax.planning.relibra` takes between nodes."""


def check_search(layers: int, experts: int, micro_batches: int, *, rehearsal: bool) -> None:
    """Search for the nodes of all layers' experts, in steps that both forms have to make alike.

    Loads are multiples of a power of two, so that sums are exact in any order.

    Args:
        layers: the rows of the search.
        experts: the items, on two nodes.
        micro_batches: the micro-batches that are balanced.
        rehearsal: whether small sizes, few steps and JAX's interpreter are enough.

    Raises:
        ValueError: if homes differ.
    """
    steps = STEPS
    if rehearsal:
        layers, experts, micro_batches, steps = 2, 8, 3, 12
    elif reason := why_not_hopper(jax.devices()[0].device_kind):
        say(cannot_run=reason)
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

    found, wanted = np.asarray(in_kernel()), np.asarray(jitted())
    differ = int((found != wanted).any(0).sum())
    say(layers=layers, experts=experts, steps=steps, layers_that_differ=differ)
    if differ:
        raise ValueError(f"{differ} of {layers} layers end at other homes than those of the jitted form")
    runs: dict[str, Callable[[], Any]] = {"kernel": in_kernel, "jitted": jitted}
    seconds = median_seconds(runs, 1 if rehearsal else 5, reading=1e-4)
    say(milliseconds={name: one.median * 1e3 for name, one in seconds.items()})
