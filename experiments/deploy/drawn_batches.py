"""Micro-batches of decoding, drawn from a recorded trace.

In one decoding step every sequence in flight routes one token. Finished sequences are replaced at once. So a step sees
a sequence at any of its tokens, and sees longer sequences more often: every recorded token is equally likely.
"""

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.limits import check_integer


def draw_micro_batches(
    replay: RoutingReplay, *, num_experts: int, sequences: int, micro_batches: int, layers: int, seed: int
) -> Int[np.ndarray, "L m E"]:
    """Draw the loads of one decoding step from recorded tokens, with replacement.

    A drawn token keeps its routes in all layers.

    Args:
        replay: the recorded routing, which `relibra_jax.contract.replay.check_replay` accepts.
        num_experts: the number of experts of a layer, E.
        sequences: the number of sequences in a micro-batch.
        micro_batches: the number of micro-batches, m.
        layers: the number of layers of the result, L. If the trace has fewer layers, they are repeated.
        seed: the seed of the draw.

    Returns:
        The token copies of each expert. A micro-batch has ``sequences`` times K of them in every layer.

    Raises:
        ValueError: if the replay has no token, or a count is not an integer of at least 1.

    >>> replay = RoutingReplay(np.array([[[[0, 2]], [[1, 2]]]]), np.array([[True, False]]))
    >>> sizes = {"num_experts": 4, "sequences": 3, "micro_batches": 1, "layers": 2}
    >>> draw_micro_batches(replay, **sizes, seed=0).tolist()
    [[[3, 0, 3, 0]], [[3, 0, 3, 0]]]
    """
    for name, value in (("sequences", sequences), ("micro_batches", micro_batches), ("layers", layers)):
        check_integer(name, value, least=1)
    routes = np.asarray(replay.expert_ids)[np.asarray(replay.mask)]
    if not len(routes):
        raise ValueError("the replay has no tokens to draw from")
    recorded = routes.shape[1]
    drawn = np.random.default_rng(seed).integers(len(routes), size=(micro_batches, sequences))
    load = np.zeros((recorded, micro_batches, num_experts), np.int32)
    for micro_batch, tokens in enumerate(drawn):
        for layer in range(recorded):
            ids = routes[tokens, layer].ravel()
            load[layer, micro_batch] = np.bincount(ids, minlength=num_experts)
    return load[np.arange(layers) % recorded]
