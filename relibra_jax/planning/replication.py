"""Replication inside a batch, over all layers and micro-batches: from loads and homes to a Plan.

The intra-batch half of ReLibra (arXiv 2605.08639). What happens in one domain is in `relibra_jax.planning.greedy_replication`
(jointly) and `experiments.ablation.token_splits` (its halves, for the ablation).
"""

import functools
from numbers import Integral

import jax.numpy as jnp
from jaxtyping import Int

from relibra_jax.planning.per_node import plan_per_node
from relibra_jax.planning.greedy_replication import replicate_domain
from experiments.ablation.token_splits import place_heaviest, split_evenly, split_tokens
from relibra_jax.types import EMPTY, Array, Plan, Topology


def replicate_experts(
    load: Int[Array, "M L E"],
    home: Int[Array, "L E"],
    topology: Topology,
    *,
    across_nodes: bool = False,
    min_tokens: int = 1,
    tile: int = 1,
    exact: bool = False,
    mode: str = "joint",
) -> Plan:
    """Choose the replicas and the token split of every layer and micro-batch, given the homes.

    Source: the intra-batch half of ReLibra (arXiv 2605.08639); the method is this module's. Works under jit and
    scan, and never leaves a domain more imbalanced than no replicas would (mode ``"joint"`` and ``"splitting"``).

    Args:
        load: token copies of each expert, summed over where they lie; below 2**31 in each layer.
        home: flat home slot of each expert.
        topology: of the group.
        across_nodes: let replicas go to any rank, not just to ranks of their home's node.
        min_tokens: least token copies that a replica computes.
        tile: replicas compute whole tiles of this many token copies; the rest of an expert stays at home. So a
            grouped matrix product has no more partly filled tiles than without replicas.
        exact: bring all ranks of a domain to within one ``tile`` of each other where slots allow, at the price of
            more replicas; otherwise only the largest rank load counts.
        mode: ``"joint"``, or half of it for an ablation. ``"placement"`` keeps the joint plan's replicas, but splits
            each expert evenly over its copies. ``"splitting"`` places replicas by EPLB's rule, which assumes an even
            split, and then splits tokens as well as those places allow.

    Returns:
        A Plan; unused replica slots are EMPTY.

    Raises:
        ValueError: ``min_tokens`` or ``tile`` below 1, an unknown mode, or an option that the mode has no use for.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> plan = replicate_experts(jnp.array([[[80, 10, 6, 4]]]), jnp.array([[0, 1, 2, 3]]), topology)
    >>> plan.slot_expert.tolist(), plan.quota.tolist()
    ([[[[[0, 1, -1], [2, 3, 0]]]]], [[[[[40, 10, 0], [6, 4, 40]]]]])
    """
    _check_knobs(min_tokens, tile, exact, mode)
    joint = functools.partial(
        replicate_domain, replica_slots=topology.replica_slots, min_tokens=min_tokens, tile=tile, exact=exact
    )

    def rule(load, _):
        if mode == "joint":
            return joint(load)
        if mode == "placement":
            return split_evenly(load, joint(load)[0])
        return split_tokens(load, place_heaviest(load, replica_slots=topology.replica_slots))

    load = jnp.asarray(load, jnp.int32)
    return plan_per_node(rule, load, load, home, topology, domains=1 if across_nodes else topology.num_nodes)


def _check_knobs(min_tokens: int, tile: int, exact: bool, mode: str) -> None:
    for name, value in (("min_tokens", min_tokens), ("tile", tile)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    if mode not in ("joint", "placement", "splitting"):
        raise ValueError(f"mode={mode!r} must be 'joint', 'placement' or 'splitting'")
    if mode != "joint" and (min_tokens, tile, exact) != (1, 1, False):
        raise ValueError(
            f"mode={mode!r} takes neither min_tokens={min_tokens} nor tile={tile} nor exact={exact}"
        )


def without_replicas(load: Int[Array, "M L E"], home: Int[Array, "L E"], topology: Topology) -> Plan:
    """The plan without replicas: every home slot computes its expert's whole load."""

    def rule(load, _):
        nothing = jnp.full((load.shape[0], topology.replica_slots), EMPTY, jnp.int32)
        return nothing, jnp.concatenate([load, jnp.zeros_like(nothing)], -1)

    load = jnp.asarray(load, jnp.int32)
    return plan_per_node(rule, load, load, home, topology, domains=1)
