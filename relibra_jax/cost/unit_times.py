"""Seconds of one unit of work of a rank: what a planner weighs, by the formulas of a batch's time."""

from relibra_jax.cost.batch_time import check_dispatch
from relibra_jax.cost.copies import RESIDENT_BYTES, STATE_BYTES
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.step_time import ACTIVATION_BYTES, count_passes
from relibra_jax.limits import check_positive
from relibra_jax.types import UnitTimes


def unit_times(
    cluster: Cluster,
    model: Model,
    *,
    context: float,
    scale: float = 1.0,
    dispatch: str = "flat",
    updates: int = 1,
    recompute: bool = False,
) -> UnitTimes:
    """What one unit of work costs a rank, in all passes of a batch.

    A phase of a layer takes what its busiest rank has of it: tokens x ``token`` for attention, copies x ``copy`` for
    compute, and for the exchange the larger of crossings x ``crossing`` and copies inside the node x ``spread``: both
    networks work at the same time. Not in it are rows that only fill up a tile, and replicas, which attention hides.
    Where a node's ranks share a link, a rank's crossings are the mean over its node's.

    Args:
        cluster: the hardware, for example ``CLUSTERS["h100"]``.
        model: the sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``.
        context: the mean length of a sequence, tokens.
        scale: how many tokens each token stands for; an expert that is moved or pushed stands for itself.
        dispatch: ``flat``, where every copy crosses by itself; or ``hierarchical``, where a token crosses to a node
            once, however many of its experts are there.
        updates: the optimizer updates of a batch, each of which pushes residents.
        recompute: whether there is a forward pass for old log-probabilities.

    Returns:
        UnitTimes of Python floats, seconds.

    Raises:
        ValueError: if a number is not positive and finite, ``dispatch`` is unknown, or there is no pass to run.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> times = unit_times(CLUSTERS["h100"], MODELS["gpt-oss-20b"], context=4096.0)
    >>> f"{times.crossing / times.spread:.0f} {times.push / times.crossing:.0f}"
    '9 6480'
    """
    check_positive("context", context)
    check_positive("scale", scale)
    check_dispatch(dispatch)
    passes = count_passes(updates, recompute=recompute)
    flops = cluster.matmul_flops * cluster.matmul_efficiency
    slow, fast = (
        bandwidth * cluster.network_efficiency
        for bandwidth in (cluster.slow_bandwidth, cluster.fast_bandwidth)
    )
    row = scale * passes.exchange * ACTIVATION_BYTES * model.width
    return UnitTimes(
        token=scale * passes.compute * model.token_flops(context) / flops,
        copy=scale * passes.compute * 2 * model.expert_params / flops,
        crossing=row / slow,
        spread=row / fast,
        move=STATE_BYTES * model.expert_params / slow,
        push=updates * RESIDENT_BYTES * model.expert_params / slow,
        hierarchical=dispatch == "hierarchical",
    )
