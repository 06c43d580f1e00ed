"""Lower bounds of the token copies that are sent inside nodes, over all homes, copies and assignments of samples.

Under hierarchical dispatch, a token copy stays on its rank, or on the rank of the same local index where its token
arrived, only if that rank holds its expert. Let local index g hold the experts h_g: E / G of them at home over all
nodes, and N times the resident and replica slots of a rank. Replicas may differ between micro-batches.

    without striping  all tokens of a sample have the same local index, so the copies that stay are at most those of the
                      sample's most used experts, as many as local index g holds
    striped           the token at position i has local index i mod G. The copies that stay at home are at most the
                      sum over experts of the most copies, of the G local indices, because each expert has one home.
                      To these, replicas and residents add at most the most used experts of each sample and local index

Under flat dispatch, the copies that stay are those of experts that the rank itself holds, and the same holds for the
slots of a rank instead of those of a local index.
"""

import numpy as np
from jaxtyping import Float

from relibra_jax.contract.types import RoutingReplay, Topology


def largest_sums(weight: Float[np.ndarray, "... E"]) -> Float[np.ndarray, "... E"]:
    """Return the sums of the 1, 2, ... largest entries along the last axis.

    >>> largest_sums(np.array([1.0, 3.0, 2.0])).tolist()
    [3.0, 5.0, 6.0]
    """
    return np.cumsum(-np.sort(-weight, -1), -1)


def copies_off_rank(load: Float[np.ndarray, "B L E"], num_held: int) -> float:
    """Bound from below the token copies, of all layers, that leave a rank or node with ``num_held`` experts."""
    kept = largest_sums(load)[..., min(num_held, load.shape[2]) - 1]
    return float(load.sum() - kept.sum())


def striped_copies_off_rank(replay: RoutingReplay, topology: Topology, *, copied: int) -> float:
    """Bound from below the token copies, of all layers, that leave a rank, or a local index, if layers are striped.

    Args:
        replay: the routing of all samples of the batch.
        topology: the expert-parallel group.
        copied: the number of resident and replica slots of a rank, or of all ranks of a local index.
    """
    mask, ids = np.asarray(replay.mask), np.asarray(replay.expert_ids)
    local, experts = topology.ranks_per_node, topology.num_experts
    samples, position = np.nonzero(mask)
    row = (samples * local + position % local) * experts
    off = 0.0
    for layer in range(ids.shape[2]):
        place = row[:, None] + ids[samples, position, layer].astype(np.int64)
        counts = np.bincount(place.ravel(), minlength=len(mask) * local * experts)
        load = counts.reshape(len(mask), local, experts).astype(float)
        kept = load.sum(0).max(0).sum()
        if copied:
            kept += largest_sums(load)[..., min(copied, experts) - 1].sum()
        off += max(float(load.sum() - kept), 0.0)
    return off
