"""The policy: Qwen3-MoE's architecture (arXiv:2505.09388) in Flax nnx, its mixtures of experts on `MoELayer`.

Layers (`experiments.rl.transformer`) are stacked along a leading axis and run by `jax.lax.scan`, each under
`jax.checkpoint`: what a layer computes is computed again in the backward pass, and its replicas are fetched again.

Arrays are those of any Flax model, ``[B, T, ...]``, sharded over the ranks along the first axis. Samples are aligned
to the left, padding behind their last token, so attention needs no mask but the causal one.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.transformer import Block, PolicyConfig
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.types import Array, LayerPlan, Topology, check_shape

POLICIES: Final[Mapping[str, PolicyConfig]] = MappingProxyType(
    {
        "tiny": PolicyConfig(),
        "small": PolicyConfig(
            width=128, layers=6, heads=8, kv_heads=4, num_experts=32, top_k=4, expert_width=96
        ),
    }
)
"""The policies that have names, of sizes for CPUs."""


class Cache(NamedTuple):
    """Keys and values of the tokens that the model has seen, by position; C positions of room."""

    keys: Float[Array, "L B C heads width"]
    values: Float[Array, "L B C heads width"]


class PolicyOutput(NamedTuple):
    """What the model says about every token. Padding has values too, which mean nothing."""

    logits: Float[Array, "B T V"]
    """The float32 logits of the token after this one."""
    expert_ids: Integer[Array, "B T L K"]
    """The routing that ran: in the dtype of a `RoutingReplay` if live, else what was given."""
    router_logits: Float[Array, "B T L E"]
    """The float32 logits of the live routers, for `relibra_jax.execution.gating.balance_loss` and for counting where
    they differ from a replay."""
    slot_rows: Int[Array, "L *copies N G S"]
    """Rows that each slot computed."""


class Policy(nnx.Module):
    """The language model; `make_policy` makes one on a mesh.

    Args:
        config: the sizes.
        topology: the expert-parallel group.
        rngs: the random keys of the parameters.

    Raises:
        ValueError: if config and topology have different numbers of experts, or a token more experts than there are.
    """

    def __init__(self, config: PolicyConfig, topology: Topology, *, rngs: nnx.Rngs):
        if topology.num_experts != config.num_experts:
            raise ValueError(f"policy of {config.num_experts} experts, topology of {topology.num_experts}")
        self.config = config
        dtype, init = jnp.dtype(config.dtype), nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocabulary, config.width)))
        self.layers = nnx.vmap(lambda rngs: Block(config, topology, rngs=rngs))(rngs.split(config.layers))
        head = None if config.tied else init(rngs.params(), (config.width, config.vocabulary))
        self.head = None if head is None else nnx.Param(head)
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        expert_ids: Integer[Array, "B T L K"] | None = None,
        layers: PreparedLayer | LayerPlan | None = None,
        *,
        parallel: ExpertParallel,
    ) -> PolicyOutput:
        """Run whole sequences, in replay of recorded routing or live.

        Args:
            tokens: the samples, aligned to the left.
            mask: True on real tokens, which come first. No expert computes the others.
            expert_ids: the recorded routing; rows of padding are not read. None routes live.
            layers: what all layers follow, stacked ``[L]``, as `relibra_jax.nnx.PreparedBatch` has it for a
                micro-batch; or their plans, without load for live routing under plans that were made for something
                else. None for homes alone.
            parallel: mesh, topology, sizes and ways; `relibra_jax.nnx.Balancer.live` for live routing.

        Returns:
            See `PolicyOutput`. NaN where `MoELayer` says so.

        Raises:
            ValueError: while tracing, if shapes do not belong together.
        """
        return self._run(tokens, mask, expert_ids, layers, None, None, parallel)[0]

    def extend(
        self,
        tokens: Int[Array, "B t"],
        mask: Bool[Array, "B t"],
        cache: Cache,
        start: Int[Array, " B"],
        *,
        parallel: ExpertParallel,
    ) -> tuple[PolicyOutput, Cache]:
        """Run the next tokens of sequences whose earlier ones are in ``cache``: live, under homes alone.

        Args:
            tokens: the next t tokens of every sample.
            mask: True on real tokens, which come first.
            cache: what `empty_cache` or an earlier call returned.
            start: the position of each sample's first new token; its tokens before that are in the cache.
            parallel: mesh and ways of live routing.

        Returns:
            What the model says about the new tokens, as if whole sequences had run; and the cache with them. Entries
            at ``start + t`` and beyond are left alone, what padding has written is overwritten by what comes there.
        """
        return self._run(tokens, mask, None, None, cache, start, parallel)

    def empty_cache(self, samples: int, room: int, parallel: ExpertParallel) -> Cache:
        """A cache for samples of at most ``room`` tokens each."""
        config = self.config
        shape = (config.layers, samples, room, config.kv_heads, config.head_width)
        sharding = NamedSharding(parallel.mesh, PartitionSpec(None, *parallel.token_spec))
        zeros = jax.lax.with_sharding_constraint(jnp.zeros(shape, jnp.dtype(config.dtype)), sharding)
        return Cache(zeros, zeros)

    def _run(self, tokens, mask, expert_ids, layers, cache, start, parallel):
        config = self.config
        if expert_ids is not None:
            check_shape("expert_ids", expert_ids.shape, (*tokens.shape, config.layers, config.top_k))
            expert_ids = jnp.moveaxis(jnp.asarray(expert_ids), -2, 0)
        for path, leaf in jax.tree.leaves_with_path(layers):
            check_shape(f"layers{jax.tree_util.keystr(path)}", leaf.shape, (config.layers, *leaf.shape[1:]))
        start = jnp.zeros(len(tokens), jnp.int32) if start is None else start
        x = self.embedding[...].astype(config.dtype)[tokens]
        x = jax.lax.with_sharding_constraint(x, parallel.token_sharding)
        graph, state = nnx.split(self.layers)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def layer(x, of_layer):
            state, *rest = of_layer
            x, cache, moe = nnx.merge(graph, state)(x, mask, start, *rest, parallel=parallel)
            return x, (cache, moe.expert_ids, moe.router_logits, moe.slot_rows)

        of_layers = (state, None if cache is None else tuple(cache), expert_ids, layers)
        x, (cache, ids, router_logits, slot_rows) = jax.lax.scan(layer, x, of_layers)
        head = self.embedding[...].T if self.head is None else self.head[...]
        logits = jnp.dot(self.norm(x), head.astype(x.dtype), preferred_element_type=jnp.float32)
        ids, router_logits = (jnp.moveaxis(each, 0, -2) for each in (ids, router_logits))
        output = PolicyOutput(logits, ids, router_logits, slot_rows)
        return output, None if cache is None else Cache(*cache)


def make_policy(config: PolicyConfig, topology: Topology, *, mesh: Mesh, key: jax.Array) -> Policy:
    """A new policy whose parameters lie on ``mesh`` from birth; the same weights on every topology.

    Args:
        config: the sizes.
        topology: the expert-parallel group.
        mesh: the device mesh, from `relibra_jax.execution.mesh.expert_mesh`.
        key: the random key of the parameters.

    Raises:
        ValueError: as `Policy` says.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Policy(config, topology, rngs=nnx.Rngs(0))))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(shapes))
    init = jax.jit(
        lambda key: nnx.state(Policy(config, topology, rngs=nnx.Rngs(key))), out_shardings=shardings
    )
    return nnx.merge(graph, init(key))


def token_log_probs(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], *, temperature: float = 1.0
) -> Float[jax.Array, "B T"]:
    """The log-probability of every token given those before it.

    Args:
        logits: the logits of `PolicyOutput`.
        tokens: the tokens that the model was run on.
        temperature: what divides the logits, above 0.

    Returns:
        float32; entry t is of token t, so it comes from the logits of token t - 1. 0 for the first.
    """
    log_probs = jax.nn.log_softmax(logits[:, :-1] / temperature)
    of_next = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(of_next, [(0, 0), (1, 0)])
