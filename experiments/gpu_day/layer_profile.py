"""The kernels of one layer with gradients on a GPU, from a profile of JAX: their names and times."""

import collections
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp

from experiments.gpu_day.ranks import layer_setting, scaled_quotas, slot_weights
from experiments.ladder.facts import print_facts

RUNS: Final = 5
"""The number of runs that a profile holds."""
SCOPES: Final = ("prepare_layer", "replica_fetch", "dispatch", "experts", "combine")
"""The scopes of a layer, by which the times of kernels are summed."""


def profile_layer(model: str, folder: str, implementation: str, *, rehearsal: bool = False) -> None:
    """Profile the layer with gradients of the first rank of a plan, and print the time of each kernel.

    The profile is kept beside the plan.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the plan.
        implementation: the implementation of `pallas_kernels` to profile.
        rehearsal: whether to profile at small sizes on the CPU.
    """
    from experiments.gpu_day.one_rank import OneRank

    shape, name, _, _, rows_per_group = layer_setting(model, implementation, rehearsal)
    quota = scaled_quotas(folder, rows_per_group)["relibra"]
    tokens = -(-int(quota.sum(-1).max()) // 8) * 8
    weights = jnp.concatenate(slot_weights(shape, quota.shape[-1]))
    run = OneRank(weights, tokens, implementation=name).gradients(quota[0, 0])
    for _ in range(2):
        jax.block_until_ready(run())
    times, scopes = collections.Counter[str](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            for _ in range(RUNS):
                jax.block_until_ready(run())
        (path,) = Path(trace).glob("plugins/profile/*/*.xplane.pb")
        shutil.copy(path, Path(folder) / "layer.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    stats = {key: str(value) for key, value in event.stats if key is not None}
                    milliseconds = event.duration_ns / 1e6 / RUNS
                    place = stats.get("name", stats.get("tf_op", ""))
                    scope = next((each for each in SCOPES if re.search(rf"\b{each}\b", place)), "other")
                    times[f"{event.name[:60]} | {stats.get('hlo_op', '')} | {place[-90:]}"] += milliseconds
                    scopes[scope] += milliseconds
    print_facts(rows=int(quota[0, 0].sum()), width=shape.width, scopes=scopes, total=sum(times.values()))
    for kernel, milliseconds in times.most_common(40):
        print_facts(kernel=kernel, milliseconds=milliseconds)
