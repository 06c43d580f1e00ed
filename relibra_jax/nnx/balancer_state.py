"""The state that a balancer keeps from batch to batch: planner state, random key, homes and buffer sizes.

Checkpoints save and restore it as host arrays. Buffer sizes belong to the *shape* of a stage, its number of
micro-batches and of places for samples in each. Stages of equal shape run the same compiled step, so they share buffer
sizes. Stages of different shapes have separate sizes, so that a recompute in large micro-batches does not enlarge the
buffers of an update.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer, PyTree

from relibra_jax.contract.types import EMPTY, Array, BatchPlan, RoutingReplay
from relibra_jax.execution.exchange import KINDS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.batch_routes import BatchRoutes
from relibra_jax.nnx.stage_plans import on_host
from relibra_jax.routing.exchange_rules import Way
from relibra_jax.routing.lane_lengths import UNFITTED
from relibra_jax.routing.pieces import split_plan
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sequence_packing import SequenceLayout
from relibra_jax.routing.sizes import (
    Capacities,
    ExchangeSizes,
    count_capacities,
    grow_capacities,
    with_spare_room,
)
from relibra_jax.routing.visits import most_copies, most_visits, node_visits, possible_visits
from relibra_jax.support.random_keys import is_key


class BalancerState(NamedTuple):
    """The state that the next batch depends on, as host arrays and numbers, for checkpoints."""

    planner: PyTree
    """The planner's state, with random keys stored as their key data."""
    key: Int[np.ndarray, "..."]
    """The key data of the random key for sample assignments."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert after the last batch."""
    capacities: dict[str, Capacities]
    """Buffer sizes of the batches so far, by the shape of their stages: ``4x64`` for 4 micro-batches of 64 places."""
    way: Int[np.ndarray, "4"]
    """The way of running layers that the first batch chose: the number of the exchange in
    `relibra_jax.execution.exchange.KINDS`, 1 if layers are striped, 1 if there are replicas, and 1 if they may be on
    other nodes. EMPTY if nothing was chosen."""


def check_state(own: BalancerState, state: BalancerState, first: Capacities) -> None:
    """Raise if a balancer cannot continue from ``state``.

    Args:
        own: the balancer's own state, which has the expected structure and shapes.
        state: the state to check.
        first: the balancer's initial buffer sizes, which have the expected structure of all buffer sizes.

    Raises:
        ValueError: if ``state`` belongs to another planner or to a different number of layers or experts, or has a way
            of running layers that does not exist.
    """
    expected = own._replace(capacities=dict.fromkeys(state.capacities, first))
    for name, own_part, state_part in zip(own._fields, expected, state, strict=True):
        if _shapes(own_part) != _shapes(state_part):
            raise ValueError(
                f"balancer state, {name}: expected {_shapes(own_part)}, found {_shapes(state_part)}"
            )
    _check_way(state.way)


def with_sizes_of_path(state: BalancerState, first: Capacities) -> BalancerState:
    """Return a state whose buffer sizes are those of a balancer's path. What nodes exchange begins anew on another one.

    Args:
        state: the state.
        first: the balancer's initial buffer sizes.
    """

    def fit(sizes: Capacities) -> Capacities:
        same = (sizes.node is None) == (first.node is None)
        return sizes if same else dataclasses.replace(sizes, node=first.node)

    return state._replace(capacities={shape: fit(sizes) for shape, sizes in state.capacities.items()})


def _check_way(numbers: Int[Array, "4"]) -> None:
    exchange, *choices = np.asarray(numbers).tolist()
    nothing = exchange == EMPTY and choices == [EMPTY] * 3
    if not nothing and not (0 <= exchange < len(KINDS) and set(choices) <= {0, 1}):
        raise ValueError(
            f"balancer state, way: {[exchange, *choices]} must be [0..{len(KINDS) - 1}, 0 or 1, 0 or 1, 0 or 1], or all"
            f" {EMPTY}"
        )


def saved_leaf(leaf: Any) -> np.ndarray:
    """Copy a leaf of a planner's state to the host; a random key becomes its key data."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def restored_leaf(value: Any, like: Any) -> jax.Array:
    """Convert a host array back to a leaf of a planner's state; the inverse of `saved_leaf`.

    The result is not committed to a device, because planning runs on one device and training steps on all.

    Args:
        value: the host array, or the key data of a random key.
        like: the current leaf, which tells random keys from arrays.
    """
    value = jnp.asarray(value)
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if is_key(like) else value


def saved_way(way: Way | None) -> Int[np.ndarray, "4"]:
    """Return a way of running layers as numbers, as `BalancerState` has it."""
    numbers = [EMPTY] * 4 if way is None else [KINDS.index(way.exchange), *map(int, way[1:])]
    return np.asarray(numbers, np.int32)


def restored_way(numbers: Int[Array, "4"]) -> Way | None:
    """Return the way of running layers of a `BalancerState`; the inverse of `saved_way`."""
    exchange, *choices = (int(number) for number in numbers)
    return None if exchange == EMPTY else Way(KINDS[exchange], *map(bool, choices))


def stage_shape(stage: BatchPlan, parallel: ExpertParallel) -> str:
    """Return the shape of a stage as text, such as ``4x64`` for 4 micro-batches of 64 places for samples.

    Micro-batches are counted in each group, and places in all groups together. If tokens travel in several
    pieces, their number follows: ``4x64x2``.
    """
    micro_batches, *places = stage.assignment.sample.shape
    groups = parallel.num_groups
    pieces = "" if parallel.pieces == 1 else f"x{parallel.pieces}"
    return f"{micro_batches // groups}x{math.prod(places) * groups}{pieces}"


def first_sizes(parallel: ExpertParallel) -> Capacities:
    """Return the initial buffer sizes: those of ``parallel``, or else zero."""
    return parallel.capacities or _zero_sizes(counts_visits=parallel.path != "flat")


class BufferSizes(NamedTuple):
    """The buffer sizes of a batch, with the counts from which they follow."""

    visits: Sequence[Int[np.ndarray, "M L P V"] | None]
    """The number of tokens that each rank P sends to each node N, in each stage; None on the flat path."""
    capacities: dict[str, Capacities]
    """The buffer sizes by stage shape."""
    seconds: float
    """The seconds in which the host counted them."""


def count_sizes(
    routes: BatchRoutes | None,
    plans: Sequence[BatchPlan],
    capacities: Mapping[str, Capacities],
    parallel: ExpertParallel,
    *,
    top_k: int,
    lengths: Integer[Array, " B"],
    layouts: Sequence[SequenceLayout] = (),
) -> BufferSizes:
    """Count the buffer sizes of a batch, and grow those of earlier batches until they suffice.

    Args:
        routes: the routes of the batch. Those of this process alone, or on a single node, bound visits from above
            (`relibra_jax.routing.visits.possible_visits`). None does so, too, for layers that are not striped and run
            in one piece (`relibra_jax.routing.visits.most_visits`).
        plans: the plan of each stage.
        capacities: the buffer sizes of earlier batches by stage shape.
        parallel: the mesh, topology and exchanges with which layers execute the plans.
        top_k: K, the number of experts of a token.
        lengths: the number of real tokens of each sample.
        layouts: the sequences of each stage, which are read only if sequences are split.
    """
    begin, topology = time.perf_counter(), parallel.topology
    crosses, how = parallel.is_hierarchical(top_k), {"striped": parallel.is_striped}
    grown = dict(capacities)
    visits: list[Int[np.ndarray, "M L P V"] | None] = []
    for number, plan in enumerate(plans):
        shape, of_pieces = stage_shape(plan, parallel), list[Any]()
        sizes = grown.get(shape, first_sizes(parallel))
        with on_host():
            pieces: Sequence[tuple[RoutingReplay | None, BatchPlan]] = [(None, plan)]
            if routes is not None:
                placed = routes.placed(plan, layouts[number] if parallel.split_sequences else None)
                pieces = split_plan(
                    *placed,
                    topology,
                    pieces=parallel.pieces,
                    striped=parallel.is_striped,
                    total=routes.total,
                )
            for part, part_plan in pieces:
                visited = None
                if crosses and part is not None:
                    assert routes is not None
                    if routes.own is None and topology.num_nodes > 1:
                        visited = np.asarray(node_visits(part, part_plan, topology, **how))
                    else:  # on a single node, an exact count would sort the copies of every token on the host
                        visited = routes.total(possible_visits(part, part_plan, topology, **how))
                        visited = np.minimum(visited, most_copies(part_plan, topology))
                elif crosses:
                    visited = most_visits(lengths, part_plan, topology)
                need = count_capacities(part_plan.layer_plans(), topology, visits=visited)
                if (
                    part is None and need.node is not None
                ):  # such bounds say little about the lengths of lanes
                    need = dataclasses.replace(need, node=dataclasses.replace(need.node, lengths=UNFITTED))
                sizes = _grow(sizes, need)
                of_pieces.append(visited)
        grown[shape] = sizes
        visits.append(functools.reduce(np.add, of_pieces) if crosses else None)
    return BufferSizes(visits, grown, time.perf_counter() - begin)


def _grow(sizes: Capacities, need: Capacities) -> Capacities:
    if need.node is None and sizes.node is not None:
        need = dataclasses.replace(need, node=_NO_EXCHANGE)
    rows = grow_capacities(sizes, need, round_up=with_spare_room)
    # Experts are few and large, and padded exchanges send spare rows too.
    experts = grow_capacities(sizes, need, round_up=lambda size: -(-size // 2) * 2)
    names = ("exports", "export_copies", "push")
    return dataclasses.replace(rows, **{name: getattr(experts, name) for name in names})


def sizes_from_names(names: Iterable[str]) -> dict[str, Capacities]:
    """Return buffer sizes of zero by stage shape, with the structure that their names in a checkpoint describe.

    >>> sizes = sizes_from_names(["4x64.rows", "4x64.flat.pair", "4x64.push.own"])
    >>> list(sizes), sizes["4x64"].rows, sizes["4x64"].node
    (['4x64'], 0, None)
    """
    parts_by_shape: dict[str, set[str]] = {}
    for shape, part in (name.split(".")[:2] for name in names):
        parts_by_shape.setdefault(shape, set()).add(part)
    return {
        shape: dataclasses.replace(
            _zero_sizes(counts_visits="node" in parts),
            push=_NO_PUSH if "push" in parts else None,
        )
        for shape, parts in parts_by_shape.items()
    }


_NO_EXCHANGE = ExchangeSizes(pair=0, own=0, send=0, receive=0)
_NO_PUSH = PushSizes(exports=0, pair=0, own=0)


def _zero_sizes(*, counts_visits: bool) -> Capacities:
    """Return buffer sizes of zero, for the exchanges between nodes too if their tokens are counted."""
    return Capacities(
        rows=0,
        flat=_NO_EXCHANGE,
        node=_NO_EXCHANGE if counts_visits else None,
        local=_NO_EXCHANGE,
        exports=0,
        export_copies=0,
        push=_NO_PUSH,
    )


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(np.shape, leaves)
