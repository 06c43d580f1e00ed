"""The modelled time of a batch under a plan, in seconds, and the time of perfect balance to which plans are compared.

    layers   attention, compute, exchange and exposed transfers of all layers and micro-batches
             (`relibra_jax.cost.step_time`), for the slowest data-parallel copy of the expert-parallel group
    push     transfers of residents: weights before each optimizer update, gradients after it; no computation hides them
    reorder  transfers of experts with their optimizer state to new homes, once, if the previous homes are given

A stage with a plan of its own over the same homes and residents, such as a recompute in larger micro-batches, takes a
call of its own: ``updates=0, recompute=True`` models one forward pass. It uses the residents' weights of the first
update, whose transfer is counted there. The time of the batch is the sum of the calls, of which only one gets
``previous_home``.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from relibra_jax.cost.copies import reorder_time, resident_time
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.cost.step_time import ACTIVATION_BYTES, LayerTime, RankTime, layer_time, rank_time
from relibra_jax.cost.traffic import Traffic, transfer_time
from relibra_jax.limits import check_integer, check_positive
from relibra_jax.types import Array, BatchPlan, Topology, check_shape

DISPATCHES = ("flat", "hierarchical")


class BatchTime(NamedTuple):
    """The modelled time of a batch in seconds, as six parts that add up to the total."""

    attention: Float[Array, "*stack"]
    """Attention, projections and shared experts."""
    compute: Float[Array, "*stack"]
    """The routed experts."""
    exchange: Float[Array, "*stack"]
    """Dispatch and combine."""
    exposed: Float[Array, "*stack"]
    """The part of the transfers of replicas that attention does not hide."""
    push: Float[Array, "*stack"]
    """The transfers of residents' weights and gradients, in all updates."""
    reorder: Float[Array, "*stack"]
    """The transfers of experts that change home before the batch."""

    @property
    def total(self) -> Float[Array, "*stack"]:
        """The seconds of the whole batch."""
        return self.attention + self.compute + self.exchange + self.exposed + self.push + self.reorder


_STATIC = ("context", "updates", "recompute", "data_parallel")


def batch_time(
    batch_plan: BatchPlan,
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
    context: float,
    scale: float = 1.0,
    visits: Int[Array, "M L P N"] | None = None,
    previous_home: Int[Array, "L E"] | None = None,
    updates: int = 1,
    recompute: bool = False,
    data_parallel: int = 1,
    float8: Bool[Array, "M L N G"] | None = None,
) -> BatchTime:
    """Model the time of a batch under its plan. The function is compiled, and works under jit and vmap as well.

    Args:
        batch_plan: the plan and its load. With data parallelism, axis M has all micro-batches of the first copy, then
            those of the second, and so on.
        topology: the expert-parallel group.
        cluster: the hardware, for example ``CLUSTERS["h100"]``.
        model: the sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``.
        context: the mean length of a sequence in tokens. This and all other arguments except arrays must be Python
            values under jit.
        scale: the number of tokens that each token stands for, which scales a small trace to the size of a real
            micro-batch.
        visits: the counts of `relibra_jax.node_visits.node_visits` for hierarchical dispatch, where a token crosses to
            a node once. None for flat dispatch, where each of its copies crosses.
        previous_home: flat home slot of each expert before the batch. None counts no reorder.
        updates: the number of optimizer updates among which the micro-batches of the batch are divided. 0 for a
            recompute alone.
        recompute: True if all micro-batches have one more forward pass, for old log-probabilities.
        data_parallel: the number of data-parallel copies of the group, which must divide M.
        float8: True for the ranks that compute their experts in float8, as in
            `relibra_jax.cost.step_time.rank_time`; only for a recompute alone.

    Raises:
        ValueError: if a number is out of range, if shapes do not fit the topology or each other, if M does not divide
            over the copies, if there is neither an update nor a recompute, or if float8 is combined with updates.
    """
    _check_numbers(context, scale)
    loads, slots = batch_plan.load.shape, batch_plan.plan.slot_expert.shape
    grid = (topology.num_nodes, topology.ranks_per_node)
    check_shape("load", loads, (*loads[:2], *grid, topology.num_experts))
    check_shape("slot_expert", slots, (*loads[:2], *grid, topology.slots))
    if previous_home is not None:
        check_shape("previous_home", previous_home.shape, batch_plan.plan.home.shape)
    if float8 is not None:
        check_shape("float8", float8.shape, slots[:-1])
        if updates:
            raise ValueError(f"float8 requires a recompute alone, updates=0, not updates={updates}")
    return _batch_time(
        batch_plan,
        topology,
        cluster=cluster,
        model=model,
        context=context,
        scale=scale,
        visits=visits,
        previous_home=previous_home,
        updates=updates,
        recompute=recompute,
        data_parallel=data_parallel,
        float8=float8,
    )


@functools.partial(jax.jit, static_argnames=_STATIC)
def _batch_time(
    batch_plan,
    topology,
    *,
    cluster,
    model,
    context,
    scale,
    visits,
    previous_home,
    updates,
    recompute,
    data_parallel,
    float8,
) -> BatchTime:
    """Compute `batch_time` after its checks; compiled once for all scales."""
    ranks = rank_time(
        batch_plan.layer_plans(),
        topology,
        cluster=cluster,
        model=model,
        context=context,
        scale=scale,
        visits=visits,
        float8=float8,
    )
    layers = layer_time(ranks, updates=updates, recompute=recompute)
    push = resident_time(batch_plan.plan, topology, cluster=cluster, model=model, updates=updates)
    reorder = jnp.zeros(())
    if previous_home is not None:
        reorder = reorder_time(batch_plan.plan.home, previous_home, topology, cluster=cluster, model=model)
    return _slowest_copy(layers, data_parallel, push, reorder)


def balanced_time(
    load: Int[Array, "M L N G E"],
    topology: Topology,
    *,
    cluster: Cluster,
    model: Model,
    context: float,
    scale: float = 1.0,
    dispatch: str = "flat",
    updates: int = 1,
    recompute: bool = False,
    data_parallel: int = 1,
) -> BatchTime:
    """Model the time of perfect balance: all ranks have equally many tokens, and routing is uniform over the experts.

    There are no replicas, no residents and no reorder. Plans are compared to this time, as in ReLibra's evaluation; no
    real plan has it.

    Args:
        load: token copies. Only the sum of each layer and micro-batch is used.
        topology: the expert-parallel group.
        cluster: the hardware.
        model: the sizes of the model.
        context: the mean length of a sequence in tokens.
        scale: the number of tokens that each token stands for.
        dispatch: ``hierarchical`` if a token crosses to a node once, however many of its experts are there, else
            ``flat``.
        updates: the number of optimizer updates of the batch, as in `batch_time`.
        recompute: True if all micro-batches have one more forward pass.
        data_parallel: the number of data-parallel copies of the group.

    Raises:
        ValueError: under the conditions of `batch_time`, or if ``dispatch`` is unknown.
    """
    _check_numbers(context, scale)
    check_dispatch(dispatch)
    return _balanced_time(
        load,
        topology,
        cluster=cluster,
        model=model,
        context=context,
        scale=scale,
        dispatch=dispatch,
        updates=updates,
        recompute=recompute,
        data_parallel=data_parallel,
    )


@functools.partial(jax.jit, static_argnames=(*_STATIC, "dispatch"))
def _balanced_time(
    load, topology, *, cluster, model, context, scale, dispatch, updates, recompute, data_parallel
) -> BatchTime:
    """Compute `balanced_time` after its checks; compiled once for all scales."""
    flops = cluster.matmul_flops * cluster.matmul_efficiency
    copies = scale * jnp.asarray(load, jnp.float32).sum((-3, -2, -1)) / topology.num_ranks
    copies = jnp.broadcast_to(
        copies[..., None, None], (*copies.shape, topology.num_nodes, topology.ranks_per_node)
    )
    away, near = 1 - 1 / topology.num_nodes, (topology.ranks_per_node - 1) / topology.num_ranks
    if dispatch == "hierarchical":
        away, near = _uniform_visits(topology, model.top_k), 1 - 1 / topology.ranks_per_node
    ranks = RankTime(
        attention=copies / model.top_k * model.token_flops(context) / flops,
        compute=copies * 2.0 * model.expert_params / flops,
        exchange=transfer_time(
            Traffic(copies * away, copies * away, copies * near, copies * near),
            float(ACTIVATION_BYTES * model.width),
            cluster,
        ),
        push=jnp.zeros_like(copies),
    )
    layers = layer_time(ranks, updates=updates, recompute=recompute)
    zero = jnp.zeros(())
    return _slowest_copy(layers, data_parallel, zero, zero)


def check_dispatch(dispatch: str) -> None:
    """Raise ValueError unless ``dispatch`` is one of `DISPATCHES`."""
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch={dispatch!r} must be one of {', '.join(DISPATCHES)}")


def _check_numbers(context: float, scale: float) -> None:
    check_positive("context", context)
    check_positive("scale", scale)


def _uniform_visits(topology: Topology, top_k: int) -> float:
    """Return the crossings per token copy under uniform routing, if a token crosses once to each node that it needs."""
    nodes, experts = topology.num_nodes, topology.num_experts
    # A token does not need a node if all its experts are on other nodes.
    elsewhere = experts - experts // nodes
    avoided = np.prod([max(elsewhere - i, 0) / (experts - i) for i in range(top_k)])
    return float((nodes - 1) * (1 - avoided) / top_k)


def _slowest_copy(times: LayerTime, data_parallel: int, push: jax.Array, reorder: jax.Array) -> BatchTime:
    """Sum the parts of the time over layers and micro-batches, for the data-parallel copy with the longest total."""
    check_integer("data_parallel", data_parallel, least=1)
    micro_batches = times.total.shape[0]
    if micro_batches % data_parallel:
        raise ValueError(
            f"{micro_batches} micro-batches must divide evenly over data_parallel={data_parallel}"
        )
    by_copy = jnp.stack([jnp.asarray(part).reshape(data_parallel, -1).sum(-1) for part in times])
    attention, compute, exchange, exposed = by_copy[:, by_copy.sum(0).argmax()]
    return BatchTime(attention, compute, exchange, exposed, push, reorder)
