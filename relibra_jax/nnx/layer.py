"""The layer for Flax: router, gates and shared expert around `relibra_jax.execution.moe`, as an nnx module.

Replay is an argument: ``layer(x, expert_ids, plan, load, ...)`` follows recorded routing under a plan and takes the
gates from the live router, which therefore learns. ``layer(x, ...)`` routes live and returns its ids, which a later
call replays. Nothing is kept between calls.

Experts lie in home slots, ``[N, G, H, 3, D, F]``, and the layer's `Homes` say which expert lies in which, so that
a plan of other homes is noticed. `reorder_experts` changes both between batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, DTypeLike, Float, Int, Integer, Num

from relibra_jax.execution.expert_labels import Layers, optimizer_layers
from relibra_jax.execution.gating import Gating, check_gating, gates_at, select_experts
from relibra_jax.execution.migration import migrate_experts
from relibra_jax.execution.moe import ExpertParallel, LayerExperts, fetch_replicas, moe_layer
from relibra_jax.plan import home_layout
from relibra_jax.replay import id_dtype
from relibra_jax.types import EMPTY, Array, Plan, Topology, check_shape


class ExpertParam(nnx.Param):
    """Expert weights in home slots, ``[N, G, H, 3, D, F]``; the type tells them from other parameters."""


class CorrectionBias(nnx.Variable):
    """Added to sigmoid scores when experts are selected. The gradient does not train it."""


class Homes(nnx.Variable):
    """Flat home slot of each expert, ``[E]`` int32: the layout of the expert weights beside it."""


class MoEOutput(NamedTuple):
    """What one call of the layer returns."""

    output: Float[Array, "*ranks D"]
    """Of the shape of ``x``."""
    expert_ids: Integer[Array, "*ranks K"]
    """Of a live call: its routing in the dtype of a replay, rows of padding filled with whatever the router says. Of
    a replay: what was given."""
    router_logits: Float[Array, "*ranks E"]
    """Of the live router, for `relibra_jax.execution.gating.balance_loss` for instance."""


class MoELayer(nnx.Module):
    """A mixture-of-experts layer over the ranks of a topology.

    The weights of an expert follow from the key and its id alone, so a model starts the same on every topology.

    Args:
        topology: the expert-parallel group.
        width: D.
        expert_width: F.
        gating: how tokens choose experts; presets in `relibra_jax.execution.gating.GATINGS`.
        shared_width: width of a shared expert that every token uses besides; 0 for none.
        home: flat home slot of each expert; in order of their ids when None.
        dtype: of the computation; that of ``x`` when None.
        param_dtype: of the parameters.
        sharding: of the expert weights from birth, `relibra_jax.execution.mesh.rank_sharding` for instance; all
            else is replicated over its mesh. Not sharded when None.
        rngs: gives the key of the parameters.

    Raises:
        ValueError: a gating that the topology's experts cannot have.

    >>> from relibra_jax.capacity import worst_case_capacities
    >>> from relibra_jax.execution.gating import GATINGS
    >>> from relibra_jax.execution.mesh import expert_mesh, rank_sharding
    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=4, replica_slots=0)
    >>> parallel = ExpertParallel(
    ...     mesh=expert_mesh(topology, devices=jax.devices()[:1]),
    ...     topology=topology,
    ...     capacities=worst_case_capacities(6, 4, topology),
    ... )
    >>> layer = MoELayer(
    ...     topology, 8, 16, GATINGS["gpt-oss"], sharding=rank_sharding(parallel.mesh), rngs=nnx.Rngs(0)
    ... )
    >>> live = nnx.jit(lambda layer, x: layer(x, parallel=parallel))
    >>> output, expert_ids, _ = live(layer, jnp.ones((1, 1, 2, 3, 8)))
    >>> output.shape, expert_ids.shape, expert_ids.dtype
    ((1, 1, 2, 3, 8), (1, 1, 2, 3, 4), dtype('uint8'))
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
        sharding: NamedSharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_gating(gating, topology.num_experts)
        self.gating, self.dtype, self.width, self.expert_width = gating, dtype, width, expert_width
        num_experts = topology.num_experts
        everywhere = None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())

        def make(init: Callable[..., jax.Array], *args, where=everywhere) -> jax.Array:
            return jax.jit(init, out_shardings=where)(*args)

        def zeros(dtype):
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
        self.experts = ExpertParam(make(experts, rngs.params(), home, where=sharding))
        self.router_bias = nnx.Param(zeros(param_dtype)) if gating.router_bias else None
        self.correction_bias = CorrectionBias(zeros(jnp.float32)) if gating.correction_bias else None

        def shared(key):
            return _swiglu_weights(key, width, shared_width, param_dtype)

        self.shared = nnx.Param(make(shared, rngs.params())) if shared_width else None

    def __call__(
        self,
        x: Float[Array, "..."],
        expert_ids: Num[Array, "..."] | None = None,
        plan: Plan | None = None,
        load: Int[Array, "..."] | None = None,
        *,
        parallel: ExpertParallel,
        experts: LayerExperts | None = None,
        mask: Bool[Array, "..."] | None = None,
    ) -> MoEOutput:
        """Run the layer, in replay of ``expert_ids`` or on live routing.

        A live call cannot know what its buffers will hold: give it `relibra_jax.capacity.worst_case_capacities` of all
        tokens of a rank, which suffice under every plan. To need less, count first: `route`, then plan the counted
        load (or `relibra_jax.token_split.refit_quota`), then replay. Buffers too small give NaN, never a dropped token.

        Args:
            x: ``[*groups, N, G, *tokens, D]``: every rank's tokens under one or more axes.
            expert_ids: ``[*groups, N, G, *tokens, K]`` of any integer dtype that holds E - 1: the replay. None routes
                live.
            plan: of this layer and micro-batch: ``slot_expert[*groups, N, G, S]``, ``home[E]``, ``quota`` like the
                first. None for homes alone, no replicas.
            load: ``[*groups, N, G, E]`` that ``plan`` was made for. None for routing that it was not made for, live
                routing among it: counted in the step, and the quotas refitted.
            parallel: mesh, topology, sizes and ways.
            experts: from `fetch`; when None, replicas are fetched here, in the open.
            mask: ``[*groups, N, G, *tokens]``, False on padding, which no routed expert computes and no load
                counts. EMPTY ids say the same, in dtypes that have room for it.

        Returns:
            See `MoEOutput`. NaN if ``plan`` belongs to other homes than the weights', or as `moe_layer` says.

        Raises:
            ValueError: before anything is compiled: a shape, layout, K or dtype that does not fit, with both; a load
                without the ids and the plan that it is the load of.
        """
        self._check(x, expert_ids, plan, load, parallel, mask)
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

        def flat(array: jax.Array) -> jax.Array:
            return array.reshape(*x.shape[: len(parallel.groups) + 2], -1, array.shape[-1])

        y = moe_layer(flat(x), flat(ids), flat(gates), experts, plan, load, parallel)
        # A factor and not a choice: gradients are NaN too.
        y = y.reshape(x.shape) * jnp.where((plan.home == self.home[...]).all(), 1, jnp.nan).astype(y.dtype)
        if self.shared is not None:
            y += _swiglu(x, self.shared[...].astype(x.dtype))
        return MoEOutput(y, expert_ids, logits)

    def fetch(
        self, x: Num[Array, "..."], plan: Plan, parallel: ExpertParallel
    ) -> tuple[LayerExperts, jax.Array]:
        """Fetch this layer's replicas beside attention: call it at the transformer layer's start, inside the
        `jax.checkpoint` that has them fetched again in the backward pass (`relibra_jax.execution.moe.fetch_replicas`).

        Args:
            x: the transformer layer's input, ``[*groups, N, G, ...]``; go on with the one returned.
            plan: of this layer and micro-batch.
            parallel: as in the call.

        Returns:
            ``(experts, x)``, see `relibra_jax.execution.moe.fetch_replicas`. Experts are of the layer's ``dtype``, or
            that of this ``x``.
        """
        experts = self.experts[...].astype(x.dtype if self.dtype is None else self.dtype)
        return fetch_replicas(experts, plan, x, parallel)

    def route(
        self, x: Float[Array, "*ranks D"]
    ) -> tuple[Integer[Array, "*ranks K"], Float[Array, "*ranks E"]]:
        """What the live router says, without running experts: count it, plan it, replay it.

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

    def _check(self, x, expert_ids, plan, load, parallel: ExpertParallel, mask) -> None:
        topology = parallel.topology
        ranks = (*parallel.group_shape, topology.num_nodes, topology.ranks_per_node)
        layout = (*ranks[-2:], topology.home_slots, 3, self.width, self.expert_width)
        check_shape("expert weights", self.experts.shape, layout)
        tokens = tuple(x.shape[len(ranks) : -1])
        if len(x.shape) < len(ranks) + 2:
            raise ValueError(f"x: expected [*{ranks}, *tokens, {self.width}], found shape {x.shape}")
        check_shape("x", x.shape, (*ranks, *tokens, self.width))
        if load is not None and (expert_ids is None or plan is None):
            missing = "expert_ids" if expert_ids is None else "a plan"
            raise ValueError(
                f"load of shape {load.shape} without {missing}: live routing is counted in the step"
            )
        if mask is not None:
            check_shape("mask", mask.shape, (*ranks, *tokens))
        if expert_ids is not None:
            check_shape("expert_ids", expert_ids.shape, (*ranks, *tokens, self.gating.top_k))
            most = topology.num_experts - 1
            if not jnp.issubdtype(expert_ids.dtype, jnp.integer) or jnp.iinfo(expert_ids.dtype).max < most:
                raise ValueError(f"expert_ids: expected integers that hold {most}, found {expert_ids.dtype}")


def expert_labels(state: Any) -> Any:
    """Which leaves hold the experts of which layers, as `migrate_experts` and checkpoints want to be told.

    Layers are counted in the order of the tree, ``nnx.List`` and stacked layers alike. For optimizer state, give the
    labels of the parameters to `relibra_jax.execution.expert_labels.optimizer_layers`.

    Args:
        state: ``nnx.state(model, ...)``, or gradients.

    Returns:
        A prefix of ``state``: for the expert weights an int, or a range where layers are stacked; None elsewhere.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    labels: list[Layers] = []
    layer = 0
    for leaf in leaves:
        if not isinstance(leaf, ExpertParam):
            labels.append(None)
        elif len(leaf.shape) == 6:
            labels.append(layer)
            layer += 1
        else:
            labels.append(range(layer, layer + leaf.shape[0]))
            layer += leaf.shape[0]
    return jax.tree.unflatten(structure, labels)


def get_homes(model: nnx.Module) -> Int[np.ndarray, "L E"]:
    """Where the experts of all layers lie: flat home slots, ``[L, E]``, for checkpoints.

    Args:
        model: with L MoE layers; they are counted in the order of its tree.

    Raises:
        ValueError: layers of different numbers of experts.
    """
    leaves = jax.tree.leaves(nnx.state(model, Homes))
    experts = sorted({leaf.shape[-1] for leaf in leaves})
    if len(experts) != 1:
        raise ValueError(f"expected MoE layers of one number of experts, found {experts}")
    return np.concatenate([np.asarray(leaf).reshape(-1, *experts) for leaf in leaves])


def set_homes(model: nnx.Module, home: Int[Array, "L E"]) -> None:
    """Tell all layers where their experts lie: after `relibra_jax.execution.checkpoint.restore_checkpoint`.

    Args:
        model: with L MoE layers in the order of its tree.
        home: flat home slot of each expert.

    Raises:
        ValueError: another number of layers or experts, with both.
    """
    layers, experts = get_homes(model).shape
    if np.shape(home) != (layers, experts):
        raise ValueError(f"homes of shape {np.shape(home)} for {layers} MoE layers of {experts} experts")
    rows = iter(np.split(np.asarray(home, np.int32), len(home)))

    def place(old):
        row = np.concatenate([next(rows) for _ in range(old.size // old.shape[-1])])
        return jax.device_put(row.reshape(old.shape), old.sharding)

    nnx.update(model, jax.tree.map(place, nnx.state(model, Homes)))


def reorder_experts(
    model: nnx.Module,
    optimizer: nnx.Optimizer | None,
    home: Int[Array, "L E"],
    *,
    mesh: Mesh,
    topology: Topology,
) -> None:
    """Move the experts of all layers to new homes, and the optimizer state that belongs to them: between batches.

    In place, as nnx has it; see `relibra_jax.execution.migration.migrate_experts`.

    Args:
        model: with L MoE layers in the order of its tree.
        optimizer: of the model, if it is trained.
        home: flat home slot of each expert from now on, ``Plan.home``.
        mesh: that the experts are sharded over.
        topology: of ``home``.

    Raises:
        ValueError: another number of layers, or as `migrate_experts` says; nothing has moved then.
    """
    experts = nnx.state(model, ExpertParam)
    tree, layers = {"experts": experts}, {"experts": expert_labels(experts)}
    if optimizer is not None:
        tree["optimizer"] = optimizer.opt_state
        labels = expert_labels(nnx.state(model, optimizer.wrt))
        layers["optimizer"] = optimizer_layers(optimizer.tx, optimizer.opt_state, labels)
    moved = migrate_experts(tree, get_homes(model), home, layers=layers, mesh=mesh, topology=topology)
    nnx.update(model, moved["experts"])
    if optimizer is not None:
        nnx.update(optimizer.opt_state, nnx.state(moved["optimizer"]))
    set_homes(model, home)


def _home_plan(home, parallel: ExpertParallel) -> Plan:
    """The plan of one layer that has no replicas, for quotas to be refitted."""
    topology = parallel.topology
    empty = ((0, 0), (0, 0), (0, topology.replica_slots))
    slots = jnp.pad(home_layout(home, topology), empty, constant_values=EMPTY)
    slots = jnp.broadcast_to(slots, (*parallel.group_shape, *slots.shape))
    return Plan(slots, home, jnp.zeros_like(slots))


def _swiglu_weights(key, width: int, hidden: int, dtype: DTypeLike) -> jax.Array:
    """``[3, D, F]``, each matrix scaled by the root of its inputs."""
    scale = np.sqrt([1 / width, 1 / width, 1 / hidden]).astype(np.float32)[:, None, None]
    return (jax.random.normal(key, (3, width, hidden)) * scale).astype(dtype)


def _swiglu(x, weights):
    gate, up, down = weights
    return jnp.dot(jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up), down.T)
