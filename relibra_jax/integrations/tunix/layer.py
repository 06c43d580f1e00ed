"""The layer that takes the place of Tunix's ``MoELayer``: called with tokens alone, told all else beforehand.

Tunix's decoder layer calls ``self.mlp(x)``. What else a call needs (the batch's plan, experts that are forced) is set
on the layer inside the traced function that calls it, and the experts that it used are read from there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from relibra_jax.execution.gating import GATINGS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.nnx import MoELayer
from relibra_jax.types import EMPTY, Array


class Told(nnx.Variable):
    """What a layer is told beside its tokens, and tells beside its output, in one call. Never trained, never saved."""


class BalancedMoE(nnx.Module):
    """`relibra_jax.nnx.MoELayer` where Tunix's ``Qwen3`` has its own: ``[B, T, D] -> [B, T, D]``.

    Args:
        moe: the layer.
        live: how live routing is run, `relibra_jax.nnx.Balancer.live`.
    """

    def __init__(self, moe: MoELayer, live: ExpertParallel):
        self.moe, self.parallel = moe, live
        self.prepared: Told | None = nnx.data(None)
        self.forced: Told | None = nnx.data(None)
        self.used: Told | None = nnx.data(None)

    def follow(self, layer: PreparedLayer, parallel: ExpertParallel) -> None:
        """Follow a plan from now on: for copies of a model inside a traced step.

        Args:
            layer: what this layer follows, prepared from the recorded experts.
            parallel: the prepared batch's.
        """
        self.prepared, self.parallel = Told(layer), parallel

    def __call__(self, x: Array) -> jax.Array:
        """Run the layer on ``x[B, T, D]``, under the plan that it follows or on live routing."""
        prepared = None if self.prepared is None else self.prepared.get_value()
        out = self.moe(x, self._experts(x, prepared), prepared, parallel=self.parallel)
        self.used = Told(out.expert_ids)
        return jnp.asarray(out.output)

    def _experts(self, x: Array, prepared: PreparedLayer | None) -> Array | None:
        """The experts of all tokens, ``[B, T, K]``; None for the live router's."""
        if self.forced is None and prepared is None:
            return None
        if prepared is None:
            own = jnp.asarray(self.moe.route(x)[0], jnp.int32)
        else:
            assert prepared.tokens is not None
            own = prepared.tokens.expert_ids.reshape(*x.shape[:-1], -1).astype(jnp.int32)
        if self.forced is None:
            return own
        forced = self.forced.get_value()
        return jnp.where((forced == EMPTY).any(-1, keepdims=True), own, forced)


def balanced_layer(mlp: Any, config: Any, live: ExpertParallel) -> BalancedMoE:
    """The balanced layer with the weights of Tunix's, experts at home in order of their ids.

    Args:
        mlp: Tunix's ``MoELayer``.
        config: its ``ModelConfig``.
        live: how live routing is run.
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
    everywhere = jax.NamedSharding(mesh, jax.P())
    moe.router.set_value(jax.device_put(mlp.router.kernel[...], everywhere))
    moe.home.set_value(jax.device_put(jnp.arange(topology.num_experts, dtype=jnp.int32), everywhere))
    return BalancedMoE(moe, live)
