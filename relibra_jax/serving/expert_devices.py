"""Experts placed over groups of expert devices, and replicas beside them, from the loads of recorded routing.

MegaScale-Infer (arXiv 2504.02263) takes experts to be equally busy. Recorded routing says how busy they are: what the
last batch routed plans where experts are for the next rollout, with the planners that place experts for training. A
group of expert devices is a rank to them, all groups one node. Placement and token split stay as they are for a whole
rollout.
"""

import math
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Integer

from relibra_jax.limits import check_integer
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.types import EMPTY, Array, Topology, check_shape

STEPS: Final = 10_000
"""Steps of the search. A placement serves a whole rollout, so they are not saved on few experts."""


class ExpertPlacement(NamedTuple):
    """Which group of expert devices computes what of each expert's load, and how busy the busiest group then is."""

    slots: int
    """The experts that each group holds in a layer, homes and replicas."""
    share: Float[Array, "L E P"]
    """The part of each expert's token copies that each of the P groups computes; sums to 1 over them."""
    hottest: Float[Array, " L"]
    """The part of a layer's token copies that its busiest group computes, at the loads of which it was made."""
    sent: Float[Array, " L"]
    """Rows that attention sends for each token copy: 1 where each copy travels by itself, less where a token with
    several experts in one group goes there once (`merge_rows`)."""
    received: Float[Array, " L"]
    """Rows that the group which gets most receives, for each token copy that the busiest group computes."""

    @property
    def groups(self) -> int:
        """P, the groups of expert devices."""
        return self.share.shape[-1]


def even_placement(num_groups: int, num_experts: int, *, top_k: int) -> ExpertPlacement:
    """The placement of equally busy experts: the assumption of MegaScale-Infer, for one layer that stands for all.

    Args:
        num_groups: P, which divides the experts.
        num_experts: E, the experts of a layer.
        top_k: K, the experts of a token, of which all sets are taken to be equally likely.

    Raises:
        ValueError: if the experts do not divide over the groups.

    >>> even = even_placement(4, 8, top_k=7)  # in each group a token has one expert at least
    >>> even.hottest.tolist(), f"{7 * even.sent[0]:.1f}"
    ([0.25], '4.0')
    """
    check_integer("top_k", top_k, least=1, most=num_experts)
    placement = contiguous_placement(np.ones((1, num_experts), np.int32), num_groups)
    elsewhere = math.comb(num_experts - placement.slots, top_k) / math.comb(num_experts, top_k)
    rows = np.full(1, num_groups * (1 - elsewhere) / top_k, np.float32)
    return placement._replace(sent=rows, received=rows)


def contiguous_placement(load: Int[Array, "L E"], num_groups: int) -> ExpertPlacement:
    """Neighbouring experts in the same group, as many in each, whatever their loads.

    Args:
        load: token copies of each expert.
        num_groups: P, which divides the experts.

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
    """Experts placed, and replicas chosen, so that the busiest group has least; never more than if contiguous.

    Args:
        load: token copies of each expert, of the last batch.
        num_groups: P, which divides the experts.
        replica_slots: slots of each group for replicas, of which no expert has two in one group.
        key: random key of the search, consumed.

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
    counted = jnp.asarray(load, jnp.int32)[None]
    home = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32), (layers, experts))
    if 1 < num_groups < experts:
        home = place_experts(counted, home, topology, key=key, move_cost=0.0, steps=STEPS).home
    group = np.asarray(home) // topology.home_slots
    share = np.eye(num_groups, dtype=np.float32)[group]
    if replica_slots:
        topology = _topology(num_groups, experts, replica_slots)
        plan = _replicate(counted, home, topology)
        held, quota = (
            np.asarray(each)[0].reshape(layers, num_groups, -1) for each in (plan.slot_expert, plan.quota)
        )
        computed = np.zeros((layers, experts, num_groups), np.float32)
        layer, at_group, slot = np.nonzero(held != EMPTY)
        computed[layer, held[layer, at_group, slot], at_group] = quota[layer, at_group, slot]
        whole = np.asarray(load, np.float32)[..., None]
        share = np.where(whole > 0, computed / np.maximum(whole, 1), share)
    return _placement(load, share, topology)


def merge_rows(placement: ExpertPlacement, routes: Integer[Array, "Q L K"]) -> ExpertPlacement:
    """The same placement, in which a token goes once to a group that has several of its experts.

    Copies of an expert with replicas go to each of its groups as often as the placement says, whatever the token's
    other experts.

    Args:
        placement: the placement.
        routes: the experts of some tokens, all of them real.

    Raises:
        ValueError: if the routes have other layers than the placement.

    >>> placement = contiguous_placement(np.array([[2, 2, 1, 1]]), 2)
    >>> merged = merge_rows(placement, np.array([[[0, 1]], [[0, 1]], [[2, 3]]]))
    >>> merged.sent.tolist(), merged.received.tolist()
    ([0.5], [0.5])
    """
    check_shape("routes", routes.shape, (len(routes), len(placement.share), routes.shape[-1]))
    visits, copies = [], []
    for layer, share in enumerate(np.asarray(placement.share)):
        by_choice = [share[ids] for ids in np.asarray(routes)[:, layer].T]  # K of [Q P]
        visits.append((1 - math.prod(1 - each for each in by_choice)).mean(0))
        copies.append(sum(by_choice).mean(0))
    rows, computed = np.array(visits, np.float32), np.array(copies, np.float32)
    sent, received = rows.sum(-1) / computed.sum(-1), rows.max(-1) / computed.max(-1)
    return placement._replace(sent=sent, received=received)


def group_copies(
    load: Int[Array, "*stack E"], share: Float[Array, "*stack E P"]
) -> Float[np.ndarray, "*stack P"]:
    """The token copies that every group computes of a load.

    Args:
        load: token copies of each expert.
        share: the part of each expert's copies that each group computes.

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
    alone = np.ones(len(load), np.float32)
    return ExpertPlacement(topology.slots, share, hottest.astype(np.float32), alone, alone)
