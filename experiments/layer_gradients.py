"""One MoE layer as programs measure it: its replicas are fetched, and it runs forward and backward."""

import functools
from typing import Any

import jax

from relibra_jax.contract.types import Array
from relibra_jax.execution import ExpertParallel, fetch_replicas, moe_layer


def layer_output(x: Array, gates: Array, experts: Array, *, ids: Array, layer: Any, parallel: ExpertParallel):
    """Fetch the layer's replicas, and return the output of `moe_layer`."""
    slots, x = fetch_replicas(experts, layer, x, parallel)
    return moe_layer(x, ids, gates, slots, layer, parallel).output


def layer_gradients(
    x: Array, gates: Array, experts: Array, *, ids: Array, layer: Any, parallel: ExpertParallel
):
    """Return the output, and the gradients of ``x``, ``gates`` and ``experts`` for the output as its cotangent.

    Args:
        x: the tokens, ``[ranks, t, D]``.
        gates: the weights of the experts, ``[ranks, t, K]``.
        experts: the home experts, ``[N, G, H, 3, D, F]``.
        ids: the expert ids, ``[ranks, t, K]``, with EMPTY for padding.
        layer: the prepared layer.
        parallel: the mesh, topology, buffer sizes and kinds of exchange.
    """
    call = functools.partial(layer_output, ids=ids, layer=layer, parallel=parallel)
    out, pull = jax.vjp(call, x, gates, experts)
    return out, *pull(out)
