"""One GPU as each rank of a real plan in turn: how long the slowest rank keeps the others waiting, and what of a layer.

The quotas of a plan for 2 x 4 ranks are scaled to about 1,024 rows a group, as large micro-batches have; at the rows of
the recorded demo the latency of a kernel would hide the balance.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.facts import say
from experiments.gpu_day.operations import random_array
from experiments.gpu_day.plan import read_quotas
from experiments.gpu_day.speed import REHEARSED, REPEATS
from experiments.gpu_day.timing import median_seconds
from pallas_kernels import grouped_mlp
from pallas_kernels.compare import check_close
from pallas_kernels.hopper.tile_sizes import MODELS, ModelShape

ROWS_PER_GROUP: Final = 1024


def scaled_quotas(folder: str, rows_per_group: int) -> dict[str, np.ndarray]:
    """The quotas of each planner, ``[stages, ranks, slots]``, all by the same factor; a stage is a layer of a
    micro-batch. What ranks have to compute in all is the same under every plan."""
    quotas = {
        name: quota.reshape(-1, quota.shape[2] * quota.shape[3], quota.shape[4])
        for name, quota in read_quotas(folder).items()
    }
    one = quotas["static"]
    factor = rows_per_group * one.shape[0] * one.shape[1] * one.shape[2] / one.sum()
    return {name: (quota * factor).astype(np.int32) for name, quota in quotas.items()}


def _setting(model: str, implementation: str, rehearsal: bool) -> tuple[ModelShape, str, int, float, int]:
    """Shape, implementation, readings, their seconds at least, and rows of a group."""
    if rehearsal:
        return REHEARSED, "xla", 1, 1e-4, 8
    return MODELS[model], implementation, REPEATS, 0.004, ROWS_PER_GROUP


def measure_stragglers(model: str, folder: str, implementation: str, *, rehearsal: bool) -> None:
    """Time every rank's grouped MLP with gradients, and sum the slowest ranks' times.

    Args:
        model: a name of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: where the plan is.
        implementation: the implementation of `pallas_kernels` that is measured.
        rehearsal: whether small sizes and one reading on blocked XLA are enough.
    """
    shape, name, repeats, reading, rows_per_group = _setting(model, implementation, rehearsal)
    quotas = scaled_quotas(folder, rows_per_group)
    rows = -(-max(int(quota.sum(-1).max()) for quota in quotas.values()) // 8) * 8
    x, weights = random_array(rows, shape.width), _weights(shape, quotas["static"].shape[-1])

    @jax.jit
    def step(x, buffers, sizes):
        def call(x, buffers):
            return grouped_mlp(x, buffers, sizes, implementation=name)

        out, pull = jax.vjp(call, x, buffers)
        return pull(out)

    for planner, quota in quotas.items():
        runs: dict[Any, Callable[[], Any]] = {
            place: functools.partial(step, x, weights, jnp.asarray(quota[place]))
            for place in np.ndindex(quota.shape[:2])
        }
        slowest = np.zeros(quota.shape[:2])
        for place, one in median_seconds(runs, repeats, reading=reading).items():
            slowest[place] = one.median
        load = quota.sum(-1)
        say(
            planner=planner,
            slowest_ms=slowest.max(1).sum() * 1e3,
            mean_ms=slowest.mean(1).sum() * 1e3,
            imbalance_of_rows=float(load.max(1).sum() / load.mean(1).sum()),
            imbalance_of_time=float(slowest.max(1).sum() / slowest.mean(1).sum()),
        )


def _weights(shape: ModelShape, slots: int) -> tuple[jax.Array, jax.Array]:
    weights = random_array(slots, 3, shape.width, shape.expert_width, seed=2)
    return weights[:-2], weights[-2:]


def measure_layer(model: str, folder: str, implementation: str, *, rehearsal: bool) -> None:
    """The whole layer on a 1 x 1 mesh with each rank's tokens in turn: fetch, dispatch, experts, combine, gradients.

    A rank's token copies are tokens of one expert each, in an order drawn at random, so that dispatch has to sort them;
    all slots are homes, since there is nobody to fetch replicas from. What is dispatch and combine is the difference to
    the experts alone.

    Args:
        model: a name of `pallas_kernels.hopper.tile_sizes.MODELS`.
        folder: where the plan is.
        implementation: the implementation of `pallas_kernels` that is measured.
        rehearsal: whether small sizes and one reading on blocked XLA are enough.

    Raises:
        ValueError: if the layer's output or gradients are not those of blocked XLA.
    """
    from experiments.gpu_day.one_rank import OneRank

    shape, name, repeats, reading, rows_per_group = _setting(model, implementation, rehearsal)
    quota = scaled_quotas(folder, rows_per_group)["relibra"]
    tokens = -(-int(quota.sum(-1).max()) // 8) * 8
    weights = jnp.concatenate(_weights(shape, quota.shape[-1]))
    ours, theirs = (OneRank(weights, tokens, implementation=one) for one in (name, "xla"))
    for rank in range(quota.shape[1]):
        sizes = quota[0, rank]
        off = check_close(f"rank {rank}", ours.gradients(sizes)(), theirs.gradients(sizes)())
        runs = {
            "layer": ours.forward(sizes),
            "layer with gradients": ours.gradients(sizes),
            "tables": ours.prepare(sizes),
            "fetch": ours.fetch(sizes),
            "experts": ours.experts(sizes),
            "experts with gradients": ours.experts(sizes, gradients=True),
        }
        seconds = median_seconds(runs, repeats, reading=reading)
        say(
            rank=rank,
            rows=int(sizes.sum()),
            milliseconds={part: one.median * 1e3 for part, one in seconds.items()},
            **off._asdict(),
        )
