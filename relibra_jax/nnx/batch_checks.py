"""What a balancer holds model and replay to, before it plans a batch."""

import numpy as np
from flax import nnx
from jaxtyping import Bool, Int

from relibra_jax.nnx.homes import get_homes
from relibra_jax.replay import check_replay
from relibra_jax.types import RoutingReplay


def check_replay_layers(replay: RoutingReplay, *, num_experts: int, num_layers: int) -> None:
    """Raise ValueError unless a replay is sound, and of so many experts and layers."""
    check_replay(replay, num_experts=num_experts)
    if replay.expert_ids.shape[2] != num_layers:
        raise ValueError(
            f"replay of {replay.expert_ids.shape[2]} MoE layers, balancer of {num_layers}: record all MoE layers of the"
            " model, and give the Balancer their number"
        )


def check_model_homes(model: nnx.Module, wanted: Int[np.ndarray, "L E"]) -> None:
    """Raise ValueError unless a model's experts lie where the balancer left them."""
    home = get_homes(model)
    if home.shape != wanted.shape:
        raise ValueError(
            f"model of {home.shape[0]} MoE layers x {home.shape[1]} experts, balancer of {wanted.shape[0]} x"
            f" {wanted.shape[1]}: give it the model's num_layers and topology"
        )
    if (home != wanted).any():
        layer, expert = np.argwhere(home != wanted)[0].tolist()
        raise ValueError(
            f"layer {layer}, expert {expert}: the model holds it in home slot {home[layer, expert]}, the balancer left"
            f" it in {wanted[layer, expert]}; restore model and balancer together (restore_training), or set back what"
            " was set by hand: set_homes(model, balancer.state.home)"
        )


def check_aligned_left(mask: Bool[np.ndarray, "B T"]) -> None:
    """Raise ValueError unless the real tokens of every sample come first."""
    gaps = mask[:, 1:] & ~mask[:, :-1]
    if gaps.any():
        sample, token = np.argwhere(gaps)[0].tolist()
        raise ValueError(
            f"sample {sample}: token {token + 1} is real and token {token} is not; packed rows need samples that are"
            " aligned to the left"
        )
