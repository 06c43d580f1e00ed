"""Buffer sizes, counted before the step: replay is exact, so no buffer has to be larger than what will fill it.

Shapes are static under jit, loads are not. `count_capacities` counts, on the host and between plan and step, the most
rows that any rank will send, receive and compute, and rounds up (at most 1/32 more); `grow_capacities` keeps the sizes
of earlier batches, so that after a few batches the same compiled step serves them all. A step that meets a plan too
large for its sizes drops nothing: see `check_capacities` before it, and `relibra_jax.execution.moe` for what happens
without.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.plan import copy_source
from relibra_jax.resident_push import PushSizes, push_sizes
from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, Array, LayerPlan, Topology


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """Rows of one exchange. The padded one needs `pair` and `own`, the ragged one `send` and `receive`."""

    pair: int
    """Most rows from one rank to one other."""
    own: int
    """Most rows that a rank keeps, which no link carries."""
    send: int
    """Most rows that one rank sends."""
    receive: int
    """Most rows that one rank receives."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Capacities:
    """Sizes of the buffers of a step, the same for all its micro-batches, layers and ranks.

    A tree of Python numbers, so that checkpoints hold it; static under jit, as part of `ExpertParallel`.
    """

    rows: int
    """Most token copies that one rank computes."""
    flat: ExchangeSizes
    """Token copies exchanged between all ranks."""
    node: ExchangeSizes | None
    """Distinct tokens exchanged between nodes; None where they were not counted."""
    local: ExchangeSizes
    """Token copies exchanged inside a node, after tokens have crossed between nodes."""
    exports: int
    """Most experts that are fetched from one rank as replicas, each counted once: rows of the padded fetch."""
    export_copies: int
    """Most replicas that are fetched from one rank: rows of the ragged fetch."""
    push: PushSizes | None
    """Experts on their way to resident slots; None where they were not counted."""


def count_capacities(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    visits: Int[Array, "M L P N"] | None = None,
) -> Capacities:
    """Count what a step under valid plans needs. Runs on the host.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``, of all micro-batches that share the compiled
            step, those of data-parallel copies of the group among them.
        topology: the expert-parallel group.
        visits: from `relibra_jax.node_visits.node_visits`; only the hierarchical path needs them.

    Returns:
        Sizes that suffice, rounded up.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[[[0, -1], [1, 0]]]]]), jnp.array([[[[[60, 0], [40, 40]]]]])
    >>> load = jnp.array([[[[[50, 20], [50, 20]]]]])
    >>> sizes = count_capacities(LayerPlan(slots, jnp.array([[[0, 1]]]), quota, load), topology)
    >>> sizes.rows, sizes.flat.pair, sizes.flat.own, sizes.exports
    (80, 24, 64, 1)
    """
    most = {name: int(value) for name, value in _count(layer_plans, topology).items()}
    rows = round_capacity(most["rows"])
    node = None
    if visits is not None:
        by_rank = visits.reshape(*visits.shape[:2], topology.num_nodes, topology.ranks_per_node, -1)
        visits = np.asarray(visits)
        stays = np.repeat(np.eye(topology.num_nodes, dtype=bool), topology.ranks_per_node, 0)
        node = ExchangeSizes(
            pair=round_capacity(int(np.where(stays, 0, visits).max(initial=0))),
            own=round_capacity(int(np.where(stays, visits, 0).max(initial=0))),
            send=round_capacity(int(visits.sum(-1).max(initial=0))),
            receive=round_capacity(int(by_rank.sum(2).max(initial=0))),
        )
    flat, local = (
        ExchangeSizes(
            **{size: round_capacity(most[f"{name}_{size}"]) for size in ("pair", "own", "send")}, receive=rows
        )
        for name in ("flat", "local")
    )
    return Capacities(
        rows=rows,
        flat=flat,
        node=node,
        local=local,
        exports=most["exports"],
        export_copies=most["export_copies"],
        push=_push_sizes(layer_plans, topology),
    )


def worst_case_capacities(tokens: int, top_k: int, topology: Topology) -> Capacities:
    """Sizes that suffice whatever the router does: what systems without foresight have to hold.

    A token has ``top_k`` different experts, so it sends at most ``min(top_k, S)`` copies to one rank. Of residents'
    pushes, which go by batch and not by layer, nothing is said.

    Args:
        tokens: the tokens of one rank.
        top_k: K, experts of a token.
        topology: the expert-parallel group, which gives N, G and S.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=0)
    >>> worst_case_capacities(1024, 4, topology).rows
    32768
    """
    nodes, local, slots = topology.num_nodes, topology.ranks_per_node, topology.slots
    to_rank, rows = tokens * min(top_k, slots), tokens * topology.num_ranks * min(top_k, slots)
    return Capacities(
        rows=rows,
        flat=ExchangeSizes(pair=to_rank, own=to_rank, send=tokens * top_k, receive=rows),
        node=ExchangeSizes(pair=tokens, own=tokens, send=tokens * min(nodes, top_k), receive=nodes * tokens),
        local=ExchangeSizes(
            pair=nodes * to_rank,
            own=nodes * to_rank,
            send=nodes * tokens * min(top_k, local * slots),
            receive=rows,
        ),
        exports=min(topology.num_ranks * topology.replica_slots, topology.held_slots),
        export_copies=topology.num_ranks * topology.replica_slots,
        push=None,
    )


def check_capacities(have: Capacities, need: Capacities) -> None:
    """Raise unless every buffer of ``have`` holds what ``need`` asks for.

    Raises:
        ValueError: if a buffer is too small: the first one, with both sizes.
    """
    found, wanted = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): size
            for path, size in jax.tree.leaves_with_path(each)
        }
        for each in (have, need)
    )
    for name, size in wanted.items():
        if name not in found or found[name] < size:
            raise ValueError(f"buffer {name}: {found.get(name, 'not counted')}, this batch needs {size}")


def grow_capacities(
    have: Capacities | None, need: Capacities, *, round_up: Callable[[int], int] = lambda size: size
) -> Capacities:
    """Sizes that serve the batches so far and the next one: those at hand where they suffice, so that the compiled step
    does too.

    Args:
        have: the sizes of the batches so far; None before the first.
        need: the sizes of the next batch. A buffer that only one of the two counted stays uncounted.
        round_up: maps a size that has to grow to the size that it gets. Spare room costs memory and saves
            compilations.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=0)
    >>> small, large = worst_case_capacities(7, 4, topology), worst_case_capacities(9, 4, topology)
    >>> grow_capacities(large, small) == grow_capacities(small, large) == large
    True
    >>> grow_capacities(small, large, round_up=lambda size: 1 << size.bit_length()).flat
    ExchangeSizes(pair=64, own=64, send=64, receive=512)
    """
    if have is None:
        have = jax.tree.map(lambda _: 0, need)
    for name in ("node", "push"):
        if getattr(have, name) is None or getattr(need, name) is None:
            have, need = (dataclasses.replace(each, **{name: None}) for each in (have, need))
    return jax.tree.map(lambda size, needed: size if needed <= size else round_up(needed), have, need)


def round_capacity(count: int) -> int:
    """``count`` rounded up to a multiple of 8 and of a power of two that is at most 1/32 of it.

    >>> round_capacity(0), round_capacity(100), round_capacity(100_000)
    (8, 104, 100352)
    """
    step = 1 << max(3, count.bit_length() - 6)
    return max(-(-count // step), 1) * step


@functools.partial(jax.jit, static_argnums=1)
def _count(layer_plans: LayerPlan, topology: Topology) -> dict[str, jax.Array]:
    """The most rows and exports of any micro-batch, layer and rank."""
    nodes, local, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks

    def one_layer(plan: LayerPlan) -> dict[str, jax.Array]:
        pairs = source_quota(plan, topology).sum(-1)
        flat = pairs.reshape(ranks, ranks)
        # A token crosses to the rank of its own local index: [local source, node, local].
        through = pairs.reshape(nodes, local, nodes, local).sum(0)
        return {
            "rows": flat.sum(0).max(),
            "flat_pair": jnp.where(jnp.eye(ranks, dtype=bool), 0, flat).max(),
            "flat_own": flat.diagonal().max(),
            "flat_send": flat.sum(1).max(),
            "local_pair": jnp.where(jnp.eye(local, dtype=bool)[:, None], 0, through).max(),
            "local_own": through.diagonal(axis1=0, axis2=2).max(),
            "local_send": through.sum(2).max(),
            "exports": exported_slots(plan, topology).sum(1, dtype=jnp.int32).max(),
            "export_copies": export_count(plan, topology).max(),
        }

    counts = jax.lax.map(jax.vmap(one_layer), jax.tree.map(jnp.asarray, layer_plans))
    return {name: values.max() for name, values in counts.items()}


def export_count(plan: LayerPlan, topology: Topology) -> Int[jax.Array, " P"]:
    """Replicas that are fetched from each rank in one layer of one micro-batch."""
    source = copy_source(plan, topology).ravel()
    rank = jnp.where(source == EMPTY, topology.num_ranks, source // topology.held_slots)
    return jnp.zeros(topology.num_ranks, jnp.int32).at[rank].add(1, mode="drop")


def exported_slots(plan: LayerPlan, topology: Topology) -> Bool[jax.Array, "P held"]:
    """Which home and resident slots of each rank replicas are fetched from, in one layer of one micro-batch."""
    source = copy_source(plan, topology).ravel()
    slots = topology.num_ranks * topology.held_slots
    exported = jnp.zeros(slots, bool).at[jnp.where(source == EMPTY, slots, source)].set(True, mode="drop")
    return exported.reshape(topology.num_ranks, -1)


def _push_sizes(layer_plans: LayerPlan, topology: Topology) -> PushSizes:
    if not topology.resident_slots:
        return PushSizes(exports=0, pair=0, own=0)
    resident = jnp.asarray(layer_plans.slot_expert)[0, ..., topology.home_slots : topology.held_slots]
    # Not rounded up: what is spare is sent.
    most = push_sizes(jnp.asarray(layer_plans.home)[0], resident, topology)
    return PushSizes(**{name: int(size) for name, size in most.items()})
