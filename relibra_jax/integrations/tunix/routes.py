"""Conversion of the routes that the sampler recorded to a routing replay."""

import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.contract.types import RoutingReplay
from relibra_jax.rollout.ingest import replay_from_rollout


def replay_of_sequences(
    routes: Int[np.ndarray, "B T L K"], mask: Bool[np.ndarray, "..."], *, num_experts: int
) -> RoutingReplay:
    """Return the routing replay of a batch's sequences.

    A real token without a route is an error: the sampler of Tunix 0.1.7 feeds every token that it returns to the model,
    because it continues until it has drawn the token after the last one.

    Args:
        routes: the recorded experts, with EMPTY where there is no token. A sequence contains the right-aligned prompt
            and then the generated tokens, which may continue after the end of a sample.
        mask: the mask of real tokens, ``[B, T]``: the mask of the prompt, followed by that of the completion.
        num_experts: the number of logical experts.

    Returns:
        The replay, with ``T`` tokens per sequence.

    Raises:
        ValueError: if the routes and the mask have different sizes, or if a real token has no route. In the second case
            the message names the token.
    """
    if routes.shape[:2] != mask.shape:
        raise ValueError(
            f"the rollout recorded {routes.shape[0]} samples of {routes.shape[1]} tokens, but the learner trains on"
            f" {mask.shape[0]} of {mask.shape[1]}: both must use the same batch"
        )
    _, _, layers, top_k = routes.shape
    return replay_from_rollout(
        routes, layout="tunix", mask=mask, num_experts=num_experts, top_k=top_k, num_layers=layers
    )
