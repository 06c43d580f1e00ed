"""Tunix's ``Qwen3`` with balanced layers: it records its routing in the KV cache, and takes experts that are forced."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.models.qwen3 import model as qwen3

from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.integrations.tunix.layer import BalancedMoE, Told, balanced_layer
from relibra_jax.integrations.tunix.rows import layer_of
from relibra_jax.nnx.put_on_mesh import put_on_mesh
from relibra_jax.types import EMPTY, Array

ROUTES = "routed_experts"
"""The KV cache's entry for what the layers routed, ``[B, cache, L, K]``; EMPTY where nothing was fed yet."""


def rank_shardings() -> qwen3.ShardingConfig:
    """Tunix's shardings for a mesh of ranks: activations over them, sample by sample, and weights on all of them.

    Experts are sharded whatever this says.
    """
    everywhere = ()  # rather than a None for each axis, which XLA spells otherwise, and a step is compiled twice
    return qwen3.ShardingConfig(
        emb_vd=everywhere,
        emb_dv=everywhere,
        q_weight_dnh=everywhere,
        kv_weight_dnh=everywhere,
        o_weight_nhd=everywhere,
        ffw_weight_df=everywhere,
        ffw_weight_fd=everywhere,
        rms_norm_weight=everywhere,
        act_btd=(RANKS, None, None),
        act_btf=(RANKS, None, None),
        act_btnh=(RANKS, None, None, None),
        exp_weight_edf=everywhere,
        exp_weight_efd=everywhere,
    )


class BalancedQwen3(qwen3.Qwen3):
    """A Qwen3-MoE of Tunix whose expert layers are `relibra_jax.nnx.MoELayer`.

    Experts are routed live, at home, unless the model was told to `follow` a batch.

    Args:
        model: the model whose parts it takes over, freshly made or loaded by Tunix. Do not use it any more.
        live: how live routing is run, `relibra_jax.nnx.Balancer.live`.

    Raises:
        ValueError: if the model has no experts or another number of them than the topology, its weights are to be
            sharded over axes that the mesh does not have, tokens are split over further axes of the mesh, or its
            ``rope_theta`` is not the one that Tunix computes with.
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
        """Follow a batch's plan from now on: for copies of the model inside a traced step.

        Args:
            rows: what the layers of one micro-batch follow (`relibra_jax.integrations.tunix.rows.ranks_first`).
            parallel: the prepared batch's.
        """
        for index, layer in enumerate(self.layers):
            layer.mlp.follow(layer_of(rows, index, parallel), parallel)

    def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, Any]:
        """Tunix's KV cache, with room for the routing."""
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
        """Tunix's forward pass.

        Args:
            input_tokens: ``[B, T]``, B a multiple of the ranks.
            positions: as of Tunix's model.
            cache: as of Tunix's model; with the entry of `init_cache`, what is routed is written into it.
            attention_mask: as of Tunix's model.
            output_hidden_states: as of Tunix's model.
            segment_ids: as of Tunix's model.
            forced_routed_experts: the experts to use, ``[B, T, L, K]`` integers, as Tunix passes them after its pull
                request 2046. A token with a -1 keeps, in that layer, the plan's experts, or the live router's if the
                model follows no plan.

        Returns:
            The logits, and the new cache.

        Raises:
            ValueError: if the forced experts have another shape, with both.
        """
        expected = (*input_tokens.shape, self.config.num_layers, self.config.num_experts_per_tok)
        if forced_routed_experts is not None and forced_routed_experts.shape != expected:
            raise ValueError(
                f"forced_routed_experts: expected shape {expected}, found {tuple(forced_routed_experts.shape)}"
            )
        layers: list[BalancedMoE] = [layer.mlp for layer in self.layers]
        if forced_routed_experts is not None:
            for index, layer in enumerate(layers):
                layer.forced = Told(jnp.asarray(forced_routed_experts[:, :, index], jnp.int32))
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
    """Raise unless the model can be run on these ranks.

    Args:
        config: Tunix's ``ModelConfig``.
        live: how live routing is run.

    Raises:
        ValueError: as `BalancedQwen3` says, in one line.
    """
    if config.num_experts != live.topology.num_experts:
        raise ValueError(
            f"model of num_experts={config.num_experts}, topology of {live.topology.num_experts} experts"
        )
    if live.copies:
        raise ValueError(
            f"mesh of {dict(live.mesh.shape)}: Tunix's rows are dealt to one expert-parallel group, so give the"
            " balancer a mesh of node and local alone, or data_axes=()"
        )
    theta = inspect.signature(qwen3.apply_rope).parameters["rope_theta"].default
    if config.rope_theta != theta:
        raise ValueError(
            f"rope_theta={config.rope_theta}: Tunix's Qwen3 computes with {theta}, whatever it is"
        )
    fields = inspect.signature(qwen3.ShardingConfig).parameters
    named = set(jax.tree.leaves([getattr(config.shd_config, field) for field in fields]))
    unknown = sorted(named - set(live.mesh.axis_names))
    if unknown:
        raise ValueError(
            f"shd_config names the mesh axes {', '.join(unknown)}, the mesh has {', '.join(live.mesh.axis_names)}:"
            " use rank_shardings()"
        )
