"""From what an engine recorded to a complete `RoutingReplay`, or to an error that says where it is not one.

Real systems have fallen into every one of these: the last token has no route; dense layers may have rows;
ids may be slots of a balanced engine; zero padding looks like an overload of expert 0; prefix-cached tokens
may be zeros; pipeline stages may not be merged; uint8 may have wrapped; an expert may come twice; left
padding shifts rows; an engine that was asked to skip tokens does not say so. So the caller names the layout,
the mask and where rows start, rows go to the mask's real tokens in order, and nothing is repaired: what is
missing is an error, or filled by a live forward pass of the caller's where the caller asks for it, and said.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.replay import id_dtype
from relibra_jax.rollout.expected import expect
from relibra_jax.rollout.rows import read_rows
from relibra_jax.types import Array, RoutingReplay


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
    """Read the routed experts of a batch.

    Args:
        source: what the layout takes, see `relibra_jax.rollout.layouts`.
        layout: a name in `LAYOUTS`.
        mask: ``[B, T]``, True where training has a real token. Recorded rows belong to these, in order,
            wherever they stand. Where a layout gives a sample's rows without their positions, the mask may leave
            out no token of the engine's sequence but the last.
        num_experts: E, logical experts of a layer.
        top_k: K, experts of a token; their order is kept.
        num_layers: hidden layers of the model, dense ones included.
        moe_layers: which of them have experts, ascending; all by default. A recording with rows of all
            layers is cut down to these; one with rows of the MoE layers alone is taken as it is.
        start: the token of a sample's first row, one integer for all samples or one for each, counted in the
            mask's real tokens: how many of them the engine was asked to skip (vLLM's
            ``routed_experts_prompt_start`` and SGLang's ``routed_experts_start_len``, which their answers do
            not repeat). Tokens before it have no route. It must be given, be it 0, for a sample with fewer rows
            than real tokens, unless the recording says where they start: a skipped first token leaves as many
            rows as a last token that was not routed.
        fill: what is done for real tokens without a route. None refuses them. "live" takes their routes from
            ``live_routing``, as engines do that fall back to the live router, and says for how many tokens of how
            many samples: a warning of the logger ``relibra_jax``.
        live_routing: with ``fill="live"`` alone, ``missing -> expert_ids``: a bool ``[B, T]`` of the tokens without a
            route to integer ``[B, T, L, K]``, read only where a route is missing. Called only if one is.

    Returns:
        expert_ids ``[B, T, L, K]`` in the smallest dtype, zeros at padding; L the MoE layers; and the mask.

    Raises:
        ValueError: if there is no such layout, ``fill`` or ``live_routing`` is given without the other, the source
            cannot be read, axes do not fit, nothing says where a sample's rows start, the recording says otherwise
            than ``start``, a real token has no route, or a row is not K different logical experts: one line with the
            layout and, where they apply, sample, token (position in T) and layer (of the model).

    >>> rows = np.array([[[0, 1]], [[3, 2]]])  # 2 tokens, 1 layer, top-2
    >>> model = {"num_experts": 4, "top_k": 2, "num_layers": 1}
    >>> mask = np.array([[False, True, True]])
    >>> replay = replay_from_rollout([rows], layout="vllm", mask=mask, **model)
    >>> replay.expert_ids.dtype, replay.expert_ids[0, :, 0].tolist()
    (dtype('uint8'), [[0, 0], [0, 1], [3, 2]])
    >>> replay_from_rollout([rows], layout="vllm", mask=~np.zeros((1, 3), bool), start=0, **model)
    Traceback (most recent call last):
    ValueError: layout 'vllm': sample 0, token 2, layer 0: no route (engines do not route the last token), \
as for 1 of 3 tokens; fill='live' has live_routing fill them
    """
    expected = expect(
        mask,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=num_layers,
        moe_layers=moe_layers,
        start=start,
    )
    rows = read_rows(source, expected, layout=layout, fill=fill, live_routing=live_routing)
    ids = np.zeros((*expected.mask.shape, *rows.shape[1:]), id_dtype(num_experts))
    ids[expected.mask] = rows
    return RoutingReplay(ids, expected.mask)
