"""Placement of experts and replicas on groups of expert devices, from the loads of recorded routing.

MegaScale-Infer (arXiv 2504.02263) assumes equally busy experts. Recorded routing says how busy they are. Here the
routing of the last batch determines the placement for the next rollout, with the planners that place experts for
training. To these planners a group of expert devices is a rank, and all groups form one node. The placement and the
token split do not change during a rollout.
"""

import math
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Integer

from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Topology, check_shape
from relibra_jax.cost.hop_rows import visit_share
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.support.limits import check_integer

STEPS: Final = 10_000
"""The number of steps of the placement search. A placement serves a whole rollout, so a long search pays."""


class ExpertPlacement(NamedTuple):
    """A placement of experts on groups of expert devices: the load share of each group, and the rows sent to it."""

    slots: int
    """The number of experts that each group holds in a layer, homes and replicas together."""
    share: Float[Array, "L E P"]
    """The share of each expert's token copies that each of the P groups computes. It sums to 1 over the groups."""
    hottest: Float[Array, " L"]
    """The share of a layer's token copies that the busiest group computes, at the loads that were planned from."""
    sent: Float[Array, " L"]
    """The rows that attention sends per token copy: 1 if each copy is sent by itself, less if a token with several
    experts in one group is sent there once (`merge_rows`)."""
    received: Float[Array, " L"]
    """The rows that the group with the most rows receives, per token copy that the busiest group computes."""

    @property
    def groups(self) -> int:
        """The number of groups of expert devices, P."""
        return self.share.shape[-1]


def even_placement(num_groups: int, num_experts: int, *, top_k: int) -> ExpertPlacement:
    """Make the placement of equally busy experts, as MegaScale-Infer assumes. Its one layer stands for all layers.

    Args:
        num_groups: the number of groups of expert devices, P.
        num_experts: the number of experts of a layer, E.
        top_k: the number of experts of a token, K. All sets of K experts are assumed to be equally likely.

    Returns:
        The placement, in which a token is sent once to each group that has some of its experts.

    Raises:
        ValueError: if the experts do not divide over the groups, or ``top_k`` is not an integer from 1 to E.

    >>> even = even_placement(4, 8, top_k=7)  # a token has at least one expert in each group
    >>> even.hottest.tolist(), f"{7 * even.sent[0]:.1f}"
    ([0.25], '4.0')
    """
    check_integer("top_k", top_k, least=1, most=num_experts)
    placement = contiguous_placement(np.ones((1, num_experts), np.int32), num_groups)
    visits = visit_share(_topology(num_groups, num_experts, 0), top_k, of_ranks=True)
    rows = np.full(1, num_groups * visits / top_k, np.float32)
    return placement._replace(sent=rows, received=rows)


def contiguous_placement(load: Int[Array, "L E"], num_groups: int) -> ExpertPlacement:
    """Place experts on groups in the order of their ids, equally many on each group, regardless of load.

    Args:
        load: the token copies of each expert.
        num_groups: the number of groups of expert devices, P.

    Returns:
        The placement, in which each token copy is sent by itself.

    Raises:
        ValueError: if the experts do not divide over the groups.

    >>> contiguous_placement(np.array([[4, 2, 1, 1]]), 2).hottest.tolist()
    [0.75]
    """
    topology = _topology(num_groups, load.shape[-1], 0)
    group = np.broadcast_to(np.arange(load.shape[-1]) // topology.home_slots, load.shape)
    return _placement(load, np.eye(num_groups, dtype=np.float32)[group], topology)


def plan_placement(
    load: Int[Array, "L E"], num_groups: int, *, replica_slots: int = 0, key: jax.Array
) -> ExpertPlacement:
    """Place experts, and choose replicas, to minimise the load of the busiest group.

    Args:
        load: the token copies of each expert in the last batch.
        num_groups: the number of groups of expert devices, P.
        replica_slots: the number of replica slots of each group. No group holds two copies of an expert.
        key: random key of the search, consumed.

    Returns:
        The placement, in which each token copy is sent by itself. Its busiest group never has a larger load than with
        contiguous placement.

    Raises:
        ValueError: if the experts do not divide over the groups, or ``replica_slots`` is not an integer from 0 to E.

    >>> plan_placement(np.array([[4, 2, 1, 1]]), 2, key=jax.random.key(0)).hottest.tolist()
    [0.625]
    >>> plan_placement(np.array([[4, 2, 1, 1]]), 2, replica_slots=1, key=jax.random.key(0)).hottest.tolist()
    [0.5]
    """
    layers, experts = load.shape
    topology = _topology(num_groups, experts, 0)
    check_integer("replica_slots", replica_slots, least=0, most=experts)
    on_ranks = jnp.zeros((1, layers, 1, num_groups, experts), jnp.int32).at[0, :, 0, 0].set(load)
    request = PlanRequest(on_ranks)  # the rank of the tokens does not matter: nothing pays for crossings
    home = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32), (layers, experts))
    if 1 < num_groups < experts:
        home = place_experts(request, home, topology, key=key, steps=STEPS).home
    group = np.asarray(home) // topology.home_slots
    share = np.eye(num_groups, dtype=np.float32)[group]
    if replica_slots:
        topology = _topology(num_groups, experts, replica_slots)
        placement = Placement.without_residents(home, topology)
        plan = _replicate(request, placement, topology)
        slot_expert, quota = (
            np.asarray(each)[0].reshape(layers, num_groups, -1) for each in (plan.slot_expert, plan.quota)
        )
        computed = np.zeros((layers, experts, num_groups), np.float32)
        layer, slot_group, slot = np.nonzero(slot_expert != EMPTY)
        computed[layer, slot_expert[layer, slot_group, slot], slot_group] = quota[layer, slot_group, slot]
        total = np.asarray(load, np.float32)[..., None]
        share = np.where(total > 0, computed / np.maximum(total, 1), share)
    return _placement(load, share, topology)


def merge_rows(placement: ExpertPlacement, routes: Integer[Array, "Q L K"]) -> ExpertPlacement:
    """Change a placement so that a token is sent only once to a group that has several of its experts.

    If an expert has replicas, its token copies go to each of its groups with the probability that the placement's
    shares give, independently of the token's other experts.

    Args:
        placement: the placement.
        routes: the experts of some tokens, without padding.

    Returns:
        The placement with ``sent`` and ``received`` computed from these tokens.

    Raises:
        ValueError: if the routes have a different number of layers than the placement.

    >>> placement = contiguous_placement(np.array([[2, 2, 1, 1]]), 2)
    >>> merged = merge_rows(placement, np.array([[[0, 1]], [[0, 1]], [[2, 3]]]))
    >>> merged.sent.tolist(), merged.received.tolist()
    ([0.5], [0.5])
    """
    check_shape("routes", routes.shape, (len(routes), len(placement.share), routes.shape[-1]))
    visits, copies = [], []
    for layer, share in enumerate(np.asarray(placement.share)):
        by_choice = [share[ids] for ids in np.asarray(routes)[:, layer].T]  # K arrays of shape [Q P]
        visits.append((1 - math.prod(1 - each for each in by_choice)).mean(0))
        copies.append(sum(by_choice).mean(0))
    rows, computed = np.array(visits, np.float32), np.array(copies, np.float32)
    sent, received = rows.sum(-1) / computed.sum(-1), rows.max(-1) / computed.max(-1)
    return placement._replace(sent=sent, received=received)


def group_copies(
    load: Int[Array, "*stack E"], share: Float[Array, "*stack E P"]
) -> Float[np.ndarray, "*stack P"]:
    """Compute the token copies that every group computes.

    Args:
        load: the token copies of each expert.
        share: the share of each expert's copies that each group computes.

    Returns:
        The token copies of each group; not rounded.

    >>> group_copies(np.array([5, 1]), np.array([[0.5, 0.5], [0.0, 1.0]])).tolist()
    [2.5, 3.5]
    """
    return np.einsum("...e,...ep->...p", np.asarray(load), np.asarray(share))


_replicate = jax.jit(replicate_experts)


def _topology(num_groups: int, num_experts: int, replica_slots: int) -> Topology:
    check_integer("num_groups", num_groups, least=1)
    if num_experts % num_groups:
        raise ValueError(
            f"num_experts={num_experts} must divide evenly over {num_groups} groups of expert devices"
        )
    return Topology(
        num_nodes=1, ranks_per_node=num_groups, num_experts=num_experts, replica_slots=replica_slots
    )


def _placement(load: Int[Array, "L E"], share: Float[Array, "L E P"], topology: Topology) -> ExpertPlacement:
    total = np.asarray(load).sum(-1, dtype=np.int64)
    hottest = group_copies(load, share).max(-1) / np.maximum(total, 1)
    one_row_per_copy = np.ones(len(load), np.float32)
    return ExpertPlacement(
        topology.slots, share, hottest.astype(np.float32), one_row_per_copy, one_row_per_copy
    )
