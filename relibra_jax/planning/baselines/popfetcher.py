"""PopFetcher (Zhang et al., USENIX ATC 2025) as a planner: a layer's hot experts are fetched before it is routed.

The paper observes that the choices of experts in neighbouring layers are correlated. It predicts the popularity of a
layer's experts from the routing of the layer below and from transition probabilities between experts, counted over the
last iterations. The experts that are expected to be hot are fetched while attention computes. No code was published,
and we have only public summaries of the text, so this module is our interpretation:

- The probabilities are counted over the previous batch; the paper's window is ten iterations.
- Experts are copied by EPLB's rule on the expected loads (largest load per copy, to the lightest rank of a node). The
  paper prunes and prices candidates with a model of its own cluster. Fetches that cross nodes are left out.
- The true number of tokens is split evenly over the copies, because dispatch knows it.

Homes do not move: they are contiguous, or packed once.
"""

import functools

from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.planner import Planner
from relibra_jax.contract.types import Array, Plan, Topology
from relibra_jax.planning.baselines.eplb import copy_evenly, pack_homes
from relibra_jax.planning.baselines.forecasts import plan_expected
from relibra_jax.planning.per_node import plan_per_node


@functools.cache
def popfetcher(*, packed: bool = False) -> Planner:
    """Make a planner from PopFetcher, which copies experts inside their node by loads predicted from the layer below.

    Source: PopFetcher (USENIX ATC 2025), a baseline of ReLibra (arXiv 2605.08639). Replicas of a layer are chosen from
    the true loads of the layer below, without those of the layer itself; see ``across_layers`` in
    `relibra_jax.planning.baselines.forecasts.FORECASTS`.

    Args:
        packed: whether to pack homes once, from the loads of the first batch, as a checkpoint could store them.
            Otherwise homes are contiguous.

    Returns:
        A Planner whose state is a PlacedState. Without ``transitions`` it expects the mean of the previous batch.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from relibra_jax import PlanRequest
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> load, planner = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]]), popfetcher()
    >>> first, state = planner.update(PlanRequest(load), planner.init(topology, 1, key=jax.random.key(0)), topology)
    >>> second, state = planner.update(PlanRequest(load), state, topology)
    >>> first.quota.sum(-1).tolist(), second.quota.sum(-1).tolist()  # there is no forecast for the first batch
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
