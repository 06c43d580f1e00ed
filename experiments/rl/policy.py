"""The policy: Qwen3-MoE's architecture (arXiv:2505.09388) in Flax nnx, its mixtures of experts on `MoELayer`.

Layers (`experiments.rl.transformer`) are stacked along a leading axis and run by `jax.lax.scan`, each under
`jax.checkpoint`: what a layer computes is computed again in the backward pass, and its replicas are fetched again.

Arrays over ranks are ``[N, G, b, T, ...]``: every rank holds b whole samples, each aligned to the left, padding after
its last token. So attention needs no mask but the causal one.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.transformer import Block, PolicyConfig, normal, rms_norm
from relibra_jax.capacity import check_capacities, worst_case_capacities
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.moe import ExpertParallel
from relibra_jax.nnx.layer import ExpertParam
from relibra_jax.types import Array, Plan, Topology, check_shape

POLICIES: Final[Mapping[str, PolicyConfig]] = MappingProxyType(
    {
        "tiny": PolicyConfig(),
        "small": PolicyConfig(
            width=128, layers=6, heads=8, kv_heads=4, num_experts=32, top_k=4, expert_width=96
        ),
    }
)
"""Sizes with names, for CPUs."""


class Replayed(NamedTuple):
    """What the layers of one micro-batch are told."""

    expert_ids: Integer[Array, "N G b T L K"]
    """The recorded routing, of any integer dtype that holds E - 1; rows of padding are not read."""
    plan: Plan
    """Of this micro-batch: ``slot_expert[L N G S]``, ``home[L E]``, ``quota[L N G S]``."""
    load: Int[Array, "L N G E"]
    """That the plan was made for: of these ids at these places."""


class Cache(NamedTuple):
    """Keys and values of the tokens that the model has seen, by position; C positions of room."""

    keys: Float[Array, "L N G b C heads width"]
    values: Float[Array, "L N G b C heads width"]


class PolicyOutput(NamedTuple):
    """What the model says about every token. Padding has values too, which mean nothing."""

    logits: Float[Array, "N G b T V"]
    """float32: of the token after this one."""
    expert_ids: Integer[Array, "N G b T L K"]
    """The routing that ran: in the dtype of a `RoutingReplay` if live, else what was given."""
    router_logits: Float[Array, "N G b T L E"]
    """float32: of the live routers, for `relibra_jax.execution.gating.balance_loss` and for counting where they differ
    from a replay."""


class Policy(nnx.Module):
    """The language model; `make_policy` makes one on a mesh.

    Expert weights are ``[L, N, G, H, 3, D, F]``, sharded over the ranks; everything else is on every rank.
    `relibra_jax.nnx.layer.reorder_experts` moves experts between batches.

    Args:
        config: sizes.
        topology: the expert-parallel group; E of both must agree.
        rngs: gives the keys of the parameters.

    Raises:
        ValueError: another E, or more experts a token than there are.
    """

    def __init__(self, config: PolicyConfig, topology: Topology, *, rngs: nnx.Rngs):
        if topology.num_experts != config.num_experts:
            raise ValueError(f"policy of {config.num_experts} experts, topology of {topology.num_experts}")
        self.config = config
        self.embedding = nnx.Param(normal(rngs, (config.vocabulary, config.width), 0.02))
        self.layers = nnx.vmap(lambda rngs: Block(config, topology, rngs=rngs))(rngs.split(config.layers))
        self.norm = nnx.Param(jnp.ones(config.width))
        head = None if config.tied else normal(rngs, (config.width, config.vocabulary), 0.02)
        self.head = None if head is None else nnx.Param(head)

    def __call__(
        self,
        tokens: Int[Array, "N G b T"],
        mask: Bool[Array, "N G b T"],
        *,
        parallel: ExpertParallel,
        replay: Replayed | None = None,
        plan: Plan | None = None,
    ) -> PolicyOutput:
        """Run whole sequences, in replay of recorded routing or live.

        Args:
            tokens: samples aligned to the left.
            mask: True on real tokens, which come first. No expert computes the others.
            parallel: mesh, topology, sizes and ways. Live, its sizes must be safe for ``b * T`` tokens a rank
                (`live_parallel`), so that no routing overflows them.
            replay: recorded routing with its plan; None routes live.
            plan: of all layers, for live routing under a plan that was made for something else. None for homes alone.

        Returns:
            See `PolicyOutput`. NaN where `MoELayer` says so.

        Raises:
            ValueError: while tracing: shapes that do not belong together, sizes too small for live routing.
        """
        if replay is not None and plan is not None:
            raise ValueError("a replay brings its plan: expected plan=None beside it")
        output, _ = self._run(tokens, mask, None, None, parallel, replay, plan)
        return output

    def extend(
        self,
        tokens: Int[Array, "N G b t"],
        mask: Bool[Array, "N G b t"],
        cache: Cache,
        start: Int[Array, "N G b"],
        *,
        parallel: ExpertParallel,
    ) -> tuple[PolicyOutput, Cache]:
        """Run the next tokens of sequences whose earlier ones are in ``cache``: live, under homes alone.

        Args:
            tokens: the next t of every sample.
            mask: True on real tokens, which come first.
            cache: from `empty_cache` or an earlier call.
            start: position of each sample's first new token; its tokens before that are in the cache.
            parallel: safe for ``b * t`` tokens a rank.

        Returns:
            What the model says about the new tokens, as if whole sequences had run; and the cache with them. Entries
            at ``start + t`` and beyond are left alone, what padding has written is overwritten by what comes there.
        """
        return self._run(tokens, mask, cache, start, parallel, None, None)

    def empty_cache(self, shape: tuple[int, int, int], room: int, mesh: Mesh) -> Cache:
        """A cache for ``shape = (N, G, b)`` samples of at most ``room`` tokens."""
        config = self.config
        zeros = jnp.zeros(
            (config.layers, *shape, room, config.kv_heads, config.head_width), jnp.dtype(config.dtype)
        )
        sharding = NamedSharding(mesh, PartitionSpec(None, *RANKS))
        return Cache(*(jax.lax.with_sharding_constraint(zeros, sharding) for _ in Cache._fields))

    def _run(self, tokens, mask, cache, start, parallel, replay, plan):
        config = self.config
        self._check(tokens, mask, parallel, replay, plan)
        ids, load = None, None
        if replay is not None:
            ids, plan, load = jnp.moveaxis(jnp.asarray(replay.expert_ids), -2, 0), replay.plan, replay.load
        start = jnp.zeros(tokens.shape[:-1], jnp.int32) if start is None else start
        x = self.embedding[...].astype(config.dtype)[tokens]
        x = jax.lax.with_sharding_constraint(
            x, NamedSharding(parallel.mesh, PartitionSpec(*parallel.groups, *RANKS))
        )
        graph, state = nnx.split(self.layers)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def layer(x, of_layer):
            state, *rest = of_layer
            x, cache, ids, logits = nnx.merge(graph, state)(x, mask, start, *rest, parallel=parallel)
            return x, (cache, ids, logits)

        of_layers = (state, None if cache is None else tuple(cache), ids, plan, load)
        x, (cache, ids, router_logits) = jax.lax.scan(layer, x, of_layers)
        x = rms_norm(x, self.norm[...], config.norm_epsilon)
        head = self.embedding[...].T if self.head is None else self.head[...]
        logits = jnp.dot(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
        output = PolicyOutput(logits, jnp.moveaxis(ids, 0, -2), jnp.moveaxis(router_logits, 0, -2))
        return output, None if cache is None else Cache(*cache)

    def _check(self, tokens, mask, parallel: ExpertParallel, replay: Replayed | None, plan) -> None:
        config, topology = self.config, parallel.topology
        ranks = (*parallel.group_shape, topology.num_nodes, topology.ranks_per_node)
        if tokens.shape[:-2] != ranks:
            raise ValueError(f"tokens: expected [*{ranks}, b, T], found shape {tokens.shape}")
        check_shape("mask", mask.shape, tokens.shape)
        if replay is None:
            safe = worst_case_capacities(tokens.shape[-2] * tokens.shape[-1], config.top_k, topology)
            check_capacities(parallel.capacities, safe)
        else:
            plan = replay.plan
            check_shape(
                "replay.expert_ids", replay.expert_ids.shape, (*tokens.shape, config.layers, config.top_k)
            )
            check_shape("replay.load", replay.load.shape, (config.layers, *ranks, config.num_experts))
        if plan is not None:
            check_shape("plan.home", plan.home.shape, (config.layers, config.num_experts))
            for name in ("slot_expert", "quota"):
                check_shape(
                    f"plan.{name}", getattr(plan, name).shape, (config.layers, *ranks, topology.slots)
                )


def make_policy(config: PolicyConfig, topology: Topology, *, mesh: Mesh, key: jax.Array) -> Policy:
    """A new policy whose parameters lie on ``mesh`` from birth; the same weights on every topology.

    Args:
        config: sizes.
        topology: the expert-parallel group.
        mesh: from `relibra_jax.execution.mesh.expert_mesh`.
        key: of the parameters.

    Raises:
        ValueError: see `Policy`.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Policy(config, topology, rngs=nnx.Rngs(0))))

    def sharding(leaf: Any) -> NamedSharding:
        spec = PartitionSpec(None, *RANKS) if isinstance(leaf, ExpertParam) else PartitionSpec()
        return NamedSharding(mesh, spec)

    shardings = jax.tree.map(sharding, shapes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    init = jax.jit(
        lambda key: nnx.state(Policy(config, topology, rngs=nnx.Rngs(key))), out_shardings=shardings
    )
    return nnx.merge(graph, init(key))


def live_parallel(parallel: ExpertParallel, tokens: int, top_k: int) -> ExpertParallel:
    """``parallel`` for live routing under homes alone: no replica slots, and sizes that suffice whatever routers do.

    Args:
        parallel: whose mesh and ways are kept.
        tokens: of one rank.
        top_k: K.
    """
    topology = dataclasses.replace(parallel.topology, replica_slots=0)
    return dataclasses.replace(
        parallel, topology=topology, capacities=worst_case_capacities(tokens, top_k, topology)
    )


def token_log_probs(
    logits: Float[Array, "*ranks T V"], tokens: Int[Array, "*ranks T"], *, temperature: float = 1.0
) -> Float[jax.Array, "*ranks T"]:
    """The log-probability of every token given those before it.

    Args:
        logits: of `PolicyOutput`.
        tokens: that the model was run on.
        temperature: that divides the logits, above 0.

    Returns:
        float32; entry t is of token t, so it comes from the logits of token t - 1. 0 for the first.
    """
    log_probs = jax.nn.log_softmax(logits[..., :-1, :] / temperature)
    of_next = jnp.take_along_axis(log_probs, tokens[..., 1:, None], axis=-1)[..., 0]
    return jnp.pad(of_next, [(0, 0)] * (of_next.ndim - 1) + [(1, 0)])
