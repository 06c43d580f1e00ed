"""A layer of full size on one GPU: its parts, and the kernels of its gradients from a profile of JAX.

The GPU stands in for one of eight ranks with even routing: 16,384 tokens with as many experts each as the model has, in
the home and replica slots of the rank. Nothing is sent, so everything but the exchange between ranks is in the times.
"""

import collections
import shutil
import tempfile
from pathlib import Path
from typing import Final

import jax
import numpy as np

from experiments.gpu_day.one_rank import OneRank, Run
from experiments.gpu_day.operations import random_array
from experiments.gpu_day.speed import REHEARSAL_SHAPE
from experiments.gpu_day.timing import copy_bandwidth, median_seconds
from experiments.ladder.facts import print_facts
from experiments.miniature.phases import scope_phase
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS, REPLICAS

TOKENS: Final = 16384
"""The number of tokens of the rank."""
RUNS: Final = 5
"""The number of runs that a profile holds."""


def profile_layer(model: str, folder: str, implementation: str, *, rehearsal: bool = False) -> None:
    """Measure the layer and its parts, and print the time of each kernel of the layer with gradients.

    The profile is kept beside the plan.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the plan.
        implementation: the implementation of `pallas_kernels` to profile.
        rehearsal: whether to profile at small sizes on the CPU.
    """
    shape, tokens = (REHEARSAL_SHAPE, 64) if rehearsal else (MODELS[model], TOKENS)
    slots = shape.experts // RANKS + REPLICAS
    sizes = np.full(slots, tokens * shape.top_k // slots, np.int32)
    weights = random_array(slots, 3, shape.width, shape.expert_width, seed=2)
    kernels = "xla" if rehearsal else implementation
    layer = OneRank(weights, tokens, top_k=shape.top_k, implementation=kernels)
    run = layer.gradients(sizes)
    runs = {
        "layer": layer.forward(sizes),
        "layer with gradients": run,
        "tables": layer.prepare(sizes),
        "experts": layer.experts(sizes),
        "experts with gradients": layer.experts(sizes, gradients=True),
    }
    repeats, shortest = (1, 1e-4) if rehearsal else (9, 0.02)
    seconds = median_seconds(runs, repeats, shortest=shortest)
    print_facts(
        tokens=tokens,
        top_k=shape.top_k,
        rows=int(sizes.sum()),
        width=shape.width,
        milliseconds={part: reading.median * 1e3 for part, reading in seconds.items()},
        copied_gigabytes_per_second=copy_bandwidth(repeats, gigabytes=0.01 if rehearsal else 2.0) / 1e9,
    )
    kernel_times, scope_times = _profile(run, Path(folder) / "layer.xplane.pb")
    print_facts(scopes=scope_times, total=sum(kernel_times.values()))
    for kernel, milliseconds in kernel_times.most_common(40):
        print_facts(kernel=kernel, milliseconds=milliseconds)


def _profile(run: Run, kept: Path) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Return the milliseconds of a run by kernel and by scope, and keep the profile in a file."""
    times, scopes = collections.Counter[str](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            for _ in range(RUNS):
                jax.block_until_ready(run())
        (path,) = Path(trace).glob("plugins/profile/*/*.xplane.pb")
        shutil.copy(path, kept)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    stats = {key: str(value) for key, value in event.stats if key is not None}
                    milliseconds = event.duration_ns / 1e6 / RUNS
                    place = stats.get("name", stats.get("tf_op", ""))
                    times[f"{event.name[:60]} | {stats.get('hlo_op', '')} | {place[-90:]}"] += milliseconds
                    scopes[scope_phase(place) or "other"] += milliseconds
    return times, scopes
