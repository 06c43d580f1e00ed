"""PopFetcher (Zhang et al., USENIX ATC 2025) as a planner: a layer's hot experts are fetched before it is routed.

The paper observes that experts of neighbouring layers are chosen together, and expects how popular a layer's experts
will be from the routing of the layer below and the probability of one expert after another, counted over the last
iterations. The experts that are expected hot are fetched while attention computes. No code was published, and we have
only public summaries of the text, so what is here is our reading:

- the probabilities are counted over the batch before, where the paper's window is ten iterations;
- experts are copied by EPLB's rule on the expected loads (largest load per copy, to the lightest rank of a node), where
  the paper prunes and prices candidates with a model of its own cluster. Fetches that cross nodes are left out;
- tokens are split evenly over the copies, by their true number, as dispatch sees it.

Homes do not move: they are contiguous, or packed once.
"""

import functools

from relibra_jax.plan import contiguous_homes
from relibra_jax.planning.baselines.eplb import copy_evenly, pack_homes
from relibra_jax.planning.baselines.forecasts import plan_expected
from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.types import Array, Plan, Planner, Topology


def popfetcher(*, packed: bool = False) -> Planner:
    """PopFetcher's replicas: the experts that the layer below lets expect, copied inside their node.

    Source: PopFetcher (USENIX ATC 2025), a baseline of ReLibra (arXiv 2605.08639). The true loads of a layer are not
    looked at when its replicas are chosen, only those of the layer below; see
    `relibra_jax.planning.baselines.forecasts.FORECASTS` under ``across_layers``.

    Args:
        packed: whether homes are packed once, from the first batch that was seen, as a checkpoint could be laid out;
            otherwise they are contiguous.

    Returns:
        A Planner whose state is a PlacedState. Without ``transitions`` it expects the mean of the batch before.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load, planner = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]]), popfetcher()
    >>> first, state = planner.update(load, planner.init(topology, 1, key=jax.random.key(0)), topology)
    >>> second, state = planner.update(load, state, topology)
    >>> first.quota.sum(-1).tolist(), second.quota.sum(-1).tolist()  # nothing was seen before the first
    ([[[[90, 10]]]], [[[[63, 37]]]])
    """

    def pack(for_homes, topology: Topology) -> Array:
        if packed:
            return pack_homes(
                for_homes, topology, num_groups=topology.num_experts, num_nodes=topology.num_nodes
            )
        return contiguous_homes(topology, len(for_homes))

    def fill(load, expected, home, topology: Topology) -> Plan:
        rule = functools.partial(copy_evenly, replica_slots=topology.replica_slots)
        return plan_per_node(rule, load, expected, home, topology)

    return plan_expected(pack, fill, loads="across_layers", scope="micro_batch", keep_homes=True)
