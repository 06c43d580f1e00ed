"""Count the bytes that one device sends in a run of a compiled program, from the shapes of its collectives.

For an operand of n bytes, a device in a group of P devices sends:

    all-to-all, reduce-scatter       n (P - 1) / P
    all-gather                       n (P - 1)
    all-reduce                       2 n (P - 1) / P, a reduce-scatter and an all-gather
    collective-permute, -broadcast   n
    ragged-all-to-all                at most n; the exact number is known only at run time

The groups determine the network: ``local`` is inside a node, ``node`` between ranks with the same local index, and
``all`` across both.
"""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Final, Literal

import numpy as np

from experiments.aot.hlo import Instruction, Transfer
from relibra_jax.contract.types import Topology

type Axes = Literal["local", "node", "all"]
type Content = Literal["tokens", "gates", "replicas", "push", "return", "dense", "other"]
type Sent = dict[tuple[Content, Axes], int]
"""Bytes by their content and their network."""

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
    """Count the bytes that a device sends in one run of a program.

    Args:
        transfers: the collectives of the program.
        topology: the expert-parallel group; device ``n * G + g`` is rank g of node n.

    Raises:
        ValueError: if a collective is in a loop of unknown length.
    """
    total: Counter = Counter()
    for transfer in transfers:
        axes, ranks = group_axes(transfer.start, topology)
        sent = sent_bytes(transfer, ranks) * transfer.times
        if not np.isfinite(sent):
            raise ValueError(
                f"{transfer.start.name} runs in a loop of unknown length, so its bytes cannot be counted"
            )
        total[transfer_content(transfer), axes] += round(sent)
    return dict(total)


def sent_bytes(transfer: Transfer, ranks: int) -> float:
    """Return the bytes that a device sends in one execution of a collective among ``ranks`` ranks."""
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
    """Return the network of a collective, and the number of ranks in each of its groups.

    Raises:
        ValueError: if its groups cannot be parsed, or are neither the ranks of nodes, nor the ranks with one local
            index, nor all ranks.
    """
    groups = _groups(collective.attributes, topology.num_ranks)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    ranks = np.arange(nodes * local).reshape(nodes, local)
    groups_by_axes: dict[Axes, np.ndarray] = {"local": ranks, "node": ranks.T, "all": ranks.reshape(1, -1)}
    for axes, expected in groups_by_axes.items():
        if groups is not None and {frozenset(group) for group in groups} == set(
            map(frozenset, expected.tolist())
        ):
            return axes, expected.shape[1]
    raise ValueError(f"{collective.name}: the groups of ranks match no axis of {nodes} x {local}: {groups}")


def transfer_content(transfer: Transfer) -> Content:
    """Determine what a collective sends from its named scope and its dtype."""
    scopes: dict[str, Content] = {
        "push_residents": "push",
        "return_gradients": "return",
        "replica_fetch": "replicas",
        "dispatch": "tokens",
        "combine": "tokens",
    }
    content = next((each for scope, each in scopes.items() if scope in transfer.op_name), None)
    dtype, shape = transfer.operands[0]
    if content == "tokens" and dtype == "f32":
        # These are gates and their gradients, because tokens are sent in bfloat16.
        return "gates"
    if content is None and transfer.kind == "ragged-all-to-all" and len(shape) == 4:
        # XLA drops the names of ragged exchanges; only the exchange of experts has whole matrices.
        return "replicas"
    if content is None and transfer.kind == "all-reduce":
        return "dense"
    return content or "other"


def _groups(attributes: str, ranks: int) -> list[list[int]] | None:
    if match := _LISTS.search(attributes):
        return [[int(rank) for rank in group.split(",")] for group in match[1][1:-1].split("},{")]
    if match := _IOTA.search(attributes):
        shape, dims, order = (_integers(part) for part in match.groups(""))
        places = np.arange(prod(dims)).reshape(dims)
        return places.transpose(order or range(len(dims))).reshape(shape).tolist()
    if match := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        names, axis_names = list(sizes), re.findall(r"'([^']+)'", match[2])
        if prod(sizes.values()) != ranks or not set(axis_names) <= set(names):
            return None
        places = np.arange(ranks).reshape(tuple(sizes.values()))
        inner = [names.index(name) for name in axis_names]
        outer = [axis for axis in range(len(names)) if axis not in inner]
        size = prod(sizes[name] for name in axis_names)
        return places.transpose(outer + inner).reshape(-1, size).tolist()
    return None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
