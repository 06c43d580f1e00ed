"""Count the bytes that one device sends in a run of a compiled program, from the shapes of its collectives.

For an operand of n bytes, a device in a group of P devices sends:

    all-to-all, reduce-scatter       n (P - 1) / P
    all-gather                       n (P - 1)
    all-reduce                       2 n (P - 1) / P, a reduce-scatter and an all-gather
    collective-permute, -broadcast   n
    ragged-all-to-all                at most n; the exact number is known only at run time

The groups determine the network: ``local`` is inside a node, ``node`` between ranks with the same local index,
``fsdp`` and ``data`` between copies of an expert-parallel group, several of them joined with ``+``, and ``all`` across
the whole mesh.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from math import prod
from typing import Final, Literal

import numpy as np

from experiments.aot.hlo import Instruction, Transfer

type Axes = str
"""The mesh axes that a collective crosses: one, several joined with ``+``, or ``all`` for all of several."""
type Content = Literal["tokens", "gates", "replicas", "push", "return", "dense", "other"]
type Sent = dict[tuple[Content, Axes], int]
"""Bytes by their content and their network."""
type SentByKind = dict[tuple[Content, str, Axes], int]
"""Bytes by their content, the kind of collective and their network."""

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


def count_sent(transfers: Iterable[Transfer], mesh_axes: Mapping[str, int]) -> Sent:
    """Count the bytes that a device sends in one run of a program, by content and network.

    Args:
        transfers: the collectives of the program.
        mesh_axes: the sizes of the mesh axes, slowest first: ``mesh.shape``.

    Raises:
        ValueError: if a collective is in a loop of unknown length.
    """
    total: Counter = Counter()
    for (content, _, axes), sent in count_by_kind(transfers, mesh_axes).items():
        total[content, axes] += sent
    return dict(total)


def count_by_kind(transfers: Iterable[Transfer], mesh_axes: Mapping[str, int]) -> SentByKind:
    """Count the bytes that a device sends in one run of a program, by content, kind of collective and network.

    Args:
        transfers: the collectives of the program.
        mesh_axes: the sizes of the mesh axes, slowest first: ``mesh.shape``.

    Raises:
        ValueError: if a collective is in a loop of unknown length.
    """
    total: Counter = Counter()
    for transfer in transfers:
        axes, ranks = group_axes(transfer.start, mesh_axes)
        sent = sent_bytes(transfer, ranks) * transfer.times
        if not np.isfinite(sent):
            raise ValueError(
                f"{transfer.start.name} runs in a loop of unknown length, so its bytes cannot be counted"
            )
        total[transfer_content(transfer), transfer.kind, axes] += round(sent)
    return dict(total)


def sent_bytes(transfer: Transfer, ranks: int) -> float:
    """Return the bytes that a device sends in one execution of a collective among ``ranks`` ranks."""
    operands = transfer.operands[:1] if transfer.kind == "ragged-all-to-all" else transfer.operands
    size = sum(array_bytes(*operand) for operand in operands)
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


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array."""
    return _SIZES[dtype] * prod(shape)


def group_axes(collective: Instruction, mesh_axes: Mapping[str, int]) -> tuple[Axes, int]:
    """Return the network of a collective, and the number of ranks in each of its groups.

    Raises:
        ValueError: if its groups cannot be parsed, or match no axes of the mesh.
    """
    sizes = tuple(mesh_axes.values())
    groups = _groups(collective.attributes, prod(sizes))
    places, names = np.arange(prod(sizes)).reshape(sizes), list(mesh_axes)
    choices = [chosen for count in range(1, len(names) + 1) for chosen in combinations(names, count)]
    for chosen in choices:
        inner = [names.index(name) for name in chosen]
        outer = [axis for axis in range(len(names)) if axis not in inner]
        ranks = prod(mesh_axes[name] for name in chosen)
        expected = places.transpose(outer + inner).reshape(-1, ranks)
        if groups is not None and set(map(frozenset, groups)) == set(map(frozenset, expected.tolist())):
            whole = len(chosen) == len(names) > 1
            return "all" if whole else "+".join(chosen), ranks
    shape = " x ".join(map(str, sizes))
    raise ValueError(f"{collective.name}: the groups of ranks match no axis of {shape}: {groups}")


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
    dtype, _ = transfer.operands[0]
    if content == "tokens" and dtype == "f32":
        # These are gates and their gradients, because tokens are sent in bfloat16.
        return "gates"
    if content is None and transfer.kind == "ragged-all-to-all":
        # XLA drops the names of ragged exchanges, and that of replicas gets the name of their packing.
        return "gates" if dtype == "f32" else "tokens"
    if content is None and transfer.kind in ("all-gather", "all-reduce", "reduce-scatter"):
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
