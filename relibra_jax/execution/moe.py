"""The layer: dispatch, grouped expert compute, combine, as the plan of one layer of one micro-batch says.

`moe_layer` is called where a dense mixture of experts would be, on global arrays under jit;
`relibra_jax.execution.replicas.fetch_replicas` at the start of the transformer layer, before attention. Plans are data:
a compiled step serves every plan of a mesh.

A plan never changes the mathematics, and nothing is dropped. Sizes and plans are checked on the host before the step
(`relibra_jax.capacity`, `relibra_jax.plan_check`); a step that runs all the same with buffers too small, under a plan
that breaks a rule or is not one of its load, or with ids that are not the load's, returns NaN rather than a result that
misses tokens, and NaN gradients.

Pipeline, context and expert-tensor parallelism are not built.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pallas_kernels import grouped_mlp
from relibra_jax.copy_slots import copy_slots
from relibra_jax.execution.dispatch import dispatch, dispatch_by_node
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS
from relibra_jax.execution.parallel import ExpertParallel, check_layer_plan, check_tokens
from relibra_jax.execution.plan_guard import is_valid, one_or_nan
from relibra_jax.execution.replicas import LayerExperts
from relibra_jax.token_split import refit_quota, source_quota
from relibra_jax.types import EMPTY, Array, LayerPlan, check_shape


def moe_layer(
    x: Float[Array, "..."],
    expert_ids: Int[Array, "..."],
    gates: Float[Array, "..."],
    experts: LayerExperts,
    plan: LayerPlan,
    parallel: ExpertParallel,
) -> Float[jax.Array, "..."]:
    """Every token's experts, wherever the plan put them, weighted by their gates and summed.

    Args:
        x: the tokens ``[B, *tokens, D]``, sharded over the ranks along the first axis.
        expert_ids: the logical experts of each token, ``[B, *tokens, K]``; EMPTY on padding, which adds nothing.
        gates: the weight of each token copy, ``[B, *tokens, K]`` float32 (`relibra_jax.execution.gating`).
        experts: what `relibra_jax.execution.replicas.fetch_replicas` returned for the same ``plan``.
        plan: the plan of this layer and micro-batch, ``[*copies, ...]``. If its load is None, the tokens' load is
            counted here (one small all-gather) and the quotas are refitted to it.
        parallel: how plans are run: mesh, topology, buffer sizes, kinds of exchange.

    Returns:
        Of the shape and dtype of ``x``. NaN for every token of a copy of the group whose plan breaks a rule or does not
        add up to its load, and for every token of a rank whose buffers are too small or whose ids are not the load's.

    Raises:
        ValueError: if shapes do not belong together, with both; or ids are outside the model, where they are known.
    """
    topology = parallel.topology
    check_layer_plan(plan, parallel)
    check_tokens("x", x, parallel)
    check_shape("expert_ids", expert_ids.shape, (*x.shape[:-1], expert_ids.shape[-1]))
    check_shape("gates", gates.shape, expert_ids.shape)
    _check_ids(expert_ids, topology.num_experts)
    ranks = (*parallel.copies, *parallel.ranks)
    matrices = (3, x.shape[-1], experts.home.shape[-1])
    check_shape("experts.home", experts.home.shape, (*ranks, topology.home_slots, *matrices))
    if experts.replicas is not None or topology.replica_slots:
        found = (*ranks, 0) if experts.replicas is None else experts.replicas.shape
        check_shape("experts.replicas", found, (*ranks, topology.replica_slots, *matrices))
    copy, token, rank = (0,) * len(ranks[:-2]), parallel.token_spec, parallel.rank_spec

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(
            *(token, token, token),
            LayerExperts(rank, None if experts.replicas is None else rank),  # type: ignore[arg-type]
            parallel.plan_spec,
        ),
        out_specs=token,
    )
    def on_rank(x, expert_ids, gates, experts, plan):
        place = (*copy, 0, 0)
        home = experts.home[place]
        # Without replicas, an empty array made of tokens: Shardy crashes (jaxlib 0.11) over an empty constant that a
        # scan's backward pass hoists out of the shard_map.
        empty = x.ravel()[:0].reshape(0, *home.shape[1:])
        replicas = empty if experts.replicas is None else experts.replicas[place]
        plan = jax.tree.map(lambda leaf: leaf[copy], plan)
        tokens, ids, weights = (each.reshape(-1, each.shape[-1]) for each in (x, expert_ids, gates))
        return _on_rank(tokens, ids, weights, home, replicas, plan, parallel).reshape(x.shape)

    return on_rank(x, expert_ids, gates, experts, plan)


def _on_rank(x, expert_ids, gates, home, replicas, plan: LayerPlan, parallel: ExpertParallel):
    """The whole layer as one rank sees it: ``x[t, D]``, ``expert_ids[t, K]``, ``gates[t, K]``."""
    topology, sizes = parallel.topology, parallel.sizes(*expert_ids.shape)
    node, local = jax.lax.axis_index(NODE), jax.lax.axis_index(LOCAL)
    own = _histogram(expert_ids, topology.num_experts)
    if plan.load is None:
        load = jax.lax.all_gather(own, RANKS).reshape(*parallel.ranks, -1)
        plan = refit_quota(plan, load, topology)
    assert plan.load is not None
    valid = is_valid(plan, topology, across_nodes=parallel.across_nodes)
    # Under an invalid plan no row moves, and NaN goes in wherever a gradient comes out.
    x, gates = x * one_or_nan(valid, x), gates * one_or_nan(valid, gates)
    sent = jnp.where(valid, source_quota(plan, topology), 0).reshape(*parallel.ranks, *plan.quota.shape)
    slot_expert = jnp.asarray(plan.slot_expert)
    if parallel.path == "flat":
        exchange = parallel.over(RANKS, sizes.flat, parallel.exchange)
        slots = slot_expert.reshape(topology.num_ranks, -1)
        sent = sent.reshape(topology.num_ranks, *slots.shape)
        moved = dispatch(x, expert_ids, gates, slots, sent, exchange, rows=sizes.rows)
    else:
        assert sizes.node is not None, "ExpertParallel refuses this"
        between = parallel.over((NODE,), sizes.node, parallel.exchange)
        inside = parallel.over((LOCAL,), sizes.local, parallel.exchange)
        mine, across = sent[node, local], parallel.across_nodes or topology.resident_slots > 0
        slot = copy_slots(expert_ids, slot_expert, mine, topology, node, across_nodes=across)
        moved = dispatch_by_node(*(x, slot, gates, sent, between, inside), rows=sizes.rows)
    with jax.named_scope("experts"):
        computed = grouped_mlp(
            *(moved.rows, (home, replicas), jnp.where(valid, moved.group_sizes, 1)),
            moved.scale * one_or_nan(valid, moved.scale),
            implementation=parallel.implementation,
        )
    out = moved.combine(computed)
    sound = valid & moved.fits & (own == plan.load[node, local]).all()
    sound &= ((expert_ids >= EMPTY) & (expert_ids < topology.num_experts)).all()
    return out * one_or_nan(sound, out)


def _check_ids(expert_ids: Array, num_experts: int) -> None:
    """Raise for the first id outside the model; nothing is known of ids that are traced."""
    if isinstance(expert_ids, jax.core.Tracer) or getattr(expert_ids, "is_fully_addressable", True) is False:
        return
    ids = np.asarray(expert_ids)
    wrong = (ids < EMPTY) | (ids >= num_experts)
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(f"expert_ids{list(place)}: {ids[place]} is outside 0..{num_experts - 1}")


def _histogram(expert_ids, num_experts):
    """Copies of each expert, ``[E]``."""
    index = jnp.where(expert_ids < 0, num_experts, expert_ids).ravel()
    return jnp.zeros(num_experts, jnp.int32).at[index].add(1, mode="drop")
