"""The layer for Flax: router, gates and shared expert around `relibra_jax.execution.moe`, as an nnx module.

Replay is an argument: ``layer(x, expert_ids, plan, ...)`` follows recorded routing under a plan and takes the gates
from the live router, which therefore learns. ``layer(x, ...)`` routes live and returns its ids, which a later call
replays. Nothing is kept between calls. The plan comes prepared (`relibra_jax.nnx.PreparedBatch.layers`), so that the
layer only gathers and sends; or as it is, and the layer prepares it.

Experts lie in home slots, ``[N, G, H, 3, D, F]``, and the layer's `Homes` say which expert lies in which, so that
a plan of other homes is noticed.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, DTypeLike, Float, Int, Integer, Num

from relibra_jax.execution.gating import Gating, check_gating, gates_at, select_experts
from relibra_jax.execution.moe import moe_layer
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, prepare_fetch, prepare_layer
from relibra_jax.execution.replicas import LayerExperts, fetch_replicas
from relibra_jax.nnx.variables import CorrectionBias, ExpertParam, Homes, expert_spec
from relibra_jax.plan import home_layout
from relibra_jax.replay import id_dtype
from relibra_jax.types import EMPTY, Array, LayerPlan, Topology, check_shape

EVERYWHERE: Final = PartitionSpec()
"""The spec of replicated parameters."""


class MoEOutput(NamedTuple):
    """What one call of the layer returns."""

    output: Float[Array, "B *tokens D"]
    """The layer's output, of the shape of ``x``."""
    expert_ids: Integer[Array, "B *tokens K"]
    """The routing of a live call in the dtype of a replay, rows of padding filled with whatever the router says; or the
    replay that was given."""
    router_logits: Float[Array, "B *tokens E"]
    """The live router's logits, for `relibra_jax.execution.gating.balance_loss` for instance."""
    slot_rows: Int[Array, "*copies N G S"]
    """Rows that each slot computed, counted where they arrived with ``check_rows``, for
    `relibra_jax.nnx.check_executed`."""


class MoELayer(nnx.Module):
    """A mixture-of-experts layer over the ranks of a topology.

    The weights of an expert follow from the key and its id alone, so a model starts the same on every topology.

    Args:
        topology: the expert-parallel group.
        width: D, the width of the tokens.
        expert_width: F, the hidden width of an expert.
        gating: how tokens choose experts; presets in `relibra_jax.execution.gating.GATINGS`.
        shared_width: the hidden width of a shared expert that every token uses besides; 0 for none.
        home: flat home slot of each expert; in order of their ids when None.
        dtype: the dtype of the computation; that of ``x`` when None.
        param_dtype: the dtype of the parameters.
        mesh: the device mesh that parameters lie on from birth, experts sharded over its ranks and all else
            replicated. None leaves them where JAX puts them, for `Balancer.prepare` or the caller to distribute.
        fsdp_axis: the mesh axis over which each expert is sharded besides, along D; None for none.
        rngs: the random keys of the parameters; ``params`` is used.

    Raises:
        ValueError: if the topology's experts cannot have this gating.

    >>> from relibra_jax.execution.gating import GATINGS
    >>> from relibra_jax.execution.mesh import expert_mesh
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> mesh = expert_mesh(topology, devices=jax.devices()[:1])
    >>> parallel = ExpertParallel(mesh=mesh, topology=topology)
    >>> layer = MoELayer(topology, 8, 16, GATINGS["gpt-oss"], mesh=mesh, rngs=nnx.Rngs(0))
    >>> live = nnx.jit(lambda layer, x: layer(x, parallel=parallel))
    >>> output, expert_ids, *_ = live(layer, jnp.ones((2, 3, 8)))
    >>> output.shape, expert_ids.shape, expert_ids.dtype
    ((2, 3, 8), (2, 3, 4), dtype('uint8'))
    """

    def __init__(
        self,
        topology: Topology,
        width: int,
        expert_width: int,
        gating: Gating,
        *,
        shared_width: int = 0,
        home: Int[Array, " E"] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
        fsdp_axis: str | None = None,
        rngs: nnx.Rngs,
    ):
        check_gating(gating, topology.num_experts)
        self.gating, self.dtype, self.width, self.expert_width = gating, dtype, width, expert_width
        num_experts, spec = topology.num_experts, expert_spec(fsdp_axis)

        def make(init: Callable[..., jax.Array], *args: Any, spec: PartitionSpec = EVERYWHERE) -> jax.Array:
            return jax.jit(init, out_shardings=None if mesh is None else NamedSharding(mesh, spec))(*args)

        def zeros(dtype: DTypeLike) -> jax.Array:
            return make(lambda: jnp.zeros(num_experts, dtype))

        def router(key):
            return (jax.random.normal(key, (width, num_experts)) * width**-0.5).astype(param_dtype)

        def experts(key, home):
            def one(expert):
                return _swiglu_weights(jax.random.fold_in(key, expert), width, expert_width, param_dtype)

            return jax.vmap(jax.vmap(jax.vmap(one)))(home_layout(home, topology))

        home = jnp.arange(num_experts, dtype=jnp.int32) if home is None else jnp.asarray(home, jnp.int32)
        self.home = Homes(make(lambda home: home, home))
        self.router = nnx.Param(make(router, rngs.params()))
        weights = make(experts, rngs.params(), home, spec=spec)
        # They lie where they should already; Flax would want a mesh in its context to put them there.
        self.experts = ExpertParam(
            weights, out_sharding=tuple(spec), eager_sharding=False, compute_dtype=dtype
        )
        self.router_bias = nnx.Param(zeros(param_dtype)) if gating.router_bias else None
        self.correction_bias = CorrectionBias(zeros(jnp.float32)) if gating.correction_bias else None

        def shared(key):
            return _swiglu_weights(key, width, shared_width, param_dtype)

        self.shared = nnx.Param(make(shared, rngs.params())) if shared_width else None

    def __call__(
        self,
        x: Float[Array, "..."],
        expert_ids: Num[Array, "..."] | None = None,
        plan: LayerPlan | PreparedLayer | None = None,
        *,
        parallel: ExpertParallel,
        experts: LayerExperts | None = None,
        mask: Bool[Array, "..."] | None = None,
    ) -> MoEOutput:
        """Run the layer, in replay of ``expert_ids`` or on live routing.

        A live call cannot know what its buffers will hold: ``parallel`` without capacities takes the worst case. To
        need less, count first: `route`, then plan the counted load, then replay. Buffers too small give NaN, never a
        dropped token.

        Args:
            x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis, which divides over them.
            expert_ids: the replay, ``[B, *tokens, K]`` of any integer dtype that holds E - 1. None routes live.
            plan: the plan of this layer and micro-batch, ``[*copies, ...]``: prepared from these ids, with residents'
                weights if there are any; or as it is, where there are no resident slots. For live routing under it,
                give it as it is and without its load. None for homes alone, under a topology without resident slots
                (`Balancer.live`).
            parallel: how plans are run: mesh, topology, buffer sizes, kinds of exchange.
            experts: what `fetch` returned for ``plan``; when None, replicas are fetched here, unhidden.
            mask: ``[B, *tokens]``, False on padding, which no routed expert computes and no load counts. EMPTY ids say
                the same, in dtypes that have room for it.

        Returns:
            The output, with the routing and the router's logits. NaN if ``plan`` belongs to other homes than the
            weights', or as `relibra_jax.execution.moe.moe_layer` says.

        Raises:
            ValueError: before anything is compiled: if a shape, layout, K or dtype does not fit, with both; a plan
                comes with its load and without the ids that it is the load of; or residents' weights are missing.
        """
        self._check(x, expert_ids, plan, parallel, mask)
        if plan is None:
            plan = _home_plan(self.home[...], parallel)
        x = jnp.asarray(x, self.dtype)
        if experts is None:
            experts, x = self.fetch(x, plan, parallel)
        if expert_ids is None:
            expert_ids, logits = self.route(x)
        else:
            logits = self._logits(x)
        ids = jnp.asarray(expert_ids, jnp.int32)
        if mask is not None:
            ids = jnp.where(mask[..., None], ids, EMPTY)
        layer = plan if isinstance(plan, PreparedLayer) else prepare_layer(ids, plan, parallel)
        gates = gates_at(logits, ids, self.gating)
        found, slot_rows = moe_layer(x, ids, gates, experts, layer, parallel)
        at_home = (plan.home == jnp.broadcast_to(self.home[...], plan.home.shape)).all()
        y = found * one_or_nan(at_home, jnp.asarray(found))
        if self.shared is not None:
            y += _swiglu(x, self.shared[...].astype(x.dtype))
        return MoEOutput(y, expert_ids, logits, slot_rows)

    def fetch(
        self, x: Num[Array, "B ..."], plan: LayerPlan | PreparedLayer, parallel: ExpertParallel
    ) -> tuple[LayerExperts, jax.Array]:
        """Fetch this layer's replicas beside attention: call it at the transformer layer's start, inside the
        `jax.checkpoint` that has them fetched again in the backward pass.

        Args:
            x: the transformer layer's input; go on with the one returned.
            plan: the plan of this layer and micro-batch, the same as in the call.
            parallel: how plans are run, the same as in the call.

        Returns:
            ``(experts, x)``, see `relibra_jax.execution.replicas.fetch_replicas`. Experts are of the layer's
            ``dtype``, or that of this ``x``.
        """
        layer = plan if isinstance(plan, PreparedLayer) else prepare_fetch(plan, parallel)
        dtype = x.dtype if self.dtype is None else self.dtype
        if layer.residents is not None:
            layer = layer._replace(residents=jnp.asarray(layer.residents, dtype))
        return fetch_replicas(self.experts[...].astype(dtype), layer, x, parallel)

    def route(
        self, x: Float[Array, "B *tokens D"]
    ) -> tuple[Integer[Array, "B *tokens K"], Float[Array, "B *tokens E"]]:
        """The live router's choice, without running experts: count it, plan it, replay it.

        Returns:
            Expert ids in the smallest dtype that holds them, as in `relibra_jax.types.RoutingReplay`, and the
            router's logits, float32 or wider.
        """
        logits = self._logits(x)
        bias = None if self.correction_bias is None else self.correction_bias[...]
        ids = select_experts(logits, self.gating, bias=bias)
        return ids.astype(id_dtype(logits.shape[-1])), logits

    def _logits(self, x):
        # In float32 and without TF32: a rounded logit may be another expert.
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.dot(x.astype(dtype), self.router[...].astype(dtype), precision="highest")
        if self.router_bias is None:
            return logits
        return logits + jnp.broadcast_to(self.router_bias[...].astype(dtype), logits.shape)

    def _check(self, x, expert_ids, plan, parallel: ExpertParallel, mask) -> None:
        topology = parallel.topology
        layout = (*parallel.ranks, topology.home_slots, 3, self.width, self.expert_width)
        check_shape("expert weights", self.experts.shape, layout)
        tokens = tuple(x.shape[:-1])
        check_shape("x", x.shape, (*tokens, self.width))
        if expert_ids is None and isinstance(plan, PreparedLayer):
            raise ValueError(
                "a prepared layer without expert_ids: it was prepared from recorded ones, which say where gates belong"
            )
        if expert_ids is None and plan is not None and plan.load is not None:
            raise ValueError(
                f"plan with a load of shape {plan.load.shape}, without expert_ids: live routing is counted in the"
                " step, give it plan._replace(load=None)"
            )
        if mask is not None:
            check_shape("mask", mask.shape, tokens)
        if expert_ids is not None:
            check_shape("expert_ids", expert_ids.shape, (*tokens, self.gating.top_k))
            most = topology.num_experts - 1
            if not jnp.issubdtype(expert_ids.dtype, jnp.integer) or jnp.iinfo(expert_ids.dtype).max < most:
                raise ValueError(f"expert_ids: expected integers that hold {most}, found {expert_ids.dtype}")


def _home_plan(home, parallel: ExpertParallel) -> LayerPlan:
    """The layer plan that has neither residents nor replicas, for quotas to be refitted."""
    topology = parallel.topology
    empty = ((0, 0), (0, 0), (0, topology.slots - topology.home_slots))
    slots = jnp.pad(home_layout(home, topology), empty, constant_values=EMPTY)
    slots, home = (jnp.broadcast_to(leaf, (*parallel.copies, *leaf.shape)) for leaf in (slots, home))
    return LayerPlan(slots, home, jnp.zeros_like(slots), load=None)


def _swiglu_weights(key, width: int, hidden: int, dtype: DTypeLike) -> jax.Array:
    """``[3, D, F]``, each matrix scaled by the root of its inputs."""
    scale = np.sqrt([1 / width, 1 / width, 1 / hidden]).astype(np.float32)[:, None, None]
    return (jax.random.normal(key, (3, width, hidden)) * scale).astype(dtype)


def _swiglu(x, weights):
    gate, up, down = weights
    return jnp.dot(jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up), down.T)
