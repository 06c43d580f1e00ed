"""The modelled seconds of one unit of each kind of work, by which planners compare plans."""

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
    """Model the seconds that one unit of each kind of work costs a rank, in all passes of a batch.

    The time of each phase of a layer is that of its busiest rank: tokens x ``token`` for attention, copies x ``copy``
    for compute. For the exchange it is the larger of crossings x ``crossing`` and copies inside the node x ``spread``,
    because both networks work at the same time. Not included are rows that only fill up a tile, and transfers of
    replicas, which attention hides. If the ranks of a node share a link, the crossings of a rank are the mean of its
    node.

    Args:
        cluster: the hardware, for example ``CLUSTERS["h100"]``.
        model: the sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``.
        context: the mean length of a sequence in tokens.
        scale: the number of tokens that each token stands for. It does not apply to experts that are moved or pushed.
        dispatch: ``flat`` if every copy crosses by itself, ``hierarchical`` if a token crosses to a node once, however
            many of its experts are there.
        updates: the number of optimizer updates of a batch, each of which sends residents.
        recompute: True if there is a forward pass for old log-probabilities.

    Returns:
        The unit times as Python floats, in seconds.

    Raises:
        ValueError: if ``context`` or ``scale`` is not positive and finite, if ``dispatch`` is unknown, or if there is
            neither an update nor a recompute.

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
