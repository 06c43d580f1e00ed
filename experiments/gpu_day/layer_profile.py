"""The kernels of one layer with gradients on a GPU, from a profile of JAX: their names and times."""

import collections
import shutil
import tempfile
from pathlib import Path
from typing import Final

import jax

from experiments.gpu_day.ranks import plan_layer
from experiments.ladder.facts import print_facts
from experiments.miniature.phases import scope_phase

RUNS: Final = 5
"""The number of runs that a profile holds."""


def profile_layer(model: str, folder: str, implementation: str, *, rehearsal: bool = False) -> None:
    """Profile the layer with gradients of the first rank of a plan, and print the time of each kernel.

    The profile is kept beside the plan.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the plan.
        implementation: the implementation of `pallas_kernels` to profile.
        rehearsal: whether to profile at small sizes on the CPU.
    """
    quota, make_layer = plan_layer(model, folder, rehearsal=rehearsal)
    layer = make_layer("xla" if rehearsal else implementation)
    run = layer.gradients(quota[0])
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
                    times[f"{event.name[:60]} | {stats.get('hlo_op', '')} | {place[-90:]}"] += milliseconds
                    scopes[scope_phase(place) or "other"] += milliseconds
    width = layer.x.shape[-1]
    print_facts(rows=int(quota[0].sum()), width=width, scopes=scopes, total=sum(times.values()))
    for kernel, milliseconds in times.most_common(40):
        print_facts(kernel=kernel, milliseconds=milliseconds)
