"""The seconds in which data-parallel groups exchange the weights and gradients of a layer, in a batch.

Every plan of a batch takes them, so `relibra_jax.cost.batch_time` leaves them out; they count where groups of different
sizes are compared. Groups over which experts and the state of their optimizer are sharded (FSDP) exchange:

    every micro-batch  weights in the forward and in the backward pass, and gradients, in the dtype of the computation
    once an update     weights in the dtype of the computation and float32 gradients, if they are gathered once
                       (`relibra_jax.execution.ExpertParallel`) and gradients are accumulated in place

Groups that hold the same experts sum their float32 gradients once an update. The sum of dense gradients, which the
price of an update has for one group, goes over the nodes of all; that layers gather dense parameters, if these are
sharded too, is not priced. The same ranks of all groups are on different nodes, and exchange at the full rate of their
links, with nothing beside them.
"""

from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import ACCUMULATOR_BYTES, COMPUTE_BYTES, CostModel, dense_gradient_bytes
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer


@checks_arguments
def group_exchange_time(
    cost_model: CostModel, topology: Topology, *, micro_batches: int, gather_once: bool
) -> float:
    """Return the seconds in which groups exchange the weights and gradients of one layer, in a batch.

    Args:
        cost_model: what is priced. Of ``data_parallel`` groups, every ``shards`` share the state of their experts; if
            there are fewer, all ``shards`` groups do.
        topology: one of the groups, whose ranks exchange the experts of home and resident slots.
        micro_batches: the number of micro-batches of a group.
        gather_once: whether experts are gathered once an update, and once in a recompute, whose residents an update has
            gathered.

    Raises:
        ValueError: if ``micro_batches`` is not an integer of at least 1.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> cost_model = CostModel(cluster=CLUSTERS["h100"], model=MODELS["qwen3-30b-a3b"], shards=4)
    >>> topology = Topology(num_nodes=1, ranks_per_node=8, num_experts=128, replica_slots=1)
    >>> for once in (False, True):
    ...     print(f"{1e3 * group_exchange_time(cost_model, topology, micro_batches=8, gather_once=once):.1f} ms")
    68.5 ms
    9.1 ms
    """
    check_integer("micro_batches", micro_batches, least=1)
    updates, recompute, shards = cost_model.updates, int(cost_model.recompute), cost_model.shards
    same = max(1, cost_model.data_parallel // shards)
    number = COMPUTE_BYTES if cost_model.compute_bytes is None else cost_model.compute_bytes
    if gather_once:
        of_homes = recompute * number * topology.home_slots
        sent = updates * (number + ACCUMULATOR_BYTES) * topology.held_slots + of_homes
    else:
        sent = micro_batches * (3 * (updates > 0) + recompute) * number * topology.held_slots
    summed = updates * 2 * ACCUMULATOR_BYTES * (1 - 1 / same) / shards * topology.held_slots
    experts = (sent * (1 - 1 / shards) + summed) * cost_model.model.expert_params
    dense = updates * dense_gradient_bytes(cost_model.model) * (1 - 1 / (shards * same)) / topology.num_ranks
    return (experts + dense) / cost_model.cluster.rates.slow
