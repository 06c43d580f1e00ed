"""Checks of the model and the replay before the balancer plans a batch."""

import numpy as np
from flax import nnx
from jaxtyping import Bool, Int

from relibra_jax.contract.replay import check_replay
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.nnx.homes import get_homes


def check_replay_layers(replay: RoutingReplay, *, num_experts: int, num_layers: int) -> None:
    """Raise ValueError unless a replay is valid and has the given numbers of experts and layers."""
    check_replay(replay, num_experts=num_experts)
    if replay.expert_ids.shape[2] != num_layers:
        raise ValueError(
            f"the replay has {replay.expert_ids.shape[2]} MoE layers, but the Balancer has num_layers={num_layers}:"
            " record every MoE layer of the model, and set num_layers to their number"
        )


def check_model_homes(model: nnx.Module, expected_home: Int[np.ndarray, "L E"]) -> None:
    """Raise ValueError unless a model's experts are in the home slots that the balancer expects."""
    home = get_homes(model)
    if home.shape != expected_home.shape:
        raise ValueError(
            f"the model has {home.shape[0]} MoE layers with {home.shape[1]} experts, but the Balancer has"
            f" {expected_home.shape[0]} with {expected_home.shape[1]}: give it the model's num_layers and topology"
        )
    if (home != expected_home).any():
        layer, expert = np.argwhere(home != expected_home)[0].tolist()
        raise ValueError(
            f"layer {layer}, expert {expert}: the model has it in home slot {home[layer, expert]}, but the balancer"
            f" expects it in home slot {expected_home[layer, expert]}; restore model and balancer together"
            " (restore_training), or undo a change by hand with set_homes(model, balancer.state.home)"
        )


def check_aligned_left(mask: Bool[np.ndarray, "B T"]) -> None:
    """Raise ValueError unless the real tokens of every sample come first."""
    gaps = mask[:, 1:] & ~mask[:, :-1]
    if gaps.any():
        sample, token = np.argwhere(gaps)[0].tolist()
        raise ValueError(
            f"sample {sample}: token {token + 1} is real, but token {token} before it is padding; pack_rows needs"
            " samples that are aligned to the left"
        )
