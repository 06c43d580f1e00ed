"""Conversion of placements to and from the formats of EPLB, vLLM and SGLang.

A placement that the trainer found can also serve the rollout engine, and the other way round. Engines number physical
slots rank by rank, so their ``physical_to_logical[L P]`` is ``slot_expert[L N G S]`` with the last three axes
flattened. The formats differ in empty slots: vLLM allows them (-1), EPLB and SGLang do not.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from relibra_jax.contract.types import EMPTY, Array, PhysicalExperts, Plan, Topology
from relibra_jax.support.atomic_write import write_atomically
from relibra_jax.support.json_text import parse_json


class EnginePlacement(NamedTuple):
    """The homes and slots of all layers: of a plan in one micro-batch, or of an engine."""

    home: Int[Array, "L E"]
    """Flat home slot of each expert."""
    slot_expert: Int[Array, "L N G S"]
    """The expert in each slot, home slots first, then copies; EMPTY for none."""


def placement_of(plan: Plan, micro_batch: int) -> EnginePlacement:
    """Return the placement of a plan in one of its micro-batches."""
    return EnginePlacement(np.asarray(plan.home), np.asarray(plan.slot_expert)[micro_batch])


def homes_only(plan: Plan) -> EnginePlacement:
    """Return the placement of a plan's home slots alone; it has no empty slots, so every engine can load it."""
    slot_expert = np.asarray(plan.slot_expert)[0]
    home_slots = plan.home.shape[-1] // (slot_expert.shape[1] * slot_expert.shape[2])
    return EnginePlacement(np.asarray(plan.home), slot_expert[..., :home_slots])


def to_vllm(placement: EnginePlacement) -> Int[np.ndarray, "L P"]:
    """Convert a placement to vLLM's ``physical_to_logical``, with -1 for unused slots."""
    slot_expert = np.asarray(placement.slot_expert, np.int32)
    return slot_expert.reshape(slot_expert.shape[0], -1)


def to_eplb(placement: EnginePlacement) -> PhysicalExperts:
    """Convert a placement to EPLB's three arrays.

    Raises:
        ValueError: if a slot is empty, because the format of EPLB has no empty slots.

    >>> slots = np.array([[[[0, 1]], [[2, 3]]]])
    >>> to_eplb(EnginePlacement(np.array([[0, 1, 2, 3]]), slots)).logical_to_physical.tolist()
    [[[0], [1], [2], [3]]]
    """
    physical = _without_empty_slots(placement, "EPLB")
    num_experts = placement.home.shape[-1]
    count = np.stack([np.bincount(row, minlength=num_experts) for row in physical])
    order = np.argsort(physical, axis=-1, kind="stable")
    expert = np.take_along_axis(physical, order, -1)
    copy = np.arange(physical.shape[-1]) - np.take_along_axis(np.cumsum(count, -1) - count, expert, -1)
    slots = np.full((*count.shape, count.max()), EMPTY, np.int32)
    slots[np.arange(len(physical))[:, None], expert, copy] = order
    return PhysicalExperts(physical, slots, count.astype(np.int32))


def to_sglang(path: str | os.PathLike, placement: EnginePlacement) -> None:
    """Write a placement as the JSON file that SGLang's ``--init-expert-location`` reads.

    Raises:
        ValueError: if a slot is empty, because the format of SGLang has no empty slots.
    """
    physical = _without_empty_slots(placement, "SGLang")
    with write_atomically(path) as part:
        part.write_text(json.dumps({"physical_to_logical_map": physical.tolist()}))


def from_sglang(path: str | os.PathLike, topology: Topology) -> EnginePlacement:
    """Read a placement from an ``--init-expert-location`` JSON file of SGLang with ``physical_to_logical_map``.

    Raises:
        ValueError: if the file is not such a JSON file, or if its map does not fit ``topology`` (see `from_physical`).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        physical = np.asarray(parse_json(text)["physical_to_logical_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: it must be a JSON object with a rectangular physical_to_logical_map ({error!r})"
        ) from error
    return from_physical(physical, topology)


def from_physical(physical_to_logical: Int[Array, "..."], topology: Topology) -> EnginePlacement:
    """Convert a ``physical_to_logical`` of EPLB, vLLM or SGLang to a placement.

    Engines do not distinguish homes from other copies. If the first H slots of all ranks hold every expert once, they
    become the homes. Otherwise homes are chosen by bipartite matching, so that each rank owns H of the experts that it
    holds. Several copies of an expert on one rank become one.

    Args:
        physical_to_logical: ``[L P]``, the expert in each physical slot, rank by rank; -1 for an unused slot.
        topology: the expert-parallel group. A rank of the engine may have fewer than S slots; the others are EMPTY.

    Raises:
        ValueError: if shapes, ids or copies do not fit ``topology``, or if the copies do not allow H homes on every
            rank.
    """
    physical = np.asarray(physical_to_logical)
    if physical.ndim != 2 or not np.issubdtype(physical.dtype, np.integer):
        raise ValueError(f"expected integers [layers, physical], found {physical.dtype} {physical.shape}")
    ranks, homes, slots = topology.num_ranks, topology.home_slots, topology.slots
    per_rank, rest = divmod(physical.shape[1], ranks)
    if rest or not homes <= per_rank <= slots:
        raise ValueError(
            f"{physical.shape[1]} physical slots do not fit {ranks} ranks of {homes} to {slots} slots each"
        )
    outside = (physical < EMPTY) | (physical >= topology.num_experts)
    if outside.any():
        layer, slot = np.argwhere(outside)[0]
        raise ValueError(
            f"layer {layer}, slot {slot}: expert {physical[layer, slot]} is outside 0..{topology.num_experts - 1}"
        )
    slot_expert = np.full((len(physical), ranks, slots), EMPTY, np.int32)
    slot_expert[..., :per_rank] = physical.reshape(len(physical), ranks, per_rank)
    home = np.zeros((len(physical), topology.num_experts), np.int32)
    for layer, row in enumerate(slot_expert):
        _homes_first(row, layer, topology)
        home[layer, row[:, :homes].ravel()] = np.arange(topology.num_experts)
    return EnginePlacement(
        home, slot_expert.reshape(len(physical), topology.num_nodes, topology.ranks_per_node, slots)
    )


def _homes_first(row: Int[np.ndarray, "ranks S"], layer: int, topology: Topology) -> None:
    """Reorder the slots of one layer in place: homes first, then copies, then empty slots."""
    homes, experts = topology.home_slots, topology.num_experts
    if np.array_equal(np.sort(row[:, :homes].ravel()), np.arange(experts)):
        owner = np.empty(experts, int)
        owner[row[:, :homes].ravel()] = np.arange(experts) // homes
    else:
        seat_of_rank = np.repeat(np.eye(topology.num_ranks, dtype=bool), homes, 1)
        holds = (row[:, :, None] == np.arange(experts)).any(1).T
        seat = maximum_bipartite_matching(csr_array(holds @ seat_of_rank), perm_type="column")
        if (seat < 0).any():
            expert = int(np.argmin(seat))
            copies = int(holds[expert].sum())
            raise ValueError(
                f"layer {layer}: no home for expert {expert} ({copies} copies):"
                f" the copies do not allow {homes} homes on each of {topology.num_ranks} ranks"
            )
        owner = seat // homes
    for rank, slots in enumerate(row):
        rank_experts = list(dict.fromkeys(int(expert) for expert in slots if expert != EMPTY))
        rank_experts.sort(key=lambda expert: owner[expert] != rank)
        slots[:] = rank_experts + [EMPTY] * (slots.size - len(rank_experts))


def _without_empty_slots(placement: EnginePlacement, consumer: str) -> Int[np.ndarray, "L P"]:
    physical = to_vllm(placement)
    if (physical == EMPTY).any():
        layer, slot = np.argwhere(physical == EMPTY)[0]
        raise ValueError(
            f"layer {layer}, slot {slot} is empty, but {consumer} has no empty slots; homes_only returns a placement"
            " without them"
        )
    return physical
