"""What one device sends in a run of a compiled program, counted from the shapes of its collectives.

A device in a group of P sends, of an operand of n bytes:

    all-to-all, reduce-scatter       n (P - 1) / P
    all-gather                       n (P - 1)
    all-reduce                       2 n (P - 1) / P, a reduce-scatter and an all-gather
    collective-permute, -broadcast   n
    ragged-all-to-all                at most n: how much lies in its lanes is known when it runs

Groups say over which network: ``local`` inside a node, ``node`` between ranks of one local index, ``all`` over both.
"""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Final, Literal

import numpy as np

from experiments.aot.hlo import Instruction, Transfer
from relibra_jax.types import Topology

type Axes = Literal["local", "node", "all"]
type What = Literal["tokens", "gates", "replicas", "push", "return", "dense", "other"]
type Sent = dict[tuple[What, Axes], int]
"""Bytes by what they are and the network that they take."""

_SIZES: Final = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
}
_LISTS = re.compile(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def count_sent(transfers: Iterable[Transfer], topology: Topology) -> Sent:
    """The bytes that a device sends in one run of a program; those of a loop of unknown length are an error.

    Args:
        transfers: the collectives of the program.
        topology: the ranks; device ``n * G + g`` is rank g of node n.
    """
    total: Counter = Counter()
    for transfer in transfers:
        axes, ranks = group_axes(transfer.start, topology)
        sent = sent_bytes(transfer, ranks) * transfer.times
        if not np.isfinite(sent):
            raise ValueError(
                f"{transfer.start.name} runs in a loop of unknown length: its bytes cannot be counted"
            )
        total[what_is_sent(transfer), axes] += round(sent)
    return dict(total)


def sent_bytes(transfer: Transfer, ranks: int) -> float:
    """The bytes that a device sends in one execution among so many ranks."""
    operands = transfer.operands[:1] if transfer.kind == "ragged-all-to-all" else transfer.operands
    size = sum(_SIZES[dtype] * prod(shape) for dtype, shape in operands)
    away = (ranks - 1) / ranks
    shares = {
        "all-to-all": away,
        "reduce-scatter": away,
        "all-gather": ranks - 1.0,
        "all-reduce": 2 * away,
        "collective-broadcast": 1.0,
        "collective-permute": 1.0,
        "ragged-all-to-all": 1.0,
    }
    return size * shares[transfer.kind]


def group_axes(collective: Instruction, topology: Topology) -> tuple[Axes, int]:
    """The network that a collective takes, and the ranks of one of its groups.

    Raises:
        ValueError: if its groups are not understood, or are neither a node's ranks, nor those of one local index, nor
            all ranks.
    """
    groups = _groups(collective.attributes, topology.num_ranks)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    ranks = np.arange(nodes * local).reshape(nodes, local)
    known: dict[Axes, np.ndarray] = {"local": ranks, "node": ranks.T, "all": ranks.reshape(1, -1)}
    for axes, expected in known.items():
        if groups is not None and {frozenset(group) for group in groups} == set(
            map(frozenset, expected.tolist())
        ):
            return axes, expected.shape[1]
    raise ValueError(f"{collective.name}: groups of ranks that are no axis of {nodes} x {local}: {groups}")


def what_is_sent(transfer: Transfer) -> What:
    """What a collective carries, by the scope that it was called in and its dtype."""
    scopes: dict[str, What] = {
        "push_residents": "push",
        "return_gradients": "return",
        "replica_fetch": "replicas",
        "dispatch": "tokens",
        "combine": "tokens",
    }
    found = next((what for scope, what in scopes.items() if scope in transfer.op_name), None)
    dtype, shape = transfer.operands[0]
    if found == "tokens" and dtype == "f32":
        # Gates and their gradients; tokens travel in bfloat16.
        return "gates"
    if found is None and transfer.kind == "ragged-all-to-all" and len(shape) == 4:
        # XLA drops the names of ragged exchanges: that of experts is the one of whole matrices.
        return "replicas"
    if found is None and transfer.kind == "all-reduce":
        return "dense"
    return found or "other"


def _groups(attributes: str, ranks: int) -> list[list[int]] | None:
    if found := _LISTS.search(attributes):
        return [[int(rank) for rank in group.split(",")] for group in found[1][1:-1].split("},{")]
    if found := _IOTA.search(attributes):
        shape, dims, order = (_integers(part) for part in found.groups(""))
        places = np.arange(prod(dims)).reshape(dims)
        return places.transpose(order or range(len(dims))).reshape(shape).tolist()
    if found := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        names, over = list(sizes), re.findall(r"'([^']+)'", found[2])
        if prod(sizes.values()) != ranks or not set(over) <= set(names):
            return None
        places = np.arange(ranks).reshape(tuple(sizes.values()))
        inner = [names.index(name) for name in over]
        outer = [axis for axis in range(len(names)) if axis not in inner]
        size = prod(sizes[name] for name in over)
        return places.transpose(outer + inner).reshape(-1, size).tolist()
    return None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
