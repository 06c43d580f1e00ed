"""From what the sampler recorded to the replay that a batch is planned from."""

import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.rollout import replay_from_rollout
from relibra_jax.types import RoutingReplay


def replay_of_rows(
    routes: Int[np.ndarray, "B T L K"], mask: Bool[np.ndarray, "..."], *, num_experts: int
) -> RoutingReplay:
    """The replay of a batch's rows.

    Every token that 0.1.7's sampler returns has been fed to the model: it goes on until the token behind the last
    one is drawn. A token without a route is therefore an error.

    Args:
        routes: recorded experts, EMPTY where nothing was: the prompt right-aligned, then what was generated, which
            may go on behind a sample's end.
        mask: ``[B, T]``, the prompt's mask, then the completion's.
        num_experts: E.

    Returns:
        The replay, of ``T`` tokens.

    Raises:
        ValueError: if the rows do not belong together, or a real token has no route, in one line that names it.
    """
    if routes.shape[:2] != mask.shape:
        raise ValueError(
            f"{routes.shape[0]} samples of {routes.shape[1]} tokens were recorded, and {mask.shape[0]} of"
            f" {mask.shape[1]} are trained on: the rollout and the learner must be of the same batch"
        )
    _, _, layers, top_k = routes.shape
    return replay_from_rollout(
        routes, layout="tunix", mask=mask, num_experts=num_experts, top_k=top_k, num_layers=layers
    )
