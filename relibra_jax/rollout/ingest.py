"""Conversion of recorded routed experts to a complete `RoutingReplay`, or to an error that names the place of a fault.

Real systems have had each of these faults: the last token has no route; dense layers have rows; ids are physical slots
of a balanced engine; zero padding looks like an overload of expert 0; prefix-cached tokens are zeros; pipeline stages
are not merged; uint8 ids have overflowed; an expert occurs twice in a route; left padding shifts rows; an engine that
was asked to skip tokens does not say so. Therefore the caller states the layout, the mask and where rows start, and the
rows are assigned to the real tokens of the mask in order. Nothing is repaired. A missing route is an error, unless the
caller provides a live forward pass that fills it; then a warning is logged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import Array, RoutingReplay
from relibra_jax.rollout.expected import expect
from relibra_jax.rollout.rows import read_rows
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def replay_from_rollout(
    source: Any,
    *,
    layout: str,
    mask: Bool[Array, "B T"],
    num_experts: int,
    top_k: int,
    num_layers: int,
    moe_layers: Sequence[int] | None = None,
    start: int | Sequence[int] | Int[Array, "B"] | None = None,
    fill: str | None = None,
    live_routing: Callable[[np.ndarray], Array] | None = None,
) -> RoutingReplay:
    """Read the routed experts of a batch from the recording of an engine or trainer.

    Args:
        source: the recording, in the form that `relibra_jax.rollout.layouts` describes for the layout.
        layout: the name of the layout, a key of `LAYOUTS`.
        mask: ``[B, T]``, True where training has a real token. The recorded rows belong to these tokens, in order. If a
            layout gives the rows of a sample without their positions, the mask may leave out no token of the engine's
            sequence but the last.
        num_experts: E, the number of logical experts of a layer.
        top_k: K, the number of experts of a token. The order of a token's experts is kept.
        num_layers: the number of hidden layers of the model, including dense ones.
        moe_layers: the indices of the layers that have experts, ascending. None for all. A recording may have rows of
            all layers or of the MoE layers alone.
        start: the token of each sample's first row, counted in the real tokens of the mask; one integer for all samples
            or one for each. It is the number of tokens that the engine was asked to skip (vLLM's
            ``routed_experts_prompt_start`` and SGLang's ``routed_experts_start_len``, which the engines do not return).
            Tokens before it have no route. If a sample has fewer rows than real tokens, ``start`` is required, even if
            it is 0, unless the recording states where the rows start: a skipped first token leaves as many rows as a
            last token without a route.
        fill: what to do with real tokens without a route. None raises. "live" takes their routes from
            ``live_routing``, like engines that fall back to the live router, and logs a warning with the number of such
            tokens and samples (logger ``relibra_jax``).
        live_routing: the function ``missing -> expert_ids`` for ``fill="live"``: from a bool ``[B, T]`` of the tokens
            without a route to integers ``[B, T, L, K]``. It is called only if a route is missing, and only the missing
            routes are read from its result.

    Returns:
        The replay of the L MoE layers: expert ids in the smallest dtype, with zeros for padding, and the mask.

    Raises:
        ValueError: if the layout is unknown, if ``fill`` or ``live_routing`` is given without the other, if the source
            cannot be read, if its axes do not fit, if nothing says where a sample's rows start, if the recording
            contradicts ``start``, if a real token has no route, or if a route is not K different logical experts. The
            message is one line with the layout and, where they apply, the sample, the token (position in T) and the
            layer (of the model).

    >>> rows = np.array([[[0, 1]], [[3, 2]]])  # 2 tokens, 1 layer, top-2
    >>> model = {"num_experts": 4, "top_k": 2, "num_layers": 1}
    >>> mask = np.array([[False, True, True]])
    >>> replay = replay_from_rollout([rows], layout="vllm", mask=mask, **model)
    >>> replay.expert_ids.dtype, replay.expert_ids[0, :, 0].tolist()
    (dtype('uint8'), [[0, 0], [0, 1], [3, 2]])
    >>> replay_from_rollout([rows], layout="vllm", mask=~np.zeros((1, 3), bool), start=0, **model)
    Traceback (most recent call last):
    ValueError: layout 'vllm': sample 0, token 2, layer 0: no route (engines do not route the last token); \
1 of 3 tokens have none; fill='live' fills them by live_routing
    """
    expected = expect(
        mask,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=num_layers,
        moe_layers=moe_layers,
        start=start,
    )
    ids = np.zeros((*expected.mask.shape, len(expected.moe_layers), top_k), id_dtype(num_experts))
    samples = read_rows(source, expected, layout=layout, fill=fill, live_routing=live_routing)
    for sample, rows in enumerate(samples):
        ids[sample, expected.mask[sample]] = rows
    return RoutingReplay(ids, expected.mask)
