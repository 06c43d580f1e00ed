"""How often tokens cross between nodes, counted token by token from the replayed ids. Runs on the host.

On the hierarchical path a token crosses to a node once, however many of its experts are there. Loads cannot say how
often that is; the recorded routes can.
"""

import functools

import jax
import numpy as np
from jaxtyping import Int

from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, BatchPlan, LayerPlan, RoutingReplay, Topology


def node_visits(
    replay: RoutingReplay, batch_plan: BatchPlan, topology: Topology
) -> Int[np.ndarray, "M L P N"]:
    """Distinct tokens that each source rank sends to each node.

    Counted exactly: copies of one expert on one rank are taken in token order and go to the expert's slots in slot
    order, as `relibra_jax.token_split.source_quota` splits them. At hundreds of ranks this takes longer than a batch is
    worth: `relibra_jax.capacity.worst_case_capacities` bounds the crossings by a rank's tokens.

    Args:
        replay: the routing of the batch's samples.
        batch_plan: the plan that was made for it.
        topology: the expert-parallel group.

    Returns:
        int64, tokens; the entry of the source's own node counts tokens that stay.
    """
    ids, mask = np.asarray(replay.expert_ids), np.asarray(replay.mask)
    samples = np.asarray(batch_plan.assignment.sample)
    samples = samples.reshape(len(samples), topology.num_ranks, -1)
    node = np.repeat(np.arange(topology.num_nodes), topology.ranks_per_node * topology.slots)
    shape = np.shape(batch_plan.load)[:2]
    visits = np.zeros((*shape, topology.num_ranks, topology.num_nodes), np.int64)
    for m, on_rank in enumerate(samples):
        tokens = [ids[chosen][mask[chosen]] for chosen in (held[held != EMPTY] for held in on_rank)]
        plans = batch_plan.micro_batch(m)
        sent = np.asarray(_split_layers(plans, topology))
        for layer, rank in np.ndindex(*visits.shape[1:3]):
            slot_expert = np.asarray(plans.slot_expert[layer]).ravel()
            nodes = _copy_nodes(tokens[rank][:, layer], slot_expert, sent[layer, rank].ravel(), node)
            visits[m, layer, rank] = (nodes[..., None] == np.arange(topology.num_nodes)).any(1).sum(0)
    return visits


@functools.partial(jax.jit, static_argnums=1)
def _split_layers(layer_plans: LayerPlan, topology: Topology) -> jax.Array:
    """`source_quota` of the layers of one micro-batch, ``[L P N G S]``."""
    return jax.vmap(functools.partial(source_quota, topology=topology))(layer_plans)


def _copy_nodes(ids: np.ndarray, slot_expert: np.ndarray, sent: np.ndarray, node: np.ndarray) -> np.ndarray:
    """The node that serves each token copy ``[tokens, K]`` of one rank in one layer."""
    copies = np.argsort(ids.ravel(), kind="stable")
    slots = np.argsort(slot_expert, kind="stable")
    nodes = np.empty(ids.size, np.int64)
    nodes[copies] = np.repeat(node[slots], sent[slots])
    return nodes.reshape(ids.shape)
