"""Reordering of Megatron-Core's local experts to the homes of a plan: state dicts, and moves of experts between ranks.

Megatron assigns experts to the ranks of an expert-parallel group in contiguous blocks: local expert i of rank r is at
position ``r * H + i``, which corresponds to home slot ``r * H + i`` of a plan. Every rank has the whole router, with
one row for each position. So a reorder moves experts between ranks and local positions, and also reorders the rows and
biases of the router. The ids of replayed routes are mapped with `relibra_jax.integrations.expert_order.map_ids`.
Megatron does not support replicas.

This module does not import torch: the values of a state dict only need indexing (``tensor[rows]``) and a shape. The
names are those of Megatron-Core's ``SequentialMLP`` (``experts.local_experts.0.linear_fc1.weight``) and
``TEGroupedMLP`` (``experts.linear_fc1.weight0``) below ``decoder.layers.N.mlp``. Any other value of a router or of
experts raises an error.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int, Num

from relibra_jax.contract.types import Array
from relibra_jax.integrations.expert_order import source_positions

_LAYER: Final = r"(?:.*\.)?decoder\.layers\.(?P<layer>\d+)\.mlp\."
_ROUTER: Final = re.compile(rf"{_LAYER}router\.(?:weight|bias|expert_bias|qb_beta)")
_EXPERT: Final = (
    re.compile(
        rf"(?P<head>{_LAYER}experts\.local_experts\.)(?P<local>\d+)(?P<tail>\.linear_fc[12]\.(?:weight|bias))"
    ),
    re.compile(rf"(?P<head>{_LAYER}experts\.linear_fc[12]\.(?:weight|bias))(?P<local>\d+)(?P<tail>)"),
)
_SUSPECT: Final = re.compile(r"(?:.*\.)?(?:experts|local_experts|router)\..+")


class ExpertMoves(NamedTuple):
    """The moves of experts to another rank or local index, sorted by layer, target rank and target local index."""

    layer: Int[np.ndarray, " m"]
    """The layer of each move, as a row index of the homes."""
    source_rank: Int[np.ndarray, " m"]
    """The sending rank in the expert-parallel group. It equals ``target_rank`` for a move inside a rank."""
    source_local: Int[np.ndarray, " m"]
    """The index of the local expert on the sending rank, before the reorder."""
    target_rank: Int[np.ndarray, " m"]
    """The receiving rank."""
    target_local: Int[np.ndarray, " m"]
    """The index of the local expert on the receiving rank, after the reorder."""


def expert_moves(before: Num[Array, "..."], after: Num[Array, "..."], *, num_ranks: int) -> ExpertMoves:
    """Return the moves of local experts between ranks that change one order of experts to another.

    A rank sends all moves in which it is ``source_rank``, and receives all moves in which it is ``target_rank``, in the
    order of the result. It does this for the weights and for each moment. Before receiving, it must copy the values
    that it sends, because receives overwrite the experts in place.

    Args:
        before: the position of each expert before the reorder, ``[L, E]``;
            `relibra_jax.integrations.expert_order.logical_order` for the first reorder.
        after: the position of each expert after the reorder, ``[L, E]``, for example ``Plan.home``.
        num_ranks: the size of the expert-parallel group.

    Returns:
        The moves, as int32 arrays of equal length, without the experts that do not move.

    Raises:
        ValueError: if a row of the homes is not a permutation, or the experts do not divide evenly over the ranks.

    >>> moves = expert_moves(np.array([[0, 1, 2, 3]]), np.array([[2, 1, 0, 3]]), num_ranks=2)
    >>> np.stack(moves, 1).tolist()  # layer, from rank and local expert, to rank and local expert
    [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0]]
    """
    source = np.asarray(source_positions(before, after))
    local_experts = _local_experts(source.shape[1], num_ranks)
    layer, target = np.nonzero(source != np.arange(source.shape[1]))
    places = (*divmod(source[layer, target], local_experts), *divmod(target, local_experts))
    return ExpertMoves(*(values.astype(np.int32) for values in (layer, *places)))


def reorder_state_dicts(
    state_dicts: Sequence[Mapping[str, Any]],
    before: Num[Array, "..."],
    after: Num[Array, "..."],
    *,
    layers: Sequence[int],
) -> list[dict[str, Any]]:
    """Reorder the local experts and routers of all ranks from the homes ``before`` to the homes ``after``.

    This works in one process that holds the state dicts of all ranks. Call it once for the parameters, and once for
    each kind of optimizer state (``exp_avg``, ``exp_avg_sq``, float32 master weights), under the parameters' names.

    Args:
        state_dicts: the values by name for each rank of one expert-parallel group, torch tensors or NumPy arrays, with
            whole local experts. With tensor or pipeline parallelism, pass the parts of one rank of those dimensions.
        before: the position of each expert before the reorder, ``[L, E]``, with one row for each MoE layer of these
            state dicts.
        after: the position of each expert after the reorder, ``[L, E]``, for example rows of ``Plan.home``.
        layers: the number N in ``decoder.layers.N`` for each row of the homes, without dense layers.

    Returns:
        New state dicts, for ``load_state_dict``. Changed values are copies that do not alias the old values; all other
        values are the same objects.

    Raises:
        ValueError: if the homes do not match the layers, if a value of a router or of experts has an unknown name, if a
            rank has too few or too many local experts, or if a layer has neither a router nor experts.

    >>> name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    >>> ranks = [{f"{name}{i}": np.full(1, 2 * rank + i) for i in (0, 1)} for rank in (0, 1)]
    >>> ranks = reorder_state_dicts(ranks, np.arange(4)[None], np.array([[2, 1, 0, 3]]), layers=[0])
    >>> [[int(expert[0]) for expert in state.values()] for state in ranks]
    [[2, 1], [0, 3]]
    """
    source = np.asarray(source_positions(before, after))
    if len(layers) != len(source) or len(set(layers)) != len(layers):
        raise ValueError(
            f"layers={list(layers)}: expected {len(source)} different numbers, one for each row of the homes"
        )
    row_of = {layer: row for row, layer in enumerate(layers)}
    local_experts = _local_experts(source.shape[1], len(state_dicts))
    for rank, state in enumerate(state_dicts):
        _check_rank(rank, state, set(layers), local_experts)
    return [_reorder_rank(rank, state_dicts, source, row_of) for rank in range(len(state_dicts))]


def _reorder_rank(
    rank: int,
    state_dicts: Sequence[Mapping[str, Any]],
    source: Int[np.ndarray, "L E"],
    row_of: dict[int, int],
) -> dict[str, Any]:
    local_experts = source.shape[1] // len(state_dicts)
    result = dict(state_dicts[rank])
    for name, value in state_dicts[rank].items():
        if router := _ROUTER.fullmatch(name):
            order = source[row_of[int(router["layer"])]]
            if value.shape[0] != len(order):
                raise ValueError(
                    f"rank {rank}, {name}: expected {len(order)} rows, found {list(value.shape)}"
                )
            result[name] = value[order]
        elif expert := _expert(name):
            position = rank * local_experts + int(expert["local"])
            owner, local = divmod(int(source[row_of[int(expert["layer"])], position]), local_experts)
            other = f"{expert['head']}{local}{expert['tail']}"
            if other not in state_dicts[owner]:
                raise ValueError(f"rank {owner} has no {other}, which rank {rank} needs as {name}")
            if (owner, local) != (rank, int(expert["local"])):
                weights = state_dicts[owner][other]
                # Indexing with an array copies, both in torch and in NumPy. Without a copy, load_state_dict would read
                # parameters that it has already overwritten.
                result[name] = weights[np.arange(weights.shape[0])]
    return result


def _check_rank(rank: int, state: Mapping[str, Any], layers: set[int], local_experts: int) -> None:
    """Check that all values of routers and experts have known names, and that no local expert is missing.

    Raises:
        ValueError: if not; the message names the rank and the value.
    """
    layers_present: set[int] = set()
    places: Counter[tuple[str, str]] = Counter()
    for name, value in state.items():
        match = _ROUTER.fullmatch(name) or _expert(name)
        if match is None:
            # Transformer Engine stores the scales of 8-bit experts in _extra_state; without scales it is empty.
            empty = name.endswith("._extra_state") and (value is None or tuple(value.shape) == (0,))
            if _SUSPECT.fullmatch(name) and not empty:
                raise ValueError(
                    f"rank {rank}, {name}: looks like a value of a router or of experts, but has an unknown name"
                )
            continue
        if int(match["layer"]) not in layers:
            raise ValueError(f"rank {rank}, {name}: layer {match['layer']} is not in layers {sorted(layers)}")
        layers_present.add(int(match["layer"]))
        if "local" in match.groupdict():
            if int(match["local"]) >= local_experts:
                raise ValueError(
                    f"rank {rank}, {name}: a rank must have {local_experts} local experts, not more"
                )
            places[match["head"], match["tail"]] += 1
    for (head, tail), count in places.items():
        if count != local_experts:
            raise ValueError(
                f"rank {rank}, {head}*{tail}: found {count} local experts, expected {local_experts}"
            )
    if layers - layers_present:
        raise ValueError(
            f"rank {rank}: layer {min(layers - layers_present)} has neither a router nor experts"
        )


def _expert(name: str) -> re.Match[str] | None:
    return next((match for pattern in _EXPERT if (match := pattern.fullmatch(name))), None)


def _local_experts(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts must divide evenly over {num_ranks} ranks")
    return num_experts // num_ranks
