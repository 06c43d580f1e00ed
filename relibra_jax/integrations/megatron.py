"""Megatron-Core's local experts in the order of a plan's homes: state dicts of the ranks, and who sends what to whom.

Megatron deals experts to the ranks of an expert-parallel group in contiguous blocks: local expert i of rank r is
position ``r * H + i``, which is home slot ``r * H + i`` of a plan. Every rank has the whole router, one row for each
position. So experts move between ranks and places, and router rows, their biases and the ids of replayed routes follow
(`relibra_jax.integrations.expert_order.map_ids`). Replicas have no place in Megatron.

Nothing here imports torch: values of a state dict only need an index (``tensor[rows]``) and a shape. Names are those of
Megatron-Core's ``SequentialMLP`` (``experts.local_experts.0.linear_fc1.weight``) and ``TEGroupedMLP``
(``experts.linear_fc1.weight0``) below ``decoder.layers.N.mlp``; any other value of a router or of experts is an error.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int, Num

from relibra_jax.integrations.expert_order import source_positions
from relibra_jax.types import Array

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
    """The experts that change rank or place, in one order on all ranks: by layer, target rank and target place."""

    layer: Int[np.ndarray, " m"]
    """The row of the homes."""
    source_rank: Int[np.ndarray, " m"]
    """The rank of the expert-parallel group that sends; the same as ``target_rank`` for a move inside a rank."""
    source_local: Int[np.ndarray, " m"]
    """Its local expert so far."""
    target_rank: Int[np.ndarray, " m"]
    """The rank that receives."""
    target_local: Int[np.ndarray, " m"]
    """Its local expert from now on."""


def expert_moves(before: Num[Array, "..."], after: Num[Array, "..."], *, num_ranks: int) -> ExpertMoves:
    """Which local expert of which rank becomes which local expert of which rank.

    A rank sends all moves with its own number as ``source_rank`` and receives those with it as ``target_rank``, in the
    order of the list, for weights and for each moment alike; what it sends it copies first, since both happen in place.

    Args:
        before: ``[L, E]``, the position of each expert so far; at first that is
            `relibra_jax.integrations.expert_order.logical_order`.
        after: ``[L, E]``, the position of each expert from now on, ``Plan.home``.
        num_ranks: the size of the expert-parallel group.

    Returns:
        int32 arrays of one length; experts that stay where they are do not occur.

    Raises:
        ValueError: if homes are no permutations, or experts do not divide evenly over the ranks.

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
    """Take the local experts and routers of all ranks in the order of the homes ``after``, in one process.

    For parameters, and in a call of its own for each moment (``exp_avg``, ``exp_avg_sq``, float32 masters) by the names
    of the parameters.

    Args:
        state_dicts: for each rank of one expert-parallel group, values by name: torch tensors or NumPy arrays, whole
            local experts. Of other parallel dimensions (tensor, pipeline), one rank's part each.
        before: ``[L, E]``, the position of each expert so far, a row for each MoE layer of these state dicts.
        after: ``[L, E]``, the position of each expert from now on, rows of ``Plan.home``.
        layers: N of ``decoder.layers.N`` for each row of the homes; dense layers are left out.

    Returns:
        New state dicts, for ``load_state_dict``: what changed is copied and aliases no value of the old ones, the rest
        is the same objects.

    Raises:
        ValueError: if homes do not fit, a value of a router or of experts is not understood (its name), experts are
            missing or more than a rank should have, or a layer has neither.

    >>> name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    >>> ranks = [{f"{name}{i}": np.full(1, 2 * rank + i) for i in (0, 1)} for rank in (0, 1)]
    >>> ranks = reorder_state_dicts(ranks, np.arange(4)[None], np.array([[2, 1, 0, 3]]), layers=[0])
    >>> [[int(expert[0]) for expert in state.values()] for state in ranks]
    [[2, 1], [0, 3]]
    """
    source = np.asarray(source_positions(before, after))
    if len(layers) != len(source) or len(set(layers)) != len(layers):
        raise ValueError(
            f"layers {list(layers)}: expected {len(source)} different ones, one for each row of the homes"
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
                moved = state_dicts[owner][other]
                # An index by rows copies, as torch and NumPy have it in common; load_state_dict, which writes to the
                # parameters one by one, would else read what it has written already.
                result[name] = moved[np.arange(moved.shape[0])]
    return result


def _check_rank(rank: int, state: Mapping[str, Any], layers: set[int], local_experts: int) -> None:
    """Raise unless every value of a router or of experts is understood, and experts are whole."""
    found: set[int] = set()
    places: Counter[tuple[str, str]] = Counter()
    for name, value in state.items():
        match = _ROUTER.fullmatch(name) or _expert(name)
        if match is None:
            # Transformer Engine keeps the scales of 8-bit experts there, and an empty tensor without them.
            empty = name.endswith("._extra_state") and (value is None or tuple(value.shape) == (0,))
            if _SUSPECT.fullmatch(name) and not empty:
                raise ValueError(
                    f"rank {rank}, {name}: looks like a router's or experts', but is not understood"
                )
            continue
        if int(match["layer"]) not in layers:
            raise ValueError(f"rank {rank}, {name}: layer {match['layer']} is not in layers {sorted(layers)}")
        found.add(int(match["layer"]))
        if "local" in match.groupdict():
            if int(match["local"]) >= local_experts:
                raise ValueError(f"rank {rank}, {name}: a rank has {local_experts} local experts")
            places[match["head"], match["tail"]] += 1
    for (head, tail), count in places.items():
        if count != local_experts:
            raise ValueError(f"rank {rank}, {head}*{tail}: {count} of {local_experts} local experts")
    if layers - found:
        raise ValueError(f"rank {rank}: neither router nor experts in layer {min(layers - found)}")


def _expert(name: str) -> re.Match[str] | None:
    return next((match for pattern in _EXPERT if (match := pattern.fullmatch(name))), None)


def _local_experts(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts must divide evenly over {num_ranks} ranks")
    return num_experts // num_ranks
