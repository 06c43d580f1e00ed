"""Buffer sizes of a step, counted from the plan before the step runs.

Array shapes are static under jit, but loads change from batch to batch. The replayed load is exact, so
`count_capacities` can count on the host, between planning and the step, the most rows that any rank sends, receives and
computes. It rounds the sizes up (by 1/32 at most). `grow_capacities` keeps the sizes of earlier batches where they
suffice, so that after a few batches one compiled step serves them all. A step never drops tokens: `check_capacities`
raises before a step whose plan is too large for the buffers, and `relibra_jax.execution.moe` describes what happens
without that check.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from relibra_jax.contract.plan import copy_source
from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Topology, check_shape
from relibra_jax.routing.lane_lengths import UNFITTED, fitted_lengths
from relibra_jax.routing.resident_push import PushSizes, push_sizes
from relibra_jax.routing.split import pair_load
from relibra_jax.support.argument_types import checks_arguments

LAYER_SIXTEENTHS: Final = (9, 11, 13, 16)
"""The lengths of lanes among which a fitted exchange of layers in pieces chooses once for all hops and pieces, in
sixteenths of the buffer's. Each is a compiled branch of the layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """The most rows of one exchange. With lanes, `pair`, `own` and `receive` limit it; ragged, `send` and `receive`."""

    pair: int
    """The most rows that one rank sends to one other rank."""
    own: int
    """The most rows that a rank keeps for itself, which cross no link."""
    send: int
    """The most rows that one rank sends."""
    receive: int
    """The most rows that one rank receives."""
    lengths: tuple[int, ...] = UNFITTED
    """The lengths of lanes that are fitted to the batch that was counted, ascending. A fitted exchange chooses among
    them and some more (`relibra_jax.routing.lane_lengths`)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Capacities:
    """Buffer sizes of a step, the same for all its micro-batches, layers and ranks.

    It is a tree of Python integers, so that checkpoints can store it. It is static under jit, as part of
    `ExpertParallel`.
    """

    rows: int
    """The most token copies that one rank computes."""
    flat: ExchangeSizes
    """Sizes for token copies that all ranks exchange with each other (flat dispatch)."""
    node: ExchangeSizes | None
    """Sizes for distinct tokens that nodes exchange (hierarchical dispatch), or on a single node its ranks; None if
    they were not counted."""
    local: ExchangeSizes
    """Sizes for token copies that the ranks of a node exchange after tokens have crossed between several nodes."""
    exports: int
    """The most different experts that other ranks fetch from one rank as replicas: rows of the padded fetch."""
    export_copies: int
    """The most replicas that other ranks fetch from one rank: rows of the ragged fetch."""
    push: PushSizes | None
    """Sizes for the experts that are sent to resident slots; None if they were not counted."""


@checks_arguments
def count_capacities(
    layer_plans: LayerPlan,
    topology: Topology,
    *,
    visits: Int[Array, "M L P V"] | None = None,
) -> Capacities:
    """Count the buffer sizes that a step with these plans needs. Runs on the host.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``, for all micro-batches that the compiled step
            runs, including those of all data-parallel groups. The plans must be valid.
        topology: the expert-parallel group.
        visits: the number of tokens that each rank sends to each node of ``topology.visited``, as
            `relibra_jax.routing.visits.node_visits` returns it. Only hierarchical dispatch needs them; with None its
            sizes are not counted.

    Returns:
        The sizes, rounded up.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=1)
    >>> slots, quota = jnp.array([[[[[0, -1], [1, 0]]]]]), jnp.array([[[[[60, 0], [40, 40]]]]])
    >>> load = jnp.array([[[[[50, 20], [50, 20]]]]])
    >>> sizes = count_capacities(LayerPlan(slots, jnp.array([[[0, 1]]]), quota, load), topology)
    >>> sizes.rows, sizes.flat.pair, sizes.flat.own, sizes.exports
    (80, 24, 64, 1)
    """
    most, longest = _count(layer_plans, topology)
    most = {name: int(value) for name, value in most.items()}
    rows = round_capacity(most["rows"])
    node = None
    if visits is not None:
        visited = topology.visited
        check_shape("visits", visits.shape[2:], (topology.num_ranks, visited.num_nodes))
        by_rank = visits.reshape(*visits.shape[:2], visited.num_nodes, visited.ranks_per_node, -1)
        visits = np.asarray(visits)
        stays = np.repeat(np.eye(visited.num_nodes, dtype=bool), visited.ranks_per_node, 0)
        away = np.where(stays, 0, visits).max((2, 3))
        node = ExchangeSizes(
            pair=round_capacity(int(away.max())),
            own=round_capacity(int(np.where(stays, visits, 0).max(initial=0))),
            send=round_capacity(int(visits.sum(-1).max(initial=0))),
            receive=round_capacity(int(by_rank.sum(2).max(initial=0))),
            lengths=_fit(away),
        )
    flat, local = (
        ExchangeSizes(
            **{size: round_capacity(most[f"{name}_{size}"]) for size in ("pair", "own", "send")},
            receive=rows,
            lengths=_fit(longest[name]),
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


@checks_arguments
def worst_case_capacities(tokens: int, top_k: int, topology: Topology) -> Capacities:
    """Return the buffer sizes that suffice for any routing, which systems without a replay must allocate.

    A token has ``top_k`` different experts, so it sends at most ``min(top_k, S)`` copies to one rank. The sizes for
    residents (``push``) are None, because they depend on the batch and not on the routing of one layer.

    Args:
        tokens: the number of tokens of one rank.
        top_k: K, the number of experts of a token.
        topology: the expert-parallel group.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=0)
    >>> worst_case_capacities(1024, 4, topology).rows
    32768
    """
    nodes, local, slots = topology.num_nodes, topology.ranks_per_node, topology.slots
    visited = topology.visited.num_nodes
    to_rank, rows = tokens * min(top_k, slots), tokens * topology.num_ranks * min(top_k, slots)
    return Capacities(
        rows=rows,
        flat=ExchangeSizes(pair=to_rank, own=to_rank, send=tokens * top_k, receive=rows),
        node=ExchangeSizes(
            pair=tokens, own=tokens, send=tokens * min(visited, top_k), receive=visited * tokens
        ),
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


@checks_arguments
def check_capacities(have: Capacities, need: Capacities) -> None:
    """Raise ValueError unless every buffer of ``have`` is at least as large as that of ``need``.

    Args:
        have: the sizes with which the step is compiled.
        need: the sizes that the next batch needs.

    Raises:
        ValueError: if a buffer is too small or was not counted. The message gives both sizes of the first such buffer.
    """
    available, required = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): size
            for path, size in jax.tree.leaves_with_path(each)
            if not any(getattr(key, "name", None) == "lengths" for key in path)
        }
        for each in (have, need)
    )
    for name, size in required.items():
        if name not in available or available[name] < size:
            actual = f"has size {available[name]}" if name in available else "was not counted"
            raise ValueError(f"buffer {name} {actual}, but this batch needs {size}")


@checks_arguments
def grow_capacities(
    have: Capacities | None, need: Capacities, *, round_up: Callable[[int], int] = lambda size: size
) -> Capacities:
    """Grow buffer sizes where the next batch needs it, and keep them otherwise so that the compiled step can be reused.

    Args:
        have: the sizes of the batches so far. None before the first batch.
        need: the sizes that the next batch needs. ``node`` and ``push`` are None in the result if either argument has
            not counted them. Lengths of lanes are kept as long as their buffer is.
        round_up: maps a needed size to the size that a growing buffer gets. Larger buffers cost memory and save
            compilations.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=0)
    >>> small, large = worst_case_capacities(7, 4, topology), worst_case_capacities(9, 4, topology)
    >>> grow_capacities(large, small) == grow_capacities(small, large) == large
    True
    >>> grow_capacities(small, large, round_up=lambda size: 1 << size.bit_length()).flat
    ExchangeSizes(pair=64, own=64, send=64, receive=512, lengths=(0, 0, 0, 0, 0, 0))
    """
    if have is None:
        have = jax.tree.map(lambda _: 0, need)
    for name in ("node", "push"):
        if getattr(have, name) is None or getattr(need, name) is None:
            have, need = (dataclasses.replace(each, **{name: None}) for each in (have, need))

    def grow(size, needed):
        if isinstance(size, ExchangeSizes):
            names = ("pair", "own", "send", "receive")
            grown = {name: grow(getattr(size, name), getattr(needed, name)) for name in names}
            return ExchangeSizes(**grown, lengths=(size if needed.pair <= size.pair else needed).lengths)
        return size if needed <= size else round_up(needed)

    return jax.tree.map(grow, have, need, is_leaf=lambda size: isinstance(size, ExchangeSizes))


def _fit(longest: Int[Array, "M L"]) -> tuple[int, ...]:
    return tuple(map(int, fitted_lengths(longest)))


def round_capacity(count: int) -> int:
    """Round ``count`` up to a multiple of 8 and of a power of two that is at most 1/32 of it.

    >>> round_capacity(0), round_capacity(100), round_capacity(100_000)
    (8, 104, 100352)
    """
    step = 1 << max(3, count.bit_length() - 6)
    return max(-(-count // step), 1) * step


def with_spare_room(size: int) -> int:
    """Add a quarter and round up, so that the next batches fit the same buffers and the same compiled program.

    >>> with_spare_room(100), with_spare_room(0)
    (128, 8)
    """
    return round_capacity(size * 5 // 4)


def padded_rows(size: Float[Array, "*sizes"], *, spare_room: bool) -> Float[jax.Array, "*sizes"]:
    """Return the sizes that buffers get for needed sizes, under jit.

    They are those of `count_capacities`, and with spare room those to which a Balancer grows them: a size is rounded up
    before and after `with_spare_room` adds to it.

    Args:
        size: needed sizes, in rows; rounded up to integers first.
        spare_room: True to add spare room.

    >>> [padded_rows(jnp.array([0.0, 100.0]), spare_room=room).tolist() for room in (False, True)]
    [[8.0, 104.0], [16.0, 136.0]]
    >>> round_capacity(100), with_spare_room(round_capacity(100))
    (104, 136)
    """
    rows = _round_up(jnp.ceil(jnp.asarray(size, jnp.float32)))
    return _round_up(jnp.floor(rows * 1.25)) if spare_room else rows


def layer_sixteenths(
    longest: Sequence[Num[Array, "*sizes"]], pairs: Sequence[Float[Array, ""]]
) -> Float[jax.Array, "*sizes"]:
    """Return the least of `LAYER_SIXTEENTHS` of every buffer that suffices for the longest lanes of all hops.

    >>> layer_sixteenths([jnp.array([1.0, 100.0]), jnp.array([90.0, 10.0])], [jnp.array(160.0)] * 2).tolist()
    [9.0, 11.0]
    """
    choices = jnp.array(LAYER_SIXTEENTHS, jnp.float32)
    needed = [
        jnp.searchsorted(jnp.ceil(pair * choices / 16), jnp.asarray(each, jnp.float32))
        for each, pair in zip(longest, pairs, strict=True)
    ]
    return choices[jnp.minimum(functools.reduce(jnp.maximum, needed), len(choices) - 1)]


def _round_up(rows: Float[jax.Array, "*sizes"]) -> Float[jax.Array, "*sizes"]:
    """Round whole numbers of rows up as `round_capacity` does. Powers of two and small multiples of them are exact."""
    step = jnp.maximum(power_of_two(rows) / 32, 8)
    return jnp.maximum(jnp.ceil(rows / step), 1) * step


def power_of_two(size: Float[Array, "*sizes"]) -> Float[jax.Array, "*sizes"]:
    """Return the largest power of two that is at most each size, and 0 for 0. Sizes must not be negative.

    It clears the fraction of the floating-point number: one operation, where `jax.numpy.frexp` compiles fifty.

    >>> power_of_two(jnp.array([0.0, 1.0, 100.0])).tolist()
    [0.0, 1.0, 64.0]
    """
    bits = jax.lax.bitcast_convert_type(jnp.asarray(size, jnp.float32), jnp.int32)
    return jax.lax.bitcast_convert_type(bits & jnp.int32(0x7F800000), jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def _count(
    layer_plans: LayerPlan, topology: Topology
) -> tuple[dict[str, jax.Array], dict[str, Int[jax.Array, "M L"]]]:
    """Count the most rows and exports of any micro-batch, layer and rank, by name, and the longest lanes of each
    layer and micro-batch."""
    nodes, local, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks

    def one_layer(plan: LayerPlan) -> dict[str, jax.Array]:
        flat = pair_load(plan, topology)
        # A token crosses to the rank with the local index of its source: [local source, node, local].
        through = flat.reshape(nodes, local, nodes, local).sum(0)
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
    most = {name: values.max() for name, values in counts.items()}
    return most, {name: counts[f"{name}_pair"] for name in ("flat", "local")}


def export_count(plan: LayerPlan, topology: Topology) -> Int[jax.Array, " P"]:
    """Count the replicas that other ranks fetch from each rank, in one layer of one micro-batch."""
    source = copy_source(plan, topology).ravel()
    rank = jnp.where(source == EMPTY, topology.num_ranks, source // topology.held_slots)
    return jnp.zeros(topology.num_ranks, jnp.int32).at[rank].add(1, mode="drop")


def exported_slots(plan: LayerPlan, topology: Topology) -> Bool[jax.Array, "P held"]:
    """Mark the home and resident slots from which replicas are fetched, in one layer of one micro-batch."""
    source = copy_source(plan, topology).ravel()
    slots = topology.num_ranks * topology.held_slots
    exported = jnp.zeros(slots, bool).at[jnp.where(source == EMPTY, slots, source)].set(True, mode="drop")
    return exported.reshape(topology.num_ranks, -1)


def _push_sizes(layer_plans: LayerPlan, topology: Topology) -> PushSizes:
    if not topology.resident_slots:
        return PushSizes(exports=0, pair=0, own=0)
    resident = jnp.asarray(layer_plans.slot_expert)[0, ..., topology.home_slots : topology.held_slots]
    # Not rounded up, because the push sends the padding as well.
    most = push_sizes(jnp.asarray(layer_plans.home)[0], resident, topology)
    return PushSizes(**{name: int(size) for name, size in most.items()})
