"""A mixture-of-experts language model in Flax nnx whose experts are `relibra_jax.nnx.MoELayer`.

Layers (`relibra_jax.models.blocks`) are stacked along a leading axis and run by `relibra_jax.models.layer_scan`, whose
backward pass computes each layer again and fetches its replicas again. Dense layers, if there are any, form a separate
stack before the layers with experts.

Arrays are ``[B, T, ...]`` as in any Flax model, and sharded over the ranks along the first axis. Samples are aligned to
the left and followed by padding, so attention needs only the causal mask.

A model run ends at the hidden states, because the logits of all tokens would be its largest array.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Bool, Float, Int, Integer

from relibra_jax.contract.types import Array, LayerPlan, Topology, check_shape
from relibra_jax.execution.mesh import varying_axes
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.models.blocks import Block, DenseBlock
from relibra_jax.models.cache import Cache, LayerCache, empty_cache
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.layer_scan import has_total, scan_layers
from relibra_jax.nnx import SequencePacking
from relibra_jax.nnx.dense_sharding import (
    STACKS,
    axes_of_dense,
    dense_spec_of,
    gather_dense,
    gather_on_rank,
    mark_compute_dtype,
    mark_dense,
)
from relibra_jax.support.argument_types import checks_arguments


class ModelOutput(NamedTuple):
    """The outputs of the model for every token; the values at padding are meaningless."""

    expert_ids: Integer[Array, "B T L K"]
    """The routing that the layers ran: the given replay, or the live routing in the dtype of a `RoutingReplay`."""
    router_logits: Float[Array, "B T L E"]
    """The float32 logits of the live routers, for `relibra_jax.execution.gating.balance_loss` and for counting the
    tokens whose live routing differs from the replay."""
    slot_rows: Int[Array, "L *data N G S"]
    """The number of rows that each slot computed."""
    hidden: Float[Array, "B T D"]
    """The final hidden states, in the dtype of the computation: the input of the output head
    (`relibra_jax.models.token_log_probs`, `LanguageModel.logits`) and of a critic's head."""


class LanguageModel(nnx.Module):
    """A mixture-of-experts language model.

    `make_model` creates a new one on a mesh, and `relibra_jax.models.load_pretrained` loads a trained one.

    Args:
        config: the sizes and architecture options.
        topology: the expert-parallel group.
        fsdp_axis: the mesh axis over which every expert is sharded too. None if there is none.
        dense_axes: the mesh axes over which dense parameters are sharded, with their sizes
            (`relibra_jax.nnx.dense_sharding`). None keeps them on every rank.
        rngs: the random keys with which the parameters are initialised.

    Raises:
        ValueError: if config and topology have different numbers of experts, or a token has more experts than exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        *,
        fsdp_axis: str | None = None,
        dense_axes: Mapping[str, int] | None = None,
        rngs: nnx.Rngs,
    ):
        if topology.num_experts != config.num_experts:
            raise ValueError(
                f"the config has {config.num_experts} experts, but the topology has {topology.num_experts}"
            )
        self.config = config
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        init = functools.partial(nnx.initializers.normal(0.02), dtype=param_dtype)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocabulary, config.width)))
        dense = nnx.vmap(lambda rngs: DenseBlock(config, rngs=rngs))
        self.dense = dense(rngs.split(config.dense_layers)) if config.dense_layers else None
        block = nnx.vmap(lambda rngs: Block(config, topology, fsdp_axis=fsdp_axis, rngs=rngs))
        self.layers = block(rngs.split(config.moe_layers))
        head = None if config.tied else init(rngs.params(), (config.width, config.vocabulary))
        self.head = None if head is None else nnx.Param(head)
        self.norm = nnx.RMSNorm(
            config.width, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        if dense_axes is not None:
            mark_dense(self, dense_axes, dtype)
        for path, module in nnx.iter_modules(self):
            for variable in vars(module).values() if set(path) & set(STACKS) else ():
                if isinstance(variable, nnx.Param):
                    variable.set_metadata(adds_gradients=True)
        if dense_axes is None:
            mark_compute_dtype(self, dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        expert_ids: Integer[Array, "B T L K"] | None = None,
        layers: PreparedLayer | LayerPlan | None = None,
        *,
        parallel: ExpertParallel,
        packing: SequencePacking | None = None,
    ) -> ModelOutput:
        """Run whole sequences with recorded or live routing.

        Args:
            tokens: the token ids of the samples, aligned to the left.
            mask: True on real tokens, which precede the padding. Experts do not compute padding.
            expert_ids: the recorded routing of the layers with experts; rows of padding are not read. None routes live.
            layers: the prepared tables of all layers with experts, stacked ``[L]``, as `relibra_jax.nnx.PreparedBatch`
                has them for a micro-batch, or the layers' plans. For live routing the plans must not contain a load,
                because they were made for another one. None uses the home slots alone.
            parallel: the mesh, topology, buffer sizes and kinds of exchange; `relibra_jax.nnx.Balancer.live` has those
                for live routing.
            packing: the sample and position of each token, for sequences that hold several samples. None for one
                sample per sequence.

        Returns:
            The outputs. They are NaN under the conditions that `MoELayer` documents.

        Raises:
            ValueError: while tracing, if the shapes of the arguments are inconsistent.
        """
        return self._run(tokens, mask, expert_ids, layers, None, parallel, packing)[0]

    def logits(self, hidden: Float[Array, "*tokens D"]) -> Float[jax.Array, "*tokens V"]:
        """Compute the logits of the token after each given one, for a few tokens: V numbers for each.

        `relibra_jax.models.token_log_probs` computes the log-probabilities of many tokens in chunks.

        Args:
            hidden: the final hidden states of the tokens, from `ModelOutput`.

        Returns:
            The logits, float32.
        """
        return head_logits(hidden, self.embedding[...].T if self.head is None else self.head[...])

    def extend(
        self,
        tokens: Int[Array, "B t"],
        mask: Bool[Array, "B t"],
        cache: Cache,
        *,
        parallel: ExpertParallel,
    ) -> tuple[ModelOutput, Cache]:
        """Run the next tokens of sequences whose earlier tokens are in ``cache``; live routing, no replicas.

        Args:
            tokens: the next t token ids of every sample.
            mask: True on real tokens, which precede the padding; a sample may have none. They directly follow the
                sample's real tokens in the cache.
            cache: the cache that `empty_cache` or an earlier call returned, with room for t more columns. If the caller
                does not use it afterwards, as in a loop, its arrays are written in place.
            parallel: the mesh, topology and kinds of exchange for live routing.

        Returns:
            The outputs for the new tokens, as if whole sequences had run, and the cache that includes the new tokens.

        Raises:
            ValueError: while tracing, if the whole cache has fewer than t columns.
        """
        output, extended = self._run(tokens, mask, None, None, cache, parallel)
        assert extended is not None
        return output, extended

    def empty_cache(self, samples: int, room: int, parallel: ExpertParallel) -> Cache:
        """Allocate a cache of ``room`` columns: one for every token of a sample, including padding.

        Args:
            samples: the number of samples.
            room: the number of columns.
            parallel: the mesh over whose ranks the samples are sharded.
        """
        return empty_cache(self.config, samples, room, parallel)

    def _embed(self, tokens, parallel: ExpertParallel):
        """Look up the embeddings of each rank's tokens there, so that only the summed gradient is exchanged."""
        spec = dense_spec_of(self.embedding, parallel.mesh)

        @functools.partial(
            jax.shard_map,
            mesh=parallel.mesh,
            in_specs=(spec, parallel.token_spec),
            out_specs=parallel.token_spec,
        )
        def look_up(embedding, tokens):
            axes = varying_axes(tokens)
            return gather_on_rank(embedding, spec, self.config.dtype, token_axes=axes)[tokens]

        return look_up(self.embedding[...], tokens)

    def _run(
        self, tokens, mask, expert_ids, layers, cache, parallel, packing=None
    ) -> tuple[ModelOutput, Cache | None]:
        config = self.config
        if expert_ids is not None:
            check_shape("expert_ids", expert_ids.shape, (*tokens.shape, config.moe_layers, config.top_k))
            expert_ids = jnp.moveaxis(jnp.asarray(expert_ids), -2, 0)
        for path, leaf in jax.tree.leaves_with_path(layers, is_leaf=has_total):
            leaf = leaf.value if has_total(leaf) else leaf
            check_shape(
                f"layers{jax.tree_util.keystr(path)}", leaf.shape, (config.moe_layers, *leaf.shape[1:])
            )
        segments = None
        if packing is not None:
            segments, positions = packing
            check_shape("packing", segments.shape, tokens.shape)
        elif cache is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        else:
            positions, cache = cache.add_columns(mask)
        check_tokens("tokens", tokens, parallel)
        x = self._embed(tokens, parallel)

        def dense(block, x, cache, window):
            return *block(x, positions, segments, cache, window, parallel=parallel), None

        def moe(block, x, cache, expert_ids, layer, window):
            x, cache, moe = block(
                *(x, mask, positions, segments, cache, expert_ids, layer, window), parallel=parallel
            )
            return x, cache, (moe.expert_ids, moe.router_logits, moe.slot_rows)

        scan = functools.partial(_scan, mesh=parallel.mesh, memory=config.activation_memory)
        windows = _windows(config)
        of_dense, of_moe = (None, None) if windows is None else jnp.split(windows, [config.dense_layers])
        if self.dense is not None:
            x, cache, _ = scan(dense, self.dense, 0, x, cache, of_dense)
        x, cache, routed = scan(moe, self.layers, config.dense_layers, x, cache, expert_ids, layers, of_moe)
        ids, router_logits, slot_rows = routed
        ids, router_logits = (jnp.moveaxis(each, 0, -2) for each in (ids, router_logits))
        return ModelOutput(ids, router_logits, slot_rows, self.norm(x)), cache


def _windows(config: ModelConfig) -> Int[jax.Array, " layers"] | None:
    """Return the window of each layer: for all tokens, more than there can be. None if no layer has one."""
    if not config.windows:
        return None
    return jnp.array([window or np.iinfo(np.int32).max for window in config.windows], jnp.int32)


def head_logits(
    hidden: Float[Array, "*tokens D"], head: Float[jax.Array, "D V"]
) -> Float[jax.Array, "*tokens V"]:
    """Compute float32 logits from hidden states and an output head, which is cast to the dtype of the computation."""
    return jnp.dot(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


@checks_arguments
def make_model(
    config: ModelConfig,
    topology: Topology,
    *,
    mesh: Mesh,
    key: jax.Array,
    fsdp_axis: str | None = None,
    shard_dense: bool = False,
) -> LanguageModel:
    """Create a new model with its parameters on ``mesh``; a key gives the same weights on every topology.

    Args:
        config: the sizes and architecture options.
        topology: the expert-parallel group.
        mesh: the device mesh, from `relibra_jax.execution.mesh.expert_mesh`.
        key: the random key with which the parameters are initialised.
        fsdp_axis: the mesh axis over which every expert is sharded too. None if there is none.
        shard_dense: whether dense parameters are sharded over the ranks of a group and the FSDP axis
            (`relibra_jax.nnx.dense_sharding`). Otherwise every rank has them.

    Raises:
        ValueError: if `LanguageModel` rejects the config and topology.
    """
    make = model_maker(config, topology, mesh, fsdp_axis=fsdp_axis, shard_dense=shard_dense)
    graph, _, shardings = abstract_model(make, mesh)
    init = jax.jit(lambda key: nnx.state(make(nnx.Rngs(key))), out_shardings=shardings)
    return nnx.merge(graph, init(key))


def model_maker(
    config: ModelConfig,
    topology: Topology,
    mesh: Mesh | AbstractMesh,
    *,
    fsdp_axis: str | None,
    shard_dense: bool,
) -> Callable[[nnx.Rngs], LanguageModel]:
    """Return a function of the random keys that makes a model for a mesh; its arguments are those of `make_model`."""
    axes = axes_of_dense(mesh, fsdp_axis) if shard_dense else None

    def make(rngs: nnx.Rngs) -> LanguageModel:
        return LanguageModel(config, topology, fsdp_axis=fsdp_axis, dense_axes=axes, rngs=rngs)

    return make


def abstract_model(
    make: Callable[[nnx.Rngs], LanguageModel], mesh: Mesh | AbstractMesh
) -> tuple[Any, Any, Any]:
    """Return a model without its arrays: its graph, and the shapes and shardings of its state.

    Args:
        make: a function that makes the model, from `model_maker`.
        mesh: the device mesh, or its axes without devices.

    Raises:
        ValueError: if `LanguageModel` rejects the config and topology.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(shapes))
    return graph, shapes, shardings


def _scan(run, blocks, first, x, cache, *inputs, mesh, memory):
    """Run stacked blocks one after another; the first one is layer ``first`` of the cache.

    Sharded dense parameters are gathered block by block. Without a cache, inputs of blocks wait in ``memory`` for the
    backward pass.

    Returns:
        ``x`` and the cache, which the loop carries and therefore never copies, and the other outputs of the blocks,
        stacked.
    """
    graph, state = nnx.split(blocks)

    def layer(x, cache, state, *rest):
        return run(nnx.merge(graph, gather_dense(state, mesh)), x, cache, *rest)

    def trained_layer(x, layer_inputs):
        x, _, output = layer(x, None, *layer_inputs)
        return x, output

    def cached_layer(carry, layer_inputs):
        x, cache = carry
        number, *rest = layer_inputs
        x, layer_cache, output = layer(x, LayerCache(cache, number), *rest)
        return (x, layer_cache.cache), output

    if cache is None:
        x, outputs = scan_layers(trained_layer, x, (state, *inputs), memory=memory)
        return x, None, outputs
    numbers = first + jnp.arange(len(jax.tree.leaves(state)[0]))
    (x, cache), outputs = jax.lax.scan(cached_layer, (x, cache), (numbers, state, *inputs))
    return x, cache, outputs
