"""The rate at which experts come from pinned host memory to a GPU, alone and beside products."""

import functools

import jax

from experiments.gpu_day.operations import random_array
from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts


def measure_host_copies(*, rehearsal: bool = False) -> None:
    """Measure a copy of experts from pinned host memory, products, and both in one program.

    Args:
        rehearsal: whether to measure once at small sizes.
    """
    slots, width, repeats = (2, 64, 1) if rehearsal else (4, 4096, 9)
    experts, x = random_array(slots, 3, width, width), random_array(width, width, seed=1)
    kept = jax.device_put(experts, experts.sharding.with_memory_kind("pinned_host"))
    operands = {"copy": (kept, None), "products": (None, x), "both": (kept, x)}
    runs = {name: functools.partial(_copy_and_multiply, *each) for name, each in operands.items()}
    assert (runs["copy"]()[0] == experts).all()
    readings = median_seconds(runs, repeats, shortest=1e-4 if rehearsal else 0.02)
    print_facts(
        bytes=experts.nbytes,
        milliseconds={name: reading.median * 1e3 for name, reading in readings.items()},
        gigabytes_per_second=experts.nbytes / readings["copy"].median / 1e9,
    )


@jax.jit
def _copy_and_multiply(
    experts: jax.Array | None, x: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    copied = None if experts is None else jax.device_put(experts, jax.memory.Space.Device)
    product = x
    for _ in range(32 if x is not None else 0):
        product = product @ x  # type: ignore[operator]
    return copied, product
