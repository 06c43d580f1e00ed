"""Replicas from the host's memory: the experts that each rank keeps there, and the tables that say which it copies.

Source: the transfer engine of ForeMoE (arXiv 2606.11867), which brings experts from the host's memory and from other
devices at the same time. `relibra_jax.routing.host_share` says which replicas come from the host, and why a rank keeps
those experts and no others. All of this runs under jit, for each optimizer update::

    on_host = keep_on_host(experts, plan.home, share, sizes, parallel, dtype=..., step=step)  before its first pass
    tables = prepare_host(layer_plans, share, sizes, parallel)                                once a batch
    kept = on_host.at(step).layer(l)
    layer = layers.layer(m).layer(l)._replace(on_host=kept, host_tables=tables.layer(m).layer(l))
    layer_experts, x = fetch_replicas(experts[l], layer, x, parallel)

XLA copies while the devices compute, on a stream of its own (``make aot``). Replicas return their gradients over the
links, whatever way their weights came. Weights do not change between two optimizer steps, so a recompute and the
update after it may use the same ``on_host``. With a plan other than that of ``share``, a layer gives NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike, Float, Int, Integer

from relibra_jax.contract.types import EMPTY, Array, LayerPlan, Plan, check_shape
from relibra_jax.execution.fetch_tables import HostTables, make_fetch
from relibra_jax.execution.memory import to_host
from relibra_jax.execution.mesh import LOCAL, NODE
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import over_ranks
from relibra_jax.execution.residents import Residents, push_residents
from relibra_jax.routing.host_share import HostShare, HostSizes, keeping, without_chosen
from relibra_jax.routing.sizes import worst_case_capacities
from relibra_jax.support.argument_types import checks_arguments


@checks_arguments
def keep_on_host(
    experts: Float[Array, "L N G H three D F"],
    home: Int[Array, "L E"],
    share: HostShare,
    sizes: HostSizes,
    parallel: ExpertParallel,
    *,
    dtype: DTypeLike | None = None,
    step: Integer[Array, ""] | int | None = None,
) -> Residents:
    """Send every rank the experts that it keeps, and write them to its host memory, one layer at a time.

    Call it under jit, once for every optimizer update.

    Args:
        experts: the home experts of all layers.
        home: flat home slot of each expert, ``plan.home``.
        share: the experts that each rank keeps.
        sizes: the sizes of the share.
        parallel: the mesh and topology.
        dtype: the dtype of the kept weights, which must be that in which layers compute. None takes that of the
            experts.
        step: the step number of the optimizer, for `relibra_jax.execution.Residents.at`.

    Returns:
        The kept experts, ``[L, *data, N, G, K, 3, D, F]`` in host memory.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    slots = share.kept.shape[-1]
    check_shape("share.kept", share.kept.shape, (len(home), *parallel.ranks, slots))
    topology = keeping(parallel.topology, slots)
    capacities = dataclasses.replace(worst_case_capacities(1, 1, topology), push=sizes.push)
    sender = dataclasses.replace(parallel, topology=topology, capacities=capacities, across_nodes=None)

    def one_layer(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        experts, home, kept = inputs
        at_home = jnp.zeros((*parallel.ranks, topology.home_slots), jnp.int32)
        resident = jnp.concatenate([at_home, kept], -1)[None, None]
        plan = Plan(resident, home[None], jnp.zeros_like(resident))
        return to_host(push_residents([experts], plan, sender, dtype=dtype).weights[0])

    with jax.named_scope("keep_on_host"):
        weights = jax.lax.map(one_layer, (experts, jnp.asarray(home), jnp.asarray(share.kept)))
    return Residents(weights, jnp.asarray(share.kept), None if step is None else jnp.asarray(step, jnp.int32))


@checks_arguments
@functools.partial(jax.jit, static_argnames=("sizes", "parallel"))
def prepare_host(
    plans: LayerPlan, share: HostShare, sizes: HostSizes, parallel: ExpertParallel
) -> HostTables:
    """Compute the tables of all layers of all micro-batches, once a batch.

    Args:
        plans: the layer plans, stacked ``[M, L, *data]``.
        share: the replicas that come from the host, and the experts that each rank keeps.
        sizes: the sizes of the share.
        parallel: the mesh, topology and exchange of the replicas.

    Returns:
        The tables, stacked ``[M, L]``.

    Raises:
        ValueError: if the share has other shapes than the plans.
    """
    slots = np.shape(plans.slot_expert)
    check_shape("share.from_host", share.from_host.shape, (*slots[:-1], parallel.topology.replica_slots))
    check_shape("share.kept", share.kept.shape, (slots[1], *parallel.ranks, share.kept.shape[-1]))
    group = (0,) * len(parallel.data_axes)
    links_parallel = parallel.for_links(sizes) if sizes.links else None

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(parallel.plan_spec, parallel.plan_spec, jax.P()),
        out_specs=parallel.rank_spec,
    )
    def on_rank(plan, from_host, kept):
        plan, from_host = jax.tree.map(lambda leaf: leaf[group], (plan, from_host))
        own = jax.lax.axis_index(NODE), jax.lax.axis_index(LOCAL)
        replicas = plan.slot_expert[own][parallel.topology.held_slots :]
        copied, sent = (
            _first(chosen, count)
            for chosen, count in (
                (from_host[own], sizes.copies),
                (~from_host[own] & (replicas != EMPTY), sizes.links),
            )
        )
        expert = jnp.where(copied == EMPTY, EMPTY, replicas[copied])
        same = (kept[own][None] == expert[:, None]) & (expert != EMPTY)[:, None]
        slot = jnp.where(same.any(1), jnp.argmax(same, 1).astype(jnp.int32), EMPTY)
        links = None
        if links_parallel is not None:
            topology, (exchange, exports) = links_parallel.topology, links_parallel.replica_exchange()
            rest = without_chosen(plan, from_host, parallel.topology)
            rest = rest._replace(slot_expert=rest.slot_expert[..., : topology.slots])
            across = bool(parallel.across_nodes)
            links = make_fetch(rest, exchange, exports, topology, across_nodes=across)
        place = jnp.concatenate([copied, sent])
        return over_ranks(HostTables(slot, place, links, sizes), parallel)

    def one_layer(inputs):
        plan, from_host, kept = inputs
        return on_rank(plan._replace(load=None), from_host, kept)

    def micro_batch(inputs):
        plans, from_host = inputs
        return jax.lax.map(one_layer, (plans, from_host, jnp.asarray(share.kept)))

    plans = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), plans._replace(load=None))
    return jax.lax.map(micro_batch, (plans, jnp.asarray(share.from_host)))


def _first(chosen: jax.Array, count: int) -> jax.Array:
    """Return the first ``count`` places at which ``chosen`` is True, EMPTY if there are fewer."""
    place = jnp.argsort(~chosen, stable=True)[:count].astype(jnp.int32)
    return jnp.where(chosen[place], place, EMPTY)
