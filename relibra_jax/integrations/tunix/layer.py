"""The layer that replaces Tunix's ``MoELayer``.

Tunix's decoder layer calls ``self.mlp(x)``, with tokens only. The other inputs of a call (the plan of the batch, forced
experts) are therefore set as attributes of the layer inside the traced function that calls it. The experts that the
call used are read from an attribute afterwards.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.execution.gating import GATINGS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.nnx import MoELayer


class CallVariable(nnx.Variable):
    """An additional input or output of one call of a layer, besides tokens and output. Never trained, never saved."""


class BalancedMoE(nnx.Module):
    """A `relibra_jax.nnx.MoELayer` with the interface of the layer in Tunix's ``Qwen3``: ``[B, T, D] -> [B, T, D]``.

    Args:
        moe: the layer.
        live: the mesh, topology, buffer sizes and exchange for live routing, `relibra_jax.nnx.Balancer.live`.
    """

    def __init__(self, moe: MoELayer, live: ExpertParallel):
        self.moe, self.parallel = moe, live
        self.prepared: CallVariable | None = nnx.data(None)
        self.forced: CallVariable | None = nnx.data(None)
        self.used: CallVariable | None = nnx.data(None)

    def follow(self, layer: PreparedLayer, parallel: ExpertParallel) -> None:
        """Follow a plan in all later calls; only for copies of a model inside a traced step.

        Args:
            layer: the prepared layer, with the recorded experts.
            parallel: the mesh, topology, buffer sizes and exchange of the prepared batch.
        """
        self.prepared, self.parallel = CallVariable(layer), parallel

    def __call__(self, x: Array) -> jax.Array:
        """Run the layer on ``x[B, T, D]``, with its plan or, if it has none, with live routing."""
        prepared = None if self.prepared is None else self.prepared.get_value()
        out = self.moe(x, self._experts(x, prepared), prepared, parallel=self.parallel)
        self.used = CallVariable(out.expert_ids)
        return jnp.asarray(out.output)

    def _experts(self, x: Array, prepared: PreparedLayer | None) -> Array | None:
        """Return the experts of all tokens, ``[B, T, K]``; None lets the router choose them."""
        if self.forced is None and prepared is None:
            return None
        if prepared is None:
            expert_ids = jnp.asarray(self.moe.route(x)[0], jnp.int32)
        else:
            assert prepared.token_tables is not None
            expert_ids = prepared.token_tables.expert_ids.reshape(*x.shape[:-1], -1).astype(jnp.int32)
        if self.forced is None:
            return expert_ids
        forced = self.forced.get_value()
        return jnp.where((forced == EMPTY).any(-1, keepdims=True), expert_ids, forced)


def balanced_layer(mlp: Any, config: Any, live: ExpertParallel) -> BalancedMoE:
    """Return a balanced layer with the weights of a Tunix layer; the experts' homes are in the order of their ids.

    Args:
        mlp: Tunix's ``MoELayer``.
        config: Tunix's ``ModelConfig``.
        live: the mesh, topology, buffer sizes and exchange for live routing.
    """
    topology, mesh = live.topology, live.mesh
    gating = dataclasses.replace(GATINGS["qwen3-moe"], top_k=config.num_experts_per_tok)
    options = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    moe = nnx.eval_shape(
        lambda: MoELayer(topology, config.embed_dim, config.hidden_dim, gating, rngs=nnx.Rngs(0), **options)
    )
    up, gate, down = (weights[...] for weights in (mlp.up_proj, mlp.gate_proj, mlp.down_proj))
    weights = jnp.stack([gate, up, jnp.swapaxes(down, 1, 2)], axis=1)  # [E 3 D F]
    shape = (*live.ranks, topology.home_slots, *weights.shape[1:])
    moe.experts.set_value(jax.device_put(weights.reshape(shape), jax.NamedSharding(mesh, live.rank_spec)))
    replicated = jax.NamedSharding(mesh, jax.P())
    moe.router.set_value(jax.device_put(mlp.router.kernel[...], replicated))
    moe.home.set_value(jax.device_put(jnp.arange(topology.num_experts, dtype=jnp.int32), replicated))
    return BalancedMoE(moe, live)
