"""The choice between two ways for each replica: from the host's memory, or from the rank of its expert.

Source: the transfer engine of ForeMoE (arXiv 2606.11867), which uses both at once. A rank's copies wait for one another
on each way, so a fetch takes as long as the longer of its two queues, and a replica is worth moving to the other way as
long as that lowers the longer queue. `relibra_jax.routing.host_share` says which replicas move first.
"""

import dataclasses
from collections.abc import Callable

from relibra_jax.contract.types import Price, Topology


def choose_host_slots(seconds: Callable[[Price], float], topology: Topology, price: Price) -> int:
    """Choose how many replicas of each rank come from the host's memory, so that a batch takes the least time.

    Args:
        seconds: the modelled time of the batch for a price, `relibra_jax.cost.batch_time.batch_time` with its plan.
        topology: the expert-parallel group.
        price: the price of the batch, on a cluster with a way from the host.

    Returns:
        The number, 0 to R; the smallest of equally good ones. 0 if the price has no transfer from the host.

    >>> price = Price(token=0.0, copy=0.0, crossing=0.0, spread=0.0, move=0.0, push=0.0, from_host=1.0)
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=3)
    >>> choose_host_slots(lambda price: max(price.host_slots * 1.0, (3 - price.host_slots) * 2.0), topology, price)
    2
    """
    if not float(price.from_host):
        return 0
    counts = range(topology.replica_slots + 1)
    return min(counts, key=lambda count: seconds(dataclasses.replace(price, host_slots=count)))
