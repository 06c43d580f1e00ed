"""The time of planning a batch of Qwen3-235B's shape on a GPU, which ``python -m experiments.bench`` times on a CPU."""

import time
from collections.abc import Callable
from typing import Any

import jax

from experiments.ladder.facts import print_facts


def measure_planning(*, rehearsal: bool = False) -> None:
    """Measure planners on the default device and on the host, and print each time immediately.

    Args:
        rehearsal: whether to plan only two layers.
    """
    from experiments import bench
    from relibra_jax.contract.replay import assigned_load
    from relibra_jax.planning.planners import PLANNERS
    from relibra_jax.planning.sample_packing import pack_samples

    layers = 2 if rehearsal else bench.LAYERS
    counts, tokens = bench.sample_loads(1024, layers, bench.BATCH.num_experts)
    load = assigned_load(counts, pack_samples(tokens, bench.BATCH, num_micro_batches=bench.MICRO_BATCHES))
    for device in dict.fromkeys((jax.devices()[0], jax.devices("cpu")[0])):
        for name in ("eplb", "lplb", "relibra"):
            with jax.default_device(device):
                run = bench.planner_run(PLANNERS[name], jax.device_put(load, device), bench.BATCH)
                first, seconds = _seconds(run), min(_seconds(run) for _ in range(3))
            print_facts(device=device.platform, planner=name, milliseconds=seconds * 1e3, first_seconds=first)


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin
