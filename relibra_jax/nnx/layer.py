"""The mixture-of-experts layer for Flax: router, gates and shared expert around `relibra_jax.execution.moe`.

The replay is an argument. ``layer(x, expert_ids, plan, ...)`` follows recorded routing under a plan. It takes the gates
from the live router, which therefore still learns. ``layer(x, ...)`` routes live and returns the expert ids, which a
later call can replay. The layer keeps nothing between calls. With a prepared plan
(`relibra_jax.nnx.PreparedBatch.layers`) the layer only gathers and sends. Otherwise it prepares the plan itself.

Expert weights are in home slots, ``[N, G, H, 3, D, F]``, with biases in further columns if the experts have them
(`relibra_jax.execution.expert_mlp`). The layer's `Homes` record which expert is in which slot, so
that the layer can detect a plan with different homes.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, DTypeLike, Float, Int, Integer, Num

from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Topology, check_shape
from relibra_jax.execution.chunks import moe_layer_in_chunks
from relibra_jax.execution.expert_mlp import ACTIVATIONS, GeneralMlp, expert_columns
from relibra_jax.execution.gating import Gating, check_gating, gates_at, select_experts
from relibra_jax.execution.moe import ExpertMlp, moe_layer
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.prepared_layer import PreparedLayer, prepare_fetch
from relibra_jax.execution.replicas import LayerExperts, fetch_replicas
from relibra_jax.nnx.variables import CorrectionBias, ExpertParam, Homes, expert_spec
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer

REPLICATED: Final = PartitionSpec()
"""The sharding spec of replicated parameters."""


class MoEOutput(NamedTuple):
    """The output of one call of `MoELayer`, with its routing."""

    output: Float[Array, "B *tokens D"]
    """The layer's output, in the shape of ``x``."""
    expert_ids: Integer[Array, "B *tokens K"]
    """The router's expert ids of a live call, in the dtype of a replay and with arbitrary ids on padding; or the
    ``expert_ids`` of the call."""
    router_logits: Float[Array, "B *tokens E"]
    """The live router's logits, for example for `relibra_jax.execution.gating.balance_loss`."""
    slot_rows: Int[Array, "*data N G S"]
    """The number of rows that each slot computed, for `relibra_jax.nnx.check_executed`. With ``check_rows`` the
    receiving ranks count them."""


class MoELayer(nnx.Module):
    """A mixture-of-experts layer over the ranks of a topology.

    An expert's initial weights depend only on the random key and its id, so the model starts equal on every topology.

    Args:
        topology: the expert-parallel group.
        width: D, the width of the tokens.
        expert_width: F, the hidden width of an expert.
        gating: the rule by which tokens choose experts. `relibra_jax.execution.gating.GATINGS` has presets.
        shared_width: the hidden width of a shared SwiGLU expert that every token also uses; 0 for none.
        activation: the function of gate and up, a key of `relibra_jax.execution.expert_mlp.ACTIVATIONS`.
        expert_biases: whether gate, up and down of the experts have biases, which are 0 at first.
        home: flat home slot of each expert. None places the experts in the order of their ids.
        dtype: the dtype of the computation. None takes that of ``x``.
        param_dtype: the dtype of the parameters.
        mesh: the device mesh on which the layer creates its parameters: experts sharded over the ranks, all other
            parameters replicated. None leaves them on JAX's default device until `Balancer.prepare` or the caller
            distributes them.
        fsdp_axis: another mesh axis over which each expert is sharded along D. None if there is none.
        expert_mlp: the function with which every rank computes its rows, hashable. None takes
            `pallas_kernels.grouped_mlp`, or `relibra_jax.execution.expert_mlp.GeneralMlp` for experts with biases or
            another activation.
        rngs: the random keys of the parameters, from the stream ``params``.

    Raises:
        ValueError: if the gating does not fit the number of experts, a width is too small, or the activation is
            unknown.

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

    @checks_arguments
    def __init__(
        self,
        topology: Topology,
        width: int,
        expert_width: int,
        gating: Gating,
        *,
        shared_width: int = 0,
        activation: str = "swiglu",
        expert_biases: bool = False,
        home: Int[Array, " E"] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
        fsdp_axis: str | None = None,
        expert_mlp: ExpertMlp | None = None,
        rngs: nnx.Rngs,
    ):
        check_gating(gating, topology.num_experts)
        check_integer("width", width, least=1)
        check_integer("expert_width", expert_width, least=1)
        check_integer("shared_width", shared_width, least=0)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
        if expert_mlp is None and (expert_biases or activation != "swiglu"):
            expert_mlp = GeneralMlp(activation=activation, expert_width=expert_width, biases=expert_biases)
        self.expert_mlp = expert_mlp
        self.expert_columns = expert_columns(width, expert_width, biases=expert_biases)
        self.gating, self.dtype, self.width, self.expert_width = gating, dtype, width, expert_width
        num_experts, spec = topology.num_experts, expert_spec(fsdp_axis)

        param_dtype = jnp.dtype(param_dtype)

        def make(
            init: Callable[..., jax.Array], *sizes: Any, spec: PartitionSpec = REPLICATED
        ) -> Callable[..., jax.Array]:
            return _compiled(init, sizes, None if mesh is None else NamedSharding(mesh, spec))

        home = jnp.arange(num_experts, dtype=jnp.int32) if home is None else jnp.asarray(home, jnp.int32)
        self.home = Homes(make(_same)(home))
        self.router = nnx.Param(make(_router_weights, width, num_experts, param_dtype)(rngs.params()))
        sizes = (width, expert_width, self.expert_columns, param_dtype)
        weights = make(_expert_weights, topology, *sizes, spec=spec)(rngs.params(), home)
        # The weights are already sharded. With eager sharding Flax would need a mesh in its context.
        self.experts = ExpertParam(
            weights, out_sharding=tuple(spec), eager_sharding=False, compute_dtype=dtype
        )
        self.router_bias = nnx.Param(make(_zeros, num_experts, param_dtype)()) if gating.router_bias else None
        self.correction_bias = (
            CorrectionBias(make(_zeros, num_experts, jnp.dtype(jnp.float32))())
            if gating.correction_bias
            else None
        )

        shared = make(_swiglu_weights, width, shared_width, param_dtype)
        self.shared = nnx.Param(shared(rngs.params())) if shared_width else None

    @checks_arguments
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
        """Run the layer, either with the recorded routing ``expert_ids`` or with live routing.

        The load of a live call is unknown beforehand. So without capacities the layer has buffers for the worst case,
        and runs ``parallel.chunk_tokens`` tokens of each rank at a time (`relibra_jax.execution.chunks`). To run all at
        once, call `route` first, plan the counted load, and then replay the ids. If a buffer is too small, the output
        is NaN; the layer never drops a token.

        Args:
            x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis. The number of ranks must
                divide B.
            expert_ids: the recorded expert ids, ``[B, *tokens, K]``, in any integer dtype that holds E - 1. None routes
                live.
            plan: the plan of this layer and micro-batch, ``[*data, ...]``. It is either prepared from ``expert_ids``,
                with the residents' weights if there are any, or a `LayerPlan` if there are no resident slots. Live
                routing takes a `LayerPlan` whose load is None. None uses home slots only, under a topology without
                resident slots (`Balancer.live`).
            parallel: the mesh, topology, buffer sizes and exchanges with which the layer executes the plan.
            experts: the experts that `fetch` returned for ``plan``. None fetches the replicas in this call, not
                overlapped with attention.
            mask: ``[B, *tokens]``, False on padding, which no routed expert computes and no load counts. EMPTY ids mean
                the same in dtypes that can hold EMPTY.

        Returns:
            The output with the routing and the router's logits. The output is NaN if ``plan`` has different homes than
            the weights, if ``experts`` or residents belong to another plan, or under the conditions of
            `relibra_jax.execution.moe.moe_layer`.

        Raises:
            ValueError: before compilation, if a shape, layout, K or dtype does not fit, if ``plan`` has a load but
                ``expert_ids`` is None, or if the weights of residents are missing.
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
        gates = gates_at(logits, ids, self.gating)
        arguments = (x, ids, gates, experts)
        if isinstance(plan, PreparedLayer):
            routed = moe_layer(*arguments, plan, parallel, expert_mlp=self.expert_mlp)
        else:
            routed = moe_layer_in_chunks(*arguments, plan, parallel, expert_mlp=self.expert_mlp)
        routed_output, slot_rows = routed
        y = routed_output * one_or_nan(self._is_placed(plan.slot_expert), jnp.asarray(routed_output))
        if self.shared is not None:
            y += _swiglu(x, self.shared[...].astype(x.dtype))
        return MoEOutput(y, expert_ids, logits, slot_rows)

    @checks_arguments
    def fetch(
        self, x: Num[Array, "B ..."], plan: LayerPlan | PreparedLayer | None, parallel: ExpertParallel
    ) -> tuple[LayerExperts, jax.Array]:
        """Fetch this layer's replicas while attention computes.

        Call it at the start of the transformer layer, inside its `jax.checkpoint`, so that the backward pass fetches
        the replicas again instead of storing them.

        Args:
            x: the input of the transformer layer.
            plan: the plan of this layer and micro-batch, the same as in the call of the layer. None uses home slots
                only, so that a model written for plans also routes live.
            parallel: the execution settings, the same as in the call of the layer.

        Returns:
            ``(experts, x)``, as `relibra_jax.execution.replicas.fetch_replicas` returns them. Use this ``x`` from here
            on. The experts have the layer's ``dtype``, or that of ``x`` if it is None.
        """
        if plan is None:
            plan = _home_plan(self.home[...], parallel)
        layer = plan if isinstance(plan, PreparedLayer) else prepare_fetch(plan, parallel)
        dtype = x.dtype if self.dtype is None else self.dtype
        if layer.residents is not None:
            weights = jnp.asarray(layer.residents.weights, dtype)
            layer = layer._replace(residents=layer.residents._replace(weights=weights))
        return fetch_replicas(self.experts[...].astype(dtype), layer, x, parallel)

    @checks_arguments
    def route(
        self, x: Float[Array, "B *tokens D"]
    ) -> tuple[Integer[Array, "B *tokens K"], Float[Array, "B *tokens E"]]:
        """Compute the live routing without running experts, for callers that count it, plan it and replay it.

        Args:
            x: the tokens.

        Returns:
            ``(expert_ids, logits)``: the expert ids in the smallest dtype that holds them, as in
            `relibra_jax.contract.types.RoutingReplay`, and the router's logits in float32 or wider.
        """
        logits = self._logits(x)
        bias = None if self.correction_bias is None else self.correction_bias[...]
        ids = select_experts(logits, self.gating, bias=bias)
        return ids.astype(id_dtype(logits.shape[-1])), logits

    def _is_placed(self, slot_expert: Int[Array, "*data N G S"]) -> jax.Array:
        """Return whether the weights are at the homes that a plan's slots say."""
        home_slots = self.experts.shape[-4]
        at_home = jnp.asarray(slot_expert)[..., :home_slots].reshape(*slot_expert.shape[:-3], -1)
        experts = jnp.arange(at_home.shape[-1])
        return (at_home[..., self.home[...]] == jnp.broadcast_to(experts, at_home.shape)).all()

    def _logits(self, x):
        # In float32 and without TF32, because a rounded logit may select another expert.
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.dot(x.astype(dtype), self.router[...].astype(dtype), precision="highest")
        if self.router_bias is None:
            return logits
        return logits + jnp.broadcast_to(self.router_bias[...].astype(dtype), logits.shape)

    def _check(self, x, expert_ids, plan, parallel: ExpertParallel, mask) -> None:
        topology = parallel.topology
        layout = (*parallel.ranks, topology.home_slots, 3, self.width, self.expert_columns)
        groups = len(parallel.data_axes) if self.experts.ndim > len(layout) else 0
        check_shape("expert weights", self.experts.shape, (*self.experts.shape[:groups], *layout))
        tokens = tuple(x.shape[:-1])
        check_shape("x", x.shape, (*tokens, self.width))
        if expert_ids is None and isinstance(plan, PreparedLayer):
            raise ValueError(
                "plan is a PreparedLayer, so expert_ids must be given: pass the ids from which it was prepared"
            )
        if expert_ids is None and plan is not None and plan.load is not None:
            raise ValueError(
                f"plan has a load of shape {plan.load.shape}, but expert_ids is None: live routing counts its own load,"
                " so pass plan._replace(load=None)"
            )
        if mask is not None:
            check_shape("mask", mask.shape, tokens)
        if expert_ids is not None:
            check_shape("expert_ids", expert_ids.shape, (*tokens, self.gating.top_k))
            largest = topology.num_experts - 1
            if not jnp.issubdtype(expert_ids.dtype, jnp.integer) or jnp.iinfo(expert_ids.dtype).max < largest:
                raise ValueError(
                    f"expert_ids: expected an integer dtype that holds {largest}, found {expert_ids.dtype}"
                )


def _home_plan(home, parallel: ExpertParallel) -> LayerPlan:
    """Return a layer plan without residents and replicas. Its quotas are 0, to be refitted to the live load."""
    topology = parallel.topology
    padding = ((0, 0), (0, 0), (0, topology.slots - topology.home_slots))
    slots = jnp.pad(home_layout(home, topology), padding, constant_values=EMPTY)
    slots, home = (jnp.broadcast_to(leaf, (*parallel.data_shape, *leaf.shape)) for leaf in (slots, home))
    return LayerPlan(slots, home, jnp.zeros_like(slots), load=None)


@functools.cache
def _compiled(
    init: Callable[..., jax.Array], sizes: tuple[Any, ...], sharding: NamedSharding | None
) -> Callable[..., jax.Array]:
    """Return an initializer that is compiled once for all layers of these sizes."""
    return jax.jit(functools.partial(init, *sizes), out_shardings=sharding)


def _same(array: jax.Array) -> jax.Array:
    return array


def _zeros(size: int, dtype: np.dtype) -> jax.Array:
    return jnp.zeros(size, dtype)


def _router_weights(width: int, num_experts: int, dtype: np.dtype, key) -> jax.Array:
    return (jax.random.normal(key, (width, num_experts)) * width**-0.5).astype(dtype)


def _expert_weights(
    topology: Topology, width: int, hidden: int, columns: int, dtype: np.dtype, key, home
) -> jax.Array:
    def one(expert):
        weights = _swiglu_weights(width, hidden, dtype, jax.random.fold_in(key, expert))
        return jnp.pad(weights, [(0, 0), (0, 0), (0, columns - hidden)])

    return jax.vmap(jax.vmap(jax.vmap(one)))(home_layout(home, topology))


def _swiglu_weights(width: int, hidden: int, dtype: np.dtype, key) -> jax.Array:
    """Draw random weights ``[3, D, F]``; each matrix is scaled by the inverse square root of its input width."""
    scale = np.sqrt([1 / width, 1 / width, 1 / hidden]).astype(np.float32)[:, None, None]
    return (jax.random.normal(key, (3, width, hidden)) * scale).astype(dtype)


def _swiglu(x, weights):
    gate, up, down = weights
    return jnp.dot(jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up), down.T)
