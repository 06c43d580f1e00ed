"""Measurements in which one GPU computes the work of each rank of a real plan: the slowest rank, and a layer's parts.

The quotas of a plan for 2 x 4 ranks are scaled to about 1,024 rows per group, which is typical of large micro-batches.
The recorded demo has so few rows that the latency of kernels would hide the imbalance.
"""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.one_rank import OneRank
from experiments.gpu_day.operations import random_array
from experiments.gpu_day.plan import read_quotas
from experiments.gpu_day.speed import REHEARSAL_SHAPE, REPEATS
from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts
from experiments.rank_times import imbalance_over_stages, quotas_of_ranks, rank_seconds, slowest_seconds
from pallas_kernels.compare import check_close
from pallas_kernels.hopper.tile_sizes import MODELS, ModelShape

ROWS_PER_GROUP: Final = 1024


def scaled_quotas(folder: str, rows_per_group: int) -> dict[str, np.ndarray]:
    """Return the quotas of each planner, ``[stages, ranks, slots]``, all scaled by the same factor.

    A stage is one layer of one micro-batch. The total work of all ranks is the same under every plan.
    """
    quotas = {name: quotas_of_ranks(quota) for name, quota in read_quotas(folder).items()}
    static = quotas["static"]
    factor = rows_per_group * static.shape[0] * static.shape[1] * static.shape[2] / static.sum()
    return {name: (quota * factor).astype(np.int32) for name, quota in quotas.items()}


def _setting(model: str, implementation: str, rehearsal: bool) -> tuple[ModelShape, str, int, float, int]:
    """Return the shape, the implementation, the number and minimum seconds of readings, and the rows per group."""
    if rehearsal:
        return REHEARSAL_SHAPE, "xla", 1, 1e-4, 8
    return MODELS[model], implementation, REPEATS, 0.004, ROWS_PER_GROUP


def measure_stragglers(model: str, folder: str, implementation: str, *, rehearsal: bool = False) -> None:
    """Measure the time of every rank's grouped MLP with gradients, and sum the times of the slowest ranks.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the plan.
        implementation: the implementation of `pallas_kernels` to measure.
        rehearsal: whether to measure blocked XLA once at small sizes.
    """
    shape, name, repeats, shortest, rows_per_group = _setting(model, implementation, rehearsal)
    quotas = scaled_quotas(folder, rows_per_group)
    rows = -(-max(int(quota.sum(-1).max()) for quota in quotas.values()) // 8) * 8
    x, weights = random_array(rows, shape.width), _weights(shape, quotas["static"].shape[-1])
    for planner, quota in quotas.items():  # one by one, so that a time limit loses only the last
        timed = rank_seconds(
            {planner: quota}, x, weights, repeats=repeats, implementation=name, shortest=shortest
        )
        print_facts(
            planner=planner,
            slowest_ms=slowest_seconds(timed[planner]) * 1e3,
            mean_ms=timed[planner].mean(1).sum() * 1e3,
            imbalance_of_rows=imbalance_over_stages(quota.sum(-1)),
            imbalance_of_time=imbalance_over_stages(timed[planner]),
        )


def _weights(shape: ModelShape, slots: int) -> tuple[jax.Array, jax.Array]:
    weights = random_array(slots, 3, shape.width, shape.expert_width, seed=2)
    return weights[:-2], weights[-2:]


def plan_layer(model: str, folder: str, *, rehearsal: bool) -> tuple[np.ndarray, Callable[[str], OneRank]]:
    """Return what runs the layer of each rank of a ReLibra plan on one device.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the plan.
        rehearsal: whether sizes are small.

    Returns:
        The quotas of the ranks in the first stage, ``[ranks, slots]``, and a function from the name of an
        implementation to the layer.
    """
    shape, _, _, _, rows_per_group = _setting(model, "", rehearsal)
    quota = scaled_quotas(folder, rows_per_group)["relibra"]
    tokens = -(-int(quota.sum(-1).max()) // 8) * 8
    weights = jnp.concatenate(_weights(shape, quota.shape[-1]))
    return quota[0], lambda name: OneRank(weights, tokens, implementation=name)


def measure_layer(model: str, folder: str, implementation: str, *, rehearsal: bool = False) -> None:
    """Measure the layer and its parts (fetch, dispatch, experts, combine) on a 1 x 1 mesh, for the tokens of each rank.

    Each token copy of a rank is a token with one expert here, in random order, so that dispatch must sort the tokens.
    All slots are home slots, since there is no other rank to fetch replicas from. The time of dispatch and combine is
    the difference between the layer and the experts alone.

    Args:
        model: the name of the model, a key of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: the folder of the plan.
        implementation: the implementation of `pallas_kernels` to measure.
        rehearsal: whether to measure blocked XLA once at small sizes.

    Raises:
        ValueError: if the output or a gradient of the layer differs from that of blocked XLA.
    """
    _, name, repeats, shortest, _ = _setting(model, implementation, rehearsal)
    quota, make_layer = plan_layer(model, folder, rehearsal=rehearsal)
    layer, reference = make_layer(name), make_layer("xla")
    for rank, sizes in enumerate(quota):
        error = check_close(f"rank {rank}", layer.gradients(sizes)(), reference.gradients(sizes)())
        runs = {
            "layer": layer.forward(sizes),
            "layer with gradients": layer.gradients(sizes),
            "tables": layer.prepare(sizes),
            "fetch": layer.fetch(sizes),
            "experts": layer.experts(sizes),
            "experts with gradients": layer.experts(sizes, gradients=True),
        }
        seconds = median_seconds(runs, repeats, shortest=shortest)
        print_facts(
            rank=rank,
            rows=int(sizes.sum()),
            milliseconds={part: measurement.median * 1e3 for part, measurement in seconds.items()},
            **error._asdict(),
        )
