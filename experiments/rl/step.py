"""The balanced step: log-probabilities recomputed and the policy updated under the rollout's routing and one plan.

`recompute` and `update` scan over the same micro-batches, made in `experiments.rl.balance`; `update` accumulates
gradients and lets the optimizer step once. Both count the routing that ran: `check_executed` holds the plan to it,
micro-batch by micro-batch, exactly.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.balance import Foresight
from experiments.rl.losses import PolicyLoss, policy_loss, supervised_loss
from experiments.rl.policy import Policy, PolicyConfig, PolicyOutput, Replayed, token_log_probs
from relibra_jax.execution.gating import balance_loss, select_experts
from relibra_jax.execution.moe import ExpertParallel
from relibra_jax.plan import check_plan
from relibra_jax.replay import sample_load
from relibra_jax.types import Array, Plan, RoutingReplay, Topology


class Rows(NamedTuple):
    """Samples where they are computed."""

    tokens: Int[Array, "M N G b T"]
    mask: Bool[Array, "M N G b T"]
    """True on tokens that the model is run on."""
    expert_ids: Integer[Array, "M N G b T L K"] | None
    """As recorded in the rollout; None if there was none."""


class Goal(NamedTuple):
    """What the update learns from every token."""

    weight: Float[Array, "M N G b T"]
    """From `experiments.rl.losses.token_weights`; 0 where there is nothing to learn."""
    advantage: Float[Array, "M N G b"] | None
    """None for supervised learning."""
    old_log_prob: Float[Array, "M N G b T"] | None
    """From `recompute`; None for supervised learning."""


class Ran(NamedTuple):
    """What ran, counted in the step."""

    load: Int[Array, "M L N G E"]
    """Token copies of the experts that tokens really went to."""
    changed: Int[Array, "M L"]
    """Expert choices in which the live router and the replay differ; 0 if there is no replay."""


class Learned(NamedTuple):
    """What an update reports."""

    loss: PolicyLoss
    """Of the whole batch; supervised learning has only the loss itself."""
    gradient_norm: Float[Array, ""]
    ran: Ran


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Clip:
    """How far the ratio of new to old probability may go; DAPO's clip-higher by default."""

    low: float = 0.2
    high: float = 0.28
    """0.2 is GRPO's."""


@nnx.jit(static_argnames=("parallel", "temperature"))
def recompute(
    model: Policy, rows: Rows, known: Foresight | None, *, parallel: ExpertParallel, temperature: float
) -> tuple[Float[jax.Array, "M N G b T"], Ran]:
    """Log-probabilities of the batch's tokens under the model as it is.

    Args:
        model: whose experts lie in the plan's homes.
        rows: of the batch.
        known: the plan, for replay; None routes live.
        parallel: with sizes that hold the batch.
        temperature: of the rollout.

    Returns:
        float32, entry t is of token t; and what ran.
    """
    graph, state = nnx.split(model)

    def one(_, micro_batch):
        rows, known = micro_batch
        log_prob, ran, _ = _run(nnx.merge(graph, state), rows, known, None, parallel, temperature)
        return None, (log_prob, ran)

    return jax.lax.scan(one, None, (rows, _by_micro_batch(known, len(rows.tokens))))[1]


@nnx.jit(static_argnames=("parallel", "temperature", "clip", "balance"))
def update(
    model: Policy,
    optimizer: nnx.Optimizer,
    rows: Rows,
    goal: Goal,
    known: Foresight | None,
    batch_load: Int[Array, "L E"] | None = None,
    *,
    parallel: ExpertParallel,
    temperature: float = 1.0,
    clip: Clip | None = None,
    balance: float = 0.0,
) -> Learned:
    """One optimizer step on the gradient of the whole batch, accumulated over its micro-batches. In place.

    Args:
        model: whose experts lie in the plan's homes.
        optimizer: of the model.
        rows: of the batch.
        goal: what its tokens teach.
        known: the plan, for replay; None routes live.
        batch_load: token copies of each expert in the whole batch, for the load-balancing loss; None leaves it out.
        parallel: with sizes that hold the batch.
        temperature: of the rollout.
        clip: of the policy loss; None learns by supervision.
        balance: of the load-balancing loss, which is the mean over layers and 1 for even loads.
    """
    graph, params, *rest = nnx.split(model, nnx.Param, ...)

    def share(params, rows, known, goal):
        model = nnx.merge(graph, params, *rest)
        log_prob, ran, uneven = _run(model, rows, known, batch_load, parallel, temperature)
        if clip is None:
            parts = PolicyLoss(supervised_loss(log_prob, goal.weight), jnp.zeros(()), jnp.zeros(()))
        else:
            of_tokens = (log_prob, goal.old_log_prob, goal.advantage, goal.weight)
            parts = policy_loss(*of_tokens, clip_low=clip.low, clip_high=clip.high)
        return parts.loss + balance * uneven, (parts, ran)

    def accumulate(gradients, micro_batch):
        more, reported = jax.grad(share, has_aux=True)(params, *micro_batch)
        return jax.tree.map(jnp.add, gradients, more), reported

    micro_batches = (rows, _by_micro_batch(known, len(rows.tokens)), goal)
    gradients, (shares, ran) = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), micro_batches)
    optimizer.update(model, gradients)
    shares = jax.tree.map(lambda share: share.sum(0), shares)
    return Learned(shares, optax.tree.norm(gradients), ran)


def check_executed(ran: Ran, known: Foresight, topology: Topology, *, intra_node: bool) -> None:
    """Raise unless the plan's quotas are exactly what ran, in every micro-batch and layer.

    The layer sends each slot its quota of what is there, and turns to NaN where a rank's ids are not those of the load
    or buffers overflow, which the loss would show. So quotas were executed if the routing that ran is, rank by rank and
    expert by expert, the load that the plan was made for, and the quotas add up to it.

    Args:
        ran: from `recompute` or `update`.
        known: the batch's plan.
        topology: of the plan.
        intra_node: whether replicas have to stay in their home's node.

    Raises:
        RuntimeError: the first place where they differ, with both numbers.
    """
    found, planned = np.asarray(ran.load), np.asarray(known.load)
    if (found != planned).any():
        place = tuple(int(index) for index in np.argwhere(found != planned)[0])
        raise RuntimeError(
            "micro-batch {}, layer {}, node {}, rank {}: expert {}".format(*place)
            + f" ran {found[place]} token copies, the plan was made for {planned[place]}"
        )
    try:
        check_plan(known.plan, found, topology, intra_node=intra_node)
    except ValueError as error:
        raise RuntimeError(f"the plan is not what ran: {error}") from error


def _by_micro_batch(known: Foresight | None, micro_batches: int) -> Foresight | None:
    """With a leading axis of micro-batches at every leaf, for a scan."""
    if known is None:
        return None
    plan = known.plan
    home = jnp.broadcast_to(plan.home, (micro_batches, *plan.home.shape))
    return Foresight(Plan(plan.slot_expert, home, plan.quota), known.load)


def _run(
    model: Policy,
    rows: Rows,
    known: Foresight | None,
    batch_load: Int[Array, "L E"] | None,
    parallel: ExpertParallel,
    temperature: float,
) -> tuple[jax.Array, Ran, jax.Array]:
    """Log-probabilities of one micro-batch, in replay or live, what ran, and its share of the load-balancing loss."""
    replay = None
    if known is not None:
        assert rows.expert_ids is not None, "a plan is made from recorded routing"
        replay = Replayed(rows.expert_ids, known.plan, known.load)
    output = model(rows.tokens, rows.mask, parallel=parallel, replay=replay)
    log_prob = token_log_probs(output.logits, rows.tokens, temperature=temperature)
    uneven = jnp.zeros(())
    if batch_load is not None:
        of_layer = functools.partial(balance_loss, gating=model.config.gating, mask=rows.mask)
        uneven = jax.vmap(of_layer, in_axes=(-2, 0))(output.router_logits, batch_load).mean()
    return log_prob, _count(output, rows, model.config, replayed=known is not None), uneven


def _count(output: PolicyOutput, rows: Rows, config: PolicyConfig, *, replayed: bool) -> Ran:
    """The routing of one micro-batch: what ran, and in how much the live router disagrees with the replay."""
    shape = rows.mask.shape
    ids = output.expert_ids.reshape(-1, *output.expert_ids.shape[-3:])
    by_sample = sample_load(
        RoutingReplay(ids, rows.mask.reshape(-1, shape[-1])), num_experts=config.num_experts
    )
    load = by_sample.reshape(*shape[:3], config.layers, -1).sum(2, dtype=jnp.int32)
    changed = jnp.zeros(config.layers, jnp.int32)
    if rows.expert_ids is not None:
        live = select_experts(output.router_logits, config.gating) if replayed else output.expert_ids
        recorded = jnp.asarray(rows.expert_ids, jnp.int32)[..., None, :]
        new = (jnp.asarray(live, jnp.int32)[..., None] != recorded).all(-1) & rows.mask[..., None, None]
        changed = new.sum((0, 1, 2, 3, 5), dtype=jnp.int32)
    return Ran(jnp.moveaxis(load, 2, 0), changed)
