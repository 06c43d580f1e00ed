"""The group sizes of the benchmark: the quotas of one rank in a plan, scaled to a mean number of rows per group."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from pallas_kernels.hopper.tile_sizes import REPLICAS
from relibra_jax.contract.types import Array, Topology


def planned_sizes(
    quotas: Mapping[str, Int[Array, "M L N G S"]], topology: Topology, homes: int, mean: int
) -> dict[str, np.ndarray]:
    """Return the group sizes of one rank, ``[homes + REPLICAS]``, under the static plan and the ReLibra plan.

    The rank, micro-batch and layer with the most rows in replica slots are chosen. If the measured model has more slots
    than the plan's ranks, the following layers and micro-batches of the same rank provide the other sizes, cyclically.

    Args:
        quotas: the quotas of each plan, by the name of the planner.
        topology: the topology of the plans.
        homes: the number of home slots of the measured model.
        mean: the mean number of rows of a group after scaling.
    """

    def quota_by_rank(name: str) -> np.ndarray:
        quota = np.asarray(quotas[name])
        return quota.reshape(-1, topology.num_ranks, topology.slots).swapaxes(0, 1)

    replicated = quota_by_rank("relibra")[..., topology.held_slots :].sum(-1)
    rank, first = np.unravel_index(replicated.argmax(), replicated.shape)
    sizes = {}
    for name in ("static", "relibra"):
        quota = np.roll(quota_by_rank(name)[rank], -first, axis=0)
        home_quota = np.resize(quota[:, : topology.home_slots], homes)
        replica_quota = np.resize(quota[:, topology.held_slots :], REPLICAS)
        sizes[name] = scaled_sizes(np.concatenate([home_quota, replica_quota]), mean)
    return sizes


def scaled_sizes(quota: np.ndarray, mean: int) -> np.ndarray:
    """Return group sizes ``[S]`` in the proportions of a quota, scaled to a mean and rounded down to whole rows.

    >>> scaled_sizes(np.array([1, 0, 3]), 100).tolist()
    [75, 0, 225]
    """
    return (quota * (mean * quota.size / max(quota.sum(), 1))).astype(np.int32)


def buffer_rows(sizes: Sequence[np.ndarray]) -> int:
    """Return the number of rows of a buffer for any of these group sizes, a multiple of 8 as in training steps.

    >>> buffer_rows([np.array([5, 0, 6]), np.array([1, 1, 1])])
    16
    """
    return -(-max(int(groups.sum()) for groups in sizes) // 8) * 8
