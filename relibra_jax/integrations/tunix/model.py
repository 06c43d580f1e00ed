"""Tunix's ``Qwen3`` with balanced layers: it records its routing in the KV cache, and accepts forced experts."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.models.qwen3 import model as qwen3

from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.integrations.tunix.layer import BalancedMoE, CallVariable, balanced_layer
from relibra_jax.integrations.tunix.rows import layer_of
from relibra_jax.nnx.put_on_mesh import put_on_mesh

ROUTES = "routed_experts"
"""The key of the recorded routing in the KV cache, an array ``[B, cache, L, K]`` with EMPTY where there is no token."""


def rank_shardings() -> qwen3.ShardingConfig:
    """Return Tunix's sharding configuration for a mesh of ranks.

    Activations are sharded by sample over the ranks, and weights are replicated. The experts of `BalancedQwen3` are
    sharded over the ranks regardless of this configuration.
    """
    replicated = ()  # not (None, None, ...), which XLA represents differently, so that a step would compile twice
    return qwen3.ShardingConfig(
        emb_vd=replicated,
        emb_dv=replicated,
        q_weight_dnh=replicated,
        kv_weight_dnh=replicated,
        o_weight_nhd=replicated,
        ffw_weight_df=replicated,
        ffw_weight_fd=replicated,
        rms_norm_weight=replicated,
        act_btd=(RANKS, None, None),
        act_btf=(RANKS, None, None),
        act_btnh=(RANKS, None, None, None),
        exp_weight_edf=replicated,
        exp_weight_efd=replicated,
    )


class BalancedQwen3(qwen3.Qwen3):
    """Tunix's Qwen3-MoE model with `relibra_jax.nnx.MoELayer` as expert layers.

    Unless the model follows a batch (`follow`), it uses live routing, with all experts at their homes only.

    Args:
        model: the model whose parts the new model takes over, newly created or loaded by Tunix. Do not use it
            afterwards.
        live: the mesh, topology, buffer sizes and exchange for live routing, `relibra_jax.nnx.Balancer.live`.

    Raises:
        ValueError: if the model's number of experts differs from the topology's, if its sharding configuration names
            axes that the mesh does not have, if the mesh has several expert-parallel groups, or if its
            ``rope_theta`` is not the value that Tunix uses.
    """

    def __init__(self, model: qwen3.Qwen3, live: ExpertParallel):
        check_model(model.config, live)
        self.config, self.embedder, self.final_norm = model.config, model.embedder, model.final_norm
        self.layers = model.layers
        if not model.config.use_tied_embedding:
            self.lm_head = model.lm_head
        for layer in self.layers:
            layer.mlp = balanced_layer(layer.mlp, model.config, live)
        put_on_mesh(self, None, live.mesh)

    def follow(self, rows: PreparedLayer, parallel: ExpertParallel) -> None:
        """Follow the plan of a batch in all later calls; only for copies of the model inside a traced step.

        Args:
            rows: the prepared layers of one micro-batch, as `relibra_jax.integrations.tunix.rows.ranks_first` returns
                them.
            parallel: the mesh, topology, buffer sizes and exchange of the prepared batch.
        """
        for index, layer in enumerate(self.layers):
            layer.mlp.follow(layer_of(rows, index, parallel), parallel)

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, Any]:
        """Return Tunix's KV cache with an additional entry for the routing."""
        layers, top_k = self.config.num_layers, self.config.num_experts_per_tok
        ids = np.int16 if self.config.num_experts <= np.iinfo(np.int16).max else np.int32
        routes = jnp.full((batch_size, cache_size, layers, top_k), EMPTY, ids)
        return super().init_cache(batch_size, cache_size, dtype) | {ROUTES: routes}

    def __call__(
        self,
        input_tokens: Array,
        positions: Array,
        cache: dict[str, Any] | None,
        attention_mask: Array | None,
        output_hidden_states: bool = False,
        segment_ids: Array | None = None,
        forced_routed_experts: Array | None = None,
    ) -> tuple[jax.Array, dict[str, Any] | None]:
        """Run Tunix's forward pass.

        Args:
            input_tokens: the tokens, ``[B, T]``, with B a multiple of the number of ranks.
            positions: the positions of the tokens, as for Tunix's model.
            cache: the KV cache, as for Tunix's model. If it comes from `init_cache`, the routing is written into it.
            attention_mask: the attention mask, as for Tunix's model.
            output_hidden_states: whether to output hidden states, as for Tunix's model.
            segment_ids: the segment ids, as for Tunix's model.
            forced_routed_experts: the experts to use, integers ``[B, T, L, K]``, as Tunix passes them since its pull
                request 2046. If a token has a -1 in a layer, it uses the experts of the plan there, or those of the
                live router if the model follows no plan.

        Returns:
            The logits, and the new cache.

        Raises:
            ValueError: if the forced experts do not have the expected shape.
        """
        expected = (*input_tokens.shape, self.config.num_layers, self.config.num_experts_per_tok)
        if forced_routed_experts is not None and forced_routed_experts.shape != expected:
            raise ValueError(
                f"forced_routed_experts: expected shape {expected}, found {tuple(forced_routed_experts.shape)}"
            )
        layers: list[BalancedMoE] = [layer.mlp for layer in self.layers]
        if forced_routed_experts is not None:
            for index, layer in enumerate(layers):
                layer.forced = CallVariable(jnp.asarray(forced_routed_experts[:, :, index], jnp.int32))
        logits, new_cache = super().__call__(
            input_tokens, positions, cache, attention_mask, output_hidden_states, segment_ids
        )
        used = jnp.stack([layer.used.get_value() for layer in layers if layer.used is not None], axis=2)
        for layer in layers:
            layer.forced = layer.used = None
        if cache is not None and new_cache is not None and ROUTES in cache:
            place = cache["layer_0"]["end_index"][0]
            new_cache[ROUTES] = jax.lax.dynamic_update_slice(
                cache[ROUTES], used.astype(cache[ROUTES].dtype), (0, place, 0, 0)
            )
        return logits, new_cache


def check_model(config: Any, live: ExpertParallel) -> None:
    """Check that a model can run on the ranks of a mesh.

    Args:
        config: Tunix's ``ModelConfig``.
        live: the mesh, topology, buffer sizes and exchange for live routing.

    Raises:
        ValueError: under the conditions of `BalancedQwen3`.
    """
    if config.num_experts != live.topology.num_experts:
        raise ValueError(
            f"the model has num_experts={config.num_experts}, but the topology has {live.topology.num_experts}"
        )
    if live.data_shape:
        raise ValueError(
            f"mesh {dict(live.mesh.shape)}: Tunix distributes sequences over one expert-parallel group, so give"
            " the balancer a mesh of only node and local, or data_axes=()"
        )
    theta = inspect.signature(qwen3.apply_rope).parameters["rope_theta"].default
    if config.rope_theta != theta:
        raise ValueError(
            f"rope_theta={config.rope_theta} must be {theta}: Tunix's Qwen3 uses {theta} regardless of the setting"
        )
    fields = inspect.signature(qwen3.ShardingConfig).parameters
    axes = set(jax.tree.leaves([getattr(config.shd_config, field) for field in fields]))
    unknown = sorted(axes - set(live.mesh.axis_names))
    if unknown:
        raise ValueError(
            f"shd_config names the mesh axes {', '.join(unknown)}, but the mesh has"
            f" {', '.join(live.mesh.axis_names)}: use rank_shardings()"
        )
