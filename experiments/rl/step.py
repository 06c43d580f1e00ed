"""The balanced step: log-probabilities recomputed and the policy updated under recorded routing and one plan.

`recompute` and `update` scan over the micro-batches of a `relibra_jax.nnx.PreparedBatch`; `update` accumulates
gradients and lets the optimizer step once. Both return the rows that every slot computed, which
`relibra_jax.nnx.check_executed` holds to the plan's quotas, micro-batch by micro-batch, exactly.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.agent import Agent, token_values
from experiments.rl.algorithms import Critic
from experiments.rl.losses import PolicyLoss, policy_loss, supervised_loss, value_loss
from experiments.rl.policy import token_log_probs
from relibra_jax.execution import PreparedLayer, Residents
from relibra_jax.execution.gating import balance_loss, select_experts
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models import LanguageModel, ModelOutput
from relibra_jax.nnx import PreparedBatch, RowPacking, accumulate_gradients
from relibra_jax.nnx import prepare_residents as prepare_residents_of
from relibra_jax.replay import id_dtype, sample_load
from relibra_jax.types import Array, RoutingReplay


class CriticBatch(NamedTuple):
    """What the critic learns from the samples of a batch, laid out as they are."""

    weight: Float[Array, "*M B T"]
    """From `experiments.rl.losses.token_weights`; 0 where there is nothing to learn."""
    target: Float[Array, "*M B T"]
    """The values that it learns."""
    old_value: Float[Array, "*M B T"]
    """From `recompute`."""


class TrainingBatch(NamedTuple):
    """The samples of a batch and what is learned from them: ``[B, ...]`` on the host, ``[M, B, ...]`` on the ranks,
    where `PreparedBatch.to_ranks` puts them by micro-batch. What is not known, or not needed, is None."""

    tokens: Int[Array, "*M B T"]
    """The samples, aligned to the left."""
    mask: Bool[Array, "*M B T"]
    """True on tokens that the model is run on."""
    expert_ids: Integer[Array, "*M B T L K"] | None = None
    """The recorded routing; None if there is no record."""
    weight: Float[Array, "*M B T"] | None = None
    """From `experiments.rl.losses.token_weights`; 0 where there is nothing to learn."""
    advantage: Float[Array, "*M B T"] | None = None
    """From `experiments.rl.algorithms`; None for supervised learning."""
    old_log_prob: Float[Array, "*M B T"] | None = None
    """From `recompute`; None for supervised learning."""
    critic: CriticBatch | None = None
    """What the critic learns; None without one, and for supervised learning."""
    packing: RowPacking | None = None
    """Where rows hold several samples (`PreparedBatch.packing`), which token is of which; ``B`` counts rows then."""


class Recomputed(NamedTuple):
    """What a recompute returns of its micro-batches, on the devices."""

    log_prob: Float[Array, "M B T"]
    """float32 log-probabilities, entry t of token t."""
    load: Int[Array, "M L N G E"]
    """The load that ran."""
    slot_rows: Int[Array, "M L N G S"]
    """Rows that every slot computed."""
    expert_ids: Integer[Array, "M B T L K"] | None
    """The routing that ran, in the smallest dtype that holds it, where it was to be recorded."""
    value: Float[Array, "M B T"] | None
    """float32 values of the states before tokens, `experiments.rl.agent.token_values`; None without a critic."""


class StepMetrics(NamedTuple):
    """What an update reports of its batch, on the devices."""

    policy: PolicyLoss
    """Summed over the batch; supervised learning has only the loss itself."""
    critic_loss: Float[Array, ""]
    """The critic's loss, summed over the batch and before its factor; 0 without a critic."""
    gradient_norm: Float[Array, ""]
    """The norm of the gradient of the whole batch, before it is cut."""
    load: Int[Array, "M L N G E"]
    """Token copies of the experts that tokens really went to, counted in the step."""
    slot_rows: Int[Array, "M L N G S"]
    """Rows that every slot computed."""
    routing_changed: Int[Array, "M L"]
    """Expert choices in which the live router and the record differ; 0 if there is no record."""


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Clip:
    """The clip of the ratio of new to old probability in the policy loss. The defaults are DAPO's clip-higher.

    Raises:
        ValueError: if ``low`` is not in 0..1, or ``high`` is negative.
    """

    low: float = 0.2
    """The distance below 1 at which the ratio is clipped."""
    high: float = 0.28
    """The distance above 1 at which the ratio is clipped. GRPO uses 0.2."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"clip.low={self.low} must be at least 0 and at most 1")
        if not self.high >= 0:
            raise ValueError(f"clip.high={self.high} must be at least 0")


prepare_residents = nnx.jit(prepare_residents_of)
"""`relibra_jax.nnx.prepare_residents`, for the residents that a recompute and the first update after it share."""


@nnx.jit(static_argnames=("temperature", "record"))
def recompute(
    agent: Agent,
    batch: PreparedBatch,
    samples: TrainingBatch,
    residents: Residents | None = None,
    *,
    temperature: float,
    record: bool = False,
) -> Recomputed:
    """Log-probabilities of the batch's tokens, and their values if there is a critic, under the agent as it is.

    Args:
        agent: the policy and its critic.
        batch: the prepared batch, in replay of the samples' recorded routing or live.
        samples: the samples, on the ranks.
        residents: from `prepare_residents`, if the batch has residents.
        temperature: the temperature that responses were sampled at.
        record: whether to return the routing that ran.
    """
    graph, state = nnx.split(agent)

    def one(_, micro_batch):
        samples, layers = micro_batch
        if residents is not None:
            layers = layers._replace(residents=residents.weights)
        agent = nnx.merge(graph, state)
        output, log_prob = _run(agent.policy, samples, layers, batch.parallel, temperature)
        load = _count_load(output, samples.mask, batch.parallel)
        ids = output.expert_ids.astype(id_dtype(batch.parallel.topology.num_experts)) if record else None
        value = None if agent.critic is None else token_values(agent.critic, output.hidden)
        return None, Recomputed(log_prob, load, output.slot_rows, ids, value)

    return jax.lax.scan(one, None, (samples, batch.layers()))[1]


@nnx.jit(static_argnames=("temperature", "clip", "critic", "balance"), donate_argnames=("residents",))
def update(
    agent: Agent,
    optimizer: nnx.Optimizer,
    batch: PreparedBatch,
    samples: TrainingBatch,
    batch_load: Int[Array, "L E"],
    residents: Residents | None = None,
    *,
    temperature: float = 1.0,
    clip: Clip | None = None,
    critic: Critic | None = None,
    balance: float = 0.0,
) -> StepMetrics:
    """One optimizer step on the gradient of the whole batch, accumulated over its micro-batches. In place.

    Gradients are accumulated in float32; residents are pushed and their gradients returned in the same program.

    Args:
        agent: the policy and its critic.
        optimizer: the optimizer of the agent.
        batch: the prepared batch, in replay of the samples' recorded routing or live.
        samples: the samples with what they teach, on the ranks.
        batch_load: token copies of each expert in the whole batch, for the load-balancing loss.
        residents: what `prepare_residents` made at this step of the optimizer, donated; None pushes here.
        temperature: the temperature that responses were sampled at.
        clip: the clip of the policy loss; None learns by supervision.
        critic: the clip of the critic's loss and its factor, where samples have something for it.
        balance: the factor of the load-balancing loss, which is the mean over layers and 1 for even loads.
    """

    def objective(agent, samples, layers):
        model = agent.policy
        output, log_prob = _run(model, samples, layers, batch.parallel, temperature)
        if clip is None:
            policy = PolicyLoss(supervised_loss(log_prob, samples.weight), jnp.zeros(()), jnp.zeros(()))
        else:
            of_policy = (log_prob, samples.old_log_prob, samples.advantage, samples.weight)
            policy = policy_loss(*of_policy, clip_low=clip.low, clip_high=clip.high)
        of_critic, factor = jnp.zeros(()), 0.0
        if samples.critic is not None and critic is not None:
            weight, target, old_value = samples.critic
            value = token_values(agent.critic, output.hidden, weight > 0)
            of_critic, factor = value_loss(value, old_value, target, weight, clip=critic.clip), critic.factor
        of_layer = functools.partial(balance_loss, gating=model.config.gating, mask=samples.mask)
        uneven = jax.vmap(of_layer, in_axes=(-2, 0))(output.router_logits, batch_load).mean()
        load = _count_load(output, samples.mask, batch.parallel)
        counted = (load, output.slot_rows, _count_changes(model, output, samples))
        return policy.loss + factor * of_critic + balance * uneven, ((policy, of_critic), *counted)

    gradients, (shares, *counted) = accumulate_gradients(
        agent, objective, batch, samples, residents=residents
    )
    optimizer.update(agent, gradients)
    policy, of_critic = jax.tree.map(lambda share: share.sum(0), shares)
    return StepMetrics(policy, of_critic, optax.tree.norm(gradients), *counted)


def _run(
    model: LanguageModel,
    samples: TrainingBatch,
    layers: PreparedLayer | None,
    parallel: ExpertParallel,
    temperature: float,
) -> tuple[ModelOutput, jax.Array]:
    """The policy on one micro-batch, in replay or live, and the log-probabilities of its tokens."""
    expert_ids = None if layers is None else samples.expert_ids
    packing = samples.packing
    output = model(samples.tokens, samples.mask, expert_ids, layers, parallel=parallel, packing=packing)
    log_prob = token_log_probs(output.logits, samples.tokens, temperature=temperature, packing=packing)
    return output, log_prob


def _count_load(output: ModelOutput, mask: Array, parallel: ExpertParallel) -> Int[jax.Array, "L N G E"]:
    """The routing that ran in one micro-batch."""
    experts = parallel.topology.num_experts
    by_sample = sample_load(RoutingReplay(output.expert_ids, mask), num_experts=experts)
    by_rank = by_sample.reshape(*parallel.ranks, -1, *by_sample.shape[1:]).sum(2, dtype=jnp.int32)
    return jnp.moveaxis(by_rank, 2, 0)


def _count_changes(model: LanguageModel, output: ModelOutput, samples: TrainingBatch) -> Int[jax.Array, " L"]:
    """In how many expert choices of one micro-batch the live router disagrees with the record."""
    if samples.expert_ids is None:
        return jnp.zeros(model.config.moe_layers, jnp.int32)
    bias = model.layers.experts.correction_bias
    select = functools.partial(select_experts, gating=model.config.gating)
    if bias is None:
        live = select(output.router_logits)
    else:
        of_layer = jax.vmap(lambda logits, bias: select(logits, bias=bias), in_axes=(-2, 0), out_axes=-2)
        live = of_layer(output.router_logits, bias[...])
    recorded = jnp.asarray(samples.expert_ids, jnp.int32)
    changed = (live[..., None] != recorded[..., None, :]).all(-1) & samples.mask[..., None, None]
    return changed.sum((0, 1, 3), dtype=jnp.int32)
