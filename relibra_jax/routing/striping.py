"""Striping: the ranks of a node deal their tokens to each other before dispatch, so that lanes are level.

A rank holds whole samples, and the tokens of a sample prefer some experts. Its lanes are therefore uneven, and an
exchange lasts as long as its longest lane. If layers are striped, the token at position i of its sequence is dispatched
by the local rank ``i mod G`` of its node, so that every rank dispatches a like mixture of all tokens of the node. Ranks
deal tokens with an all-to-all of equal parts inside the node, which needs no table, and deal results back with another.
(Striped Attention, arXiv 2311.09431, deals tokens in the same way, for causal attention.)

The load of a striped plan says which rank *dispatches* a token copy, not which one holds its sample.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from relibra_jax.contract.replay import assigned_load, load_by_part
from relibra_jax.contract.types import Array, Assignment, BatchPlan, Price, RoutingReplay, Topology


def split_evenly(in_node: Int[Array, "M L N 1 E"], local: int) -> Int[jax.Array, "M L N G E"]:
    """Split the load of each node evenly over its ranks: an estimate of `striped_load` from the counts of samples.

    Args:
        in_node: the token copies of each node.
        local: G, the number of ranks of a node.

    >>> split_evenly(jnp.array([[[[[7, 1]]]]]), 2).tolist()
    [[[[[3, 1], [4, 0]]]]]
    """
    rounding = (np.arange(local)[:, None] + np.arange(in_node.shape[-1])) % local
    return (jnp.asarray(in_node) + rounding[None, None, None].astype(np.int32)) // local


def planned_load(
    sample_load: Int[Array, "B L E"], assignment: Assignment, price: Price
) -> Int[jax.Array, "M L N G E"]:
    """Return the load for which samples are planned: on their ranks, or evenly on those of their nodes.

    Args:
        sample_load: the token copies of each sample.
        assignment: the samples of each rank in each micro-batch.
        price: the price, which says whether ranks dispatch like mixtures of the tokens of their nodes.
    """
    if not price.even_ranks:
        return assigned_load(sample_load, assignment)
    return split_evenly(assigned_load(sample_load, _on_nodes(assignment)), assignment.sample.shape[2])


def _on_nodes(assignment: Assignment) -> Assignment:
    """Return an assignment to nodes, as if each were one rank."""
    sample = jnp.asarray(assignment.sample)
    return Assignment(sample.reshape(*sample.shape[:2], 1, -1))


def striped_load(
    replay: RoutingReplay, assignment: Assignment, topology: Topology
) -> Int[jax.Array, "M L N G E"]:
    """Count the token copies that every rank dispatches to every expert, if layers are striped. Works under jit.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts.
        assignment: the samples of each rank in each micro-batch.
        topology: the expert-parallel group.

    Returns:
        The load, int32, in token copies. Its sum over the ranks of a node is that of `relibra_jax.expert_load`.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> replay = RoutingReplay(np.array([[[[0]], [[1]], [[0]]]]), np.ones((1, 3), bool))
    >>> striped_load(replay, Assignment(np.array([[[[0], [-1]]]])), topology).tolist()
    [[[[[2, 0], [0, 1]]]]]
    """
    local, experts = topology.ranks_per_node, topology.num_experts
    sample, nodes = assignment.sample, _on_nodes(assignment)
    rank = np.arange(replay.mask.shape[1]) % local
    by_rank = load_by_part(replay, num_experts=experts, part=rank, parts=local)
    return assigned_load(by_rank, nodes).reshape(*sample.shape[:1], -1, *sample.shape[1:2], local, experts)


def with_striped_load(batch_plan: BatchPlan, replay: RoutingReplay, topology: Topology) -> BatchPlan:
    """Return a plan with its exact striped load, in place of the estimate with which it was searched."""
    return batch_plan._replace(load=striped_load(replay, batch_plan.assignment, topology))


def stripe_tokens(
    tokens: Shaped[Array, "P b T *rest"], topology: Topology, *, padding: int
) -> Shaped[jax.Array, "P t *rest"]:
    """Return the tokens that each rank dispatches, in their order on that rank, if layers are striped.

    Args:
        tokens: an entry for each token of each rank's b sequences of T positions.
        topology: the expert-parallel group.
        padding: the entry that fills sequences up to a multiple of G positions.
    """
    nodes, local = topology.num_nodes, topology.ranks_per_node
    tokens = pad_positions(tokens, local, axis=2, padding=padding)
    rest = tokens.shape[3:]
    dealt = tokens.reshape(nodes, local, tokens.shape[1], -1, local, *rest)  # [N, from, b, turn, to]
    return jnp.moveaxis(dealt, 4, 1).reshape(nodes * local, -1, *rest)


def pad_positions(
    tokens: Shaped[Array, "..."], multiple: int, *, axis: int, padding: int
) -> Shaped[jax.Array, "..."]:
    """Fill an axis of token positions up to a multiple."""
    width = [(0, 0)] * tokens.ndim
    width[axis] = (0, -tokens.shape[axis] % multiple)
    return (
        jnp.pad(jnp.asarray(tokens), width, constant_values=padding)
        if width[axis][1]
        else jnp.asarray(tokens)
    )
