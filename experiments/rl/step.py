"""The compiled programs of a balanced step: the recompute of log-probabilities, and the update of the agent.

`recompute` and `update` scan over the micro-batches of a `relibra_jax.nnx.PreparedBatch`, which replays recorded
routing under a plan or routes live. `update` accumulates gradients and takes one optimizer step. Both return the number
of rows that every slot computed, so that `relibra_jax.nnx.check_executed` can compare it exactly with the quotas.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Integer

from experiments.rl.losses import PolicyLoss, TokenResponses, supervised_loss
from experiments.rl.objective import Losses, Terms, policy_terms
from experiments.rl.optimizer import clip_factor
from experiments.rl.policy import Agent
from relibra_jax.contract.replay import id_dtype, sample_load
from relibra_jax.contract.types import Array, RoutingReplay
from relibra_jax.execution import PreparedLayer, Residents
from relibra_jax.execution.gating import balance_loss, select_experts
from relibra_jax.execution.memory import in_host_memory, take, to_host
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models import LanguageModel, ModelOutput, token_log_probs, token_log_probs_and_entropies
from relibra_jax.nnx import PreparedBatch, SequencePacking, accumulate_gradients
from relibra_jax.nnx import prepare_residents as prepare_residents_of
from relibra_jax.nnx.group_totals import gather_experts
from relibra_jax.nnx.host_state import apply_gradients, on_device


class TrainingBatch(NamedTuple):
    """The samples of a batch and their training targets.

    Arrays are ``[B, ...]`` on the host, and ``[M, B, ...]`` on the ranks, where `PreparedBatch.to_ranks` puts them by
    micro-batch. Fields that are unknown or not needed are None.
    """

    tokens: Int[Array, "*M B T"]
    """The tokens of the samples, aligned to the left."""
    mask: Bool[Array, "*M B T"]
    """True on tokens that the model runs on."""
    expert_ids: Integer[Array, "*M B T L K"] | None = None
    """The recorded routing. None without a record."""
    weights: Float[Array, "*M B T"] | None = None
    """The weight of every token, from `experiments.rl.losses.token_weights`. 0 for tokens that are not learned from."""
    advantages: Float[Array, "*M B T"] | None = None
    """The advantages, from `experiments.rl.algorithms`. None in supervised learning."""
    old_log_probs: Float[Array, "*M B T"] | None = None
    """The log-probabilities before the updates, from `recompute`. None in supervised learning."""
    reference_log_probs: Float[Array, "*M B T"] | None = None
    """The log-probabilities under the reference, from `recompute`. None without one, and in supervised learning."""
    packing: SequencePacking | None = None
    """The samples in each sequence, if sequences hold several (`PreparedBatch.packing`); ``B`` is then the number of
    sequences."""


class RecomputeOutput(NamedTuple):
    """The output of `recompute` for its micro-batches, on the devices."""

    log_probs: Float[Array, "M B T"]
    """The log-probabilities, float32. Entry t belongs to token t."""
    load: Int[Array, "M L N G E"]
    """The load of the routing that ran; micro-batches of further data-parallel groups are additional entries of M."""
    slot_rows: Int[Array, "M L *data N G S"]
    """The number of rows that every slot computed."""
    expert_ids: Integer[Array, "M B T L K"] | None
    """The routing that ran, in the smallest dtype that holds it. None unless it is recorded."""
    hidden: Float[Array, "M B T D"] | None
    """The last hidden vectors of the policy, for `experiments.rl.critic`, in the memory of the samples. None unless
    they are asked for."""


class StepMetrics(NamedTuple):
    """The metrics of an update, on the devices."""

    policy: PolicyLoss
    """The policy loss and its statistics, summed over the update. Supervised learning has only the loss."""
    gradient_norm: Float[Array, ""]
    """The norm of the update's gradient, before clipping."""
    load: Int[Array, "M L N G E"]
    """The load of the routing that ran, counted in the step; as in `RecomputeOutput`."""
    slot_rows: Int[Array, "M L *data N G S"]
    """The number of rows that every slot computed."""
    routing_changed: Int[Array, "M L"]
    """The number of expert choices in which the live router differs from the record. 0 without a record."""
    tokens_not_finite: Int[Array, ""]
    """The number of tokens whose log-probability is not finite: a layer rejected its plan or its buffers."""
    skipped: Int[Array, ""]
    """The number of updates that changed nothing because a loss or the gradient was not finite: 0 or 1 for one."""
    updates: Int[Array, ""]
    """The number of updates: 1 for one."""
    entropy: Float[Array, ""] | None = None
    """The entropy of the policy, a weighted sum over tokens. None in supervised learning."""
    reference_kl: Float[Array, ""] | None = None
    """The divergence from the reference, a weighted sum over tokens. None without one."""


prepare_residents = nnx.jit(prepare_residents_of)
"""`relibra_jax.nnx.prepare_residents` under jit, for residents that a recompute and the first update after it share."""


@nnx.jit(static_argnames=("temperature", "record", "hidden"), graph_updates=False)
def recompute(
    agent: Agent,
    batch: PreparedBatch,
    samples: TrainingBatch,
    residents: Residents | None = None,
    step: Integer[Array, ""] | None = None,
    *,
    temperature: float,
    record: bool = False,
    hidden: bool = False,
) -> RecomputeOutput:
    """Compute the log-probabilities of the batch's tokens under the current agent.

    Args:
        agent: the policy.
        batch: the prepared batch, which replays the samples' recorded routing or routes live.
        samples: the samples, on the ranks.
        residents: the residents that `prepare_residents` made. None if the batch has none.
        step: the step number of the optimizer, with residents.
        temperature: the sampling temperature of the responses.
        record: whether to return the routing that ran.
        hidden: whether to return the last hidden vectors.

    Returns:
        The log-probabilities, and the counts of what ran.
    """
    graph, state = nnx.split(agent)
    state = gather_experts(state, batch.parallel)

    def run_micro_batch(_, number):
        one, layers = take((samples, batch.layers()), number)
        if residents is not None:
            assert step is not None, "residents belong to a step of the optimizer"
            assert layers is not None, "batches with residents have prepared layers"
            layers = layers._replace(residents=residents.at(step))
        agent = nnx.merge(graph, state)
        output = _run(agent.policy, one, layers, batch.parallel)
        log_probs = token_log_probs(
            *(agent.policy, output.hidden, one.tokens),
            parallel=batch.parallel,
            temperature=temperature,
            packing=one.packing,
        )
        load = _count_load(output, one.mask, batch.parallel)
        ids = output.expert_ids.astype(id_dtype(batch.parallel.topology.num_experts)) if record else None
        vectors = None
        if hidden:
            vectors = to_host(output.hidden) if in_host_memory(samples.tokens) else output.hidden
        return None, RecomputeOutput(log_probs, load, output.slot_rows, ids, vectors)

    output = jax.lax.scan(run_micro_batch, None, jnp.arange(len(samples.tokens)))[1]
    return output._replace(load=_as_micro_batches(output.load))


@nnx.jit(
    static_argnames=("losses", "balance", "largest_gradient"),
    donate_argnames=("agent", "optimizer", "residents"),
)
def update(
    agent: Agent,
    optimizer: nnx.Optimizer,
    batch: PreparedBatch,
    samples: TrainingBatch,
    batch_load: Int[Array, "L E"],
    residents: Residents | None = None,
    *,
    losses: Losses | None = None,
    balance: float = 0.0,
    largest_gradient: float = 1.0,
) -> StepMetrics:
    """Take one optimizer step on the gradient of all micro-batches, in place.

    If a loss or the norm of the gradient is not finite, the agent and the optimizer with its step number stay as they
    are (`relibra_jax.nnx.host_state.apply_gradients`).

    The arrays of the agent and the optimizer are donated, so their old values take no memory beside the new ones.
    Gradients are accumulated in float32. The same program pushes the residents and returns their gradients. Parameters
    and optimizer state may be in host memory (`relibra_jax.nnx.host_state`).

    Args:
        agent: the policy.
        optimizer: the optimizer of the agent.
        batch: the prepared batch, which replays the samples' recorded routing or routes live.
        samples: the samples with their training targets, on the ranks.
        batch_load: the token copies of each expert in the update, for the load-balancing loss.
        residents: the residents that `prepare_residents` made at this step of the optimizer, donated. None pushes them
            in this program.
        losses: the losses of learning from responses. None trains with supervision.
        balance: the factor of the load-balancing loss, which is a mean over layers and is 1 for even loads.
        largest_gradient: the norm to which larger gradients are clipped.

    Returns:
        The metrics of the update.
    """

    def objective(agent, samples, layers):
        model = agent.policy
        output = _run(model, samples, layers, batch.parallel)
        loss, terms, log_probs = _policy_loss(model, output, samples, batch.parallel, losses)
        layer_loss = functools.partial(balance_loss, gating=model.config.gating, mask=samples.mask)
        unevenness = jax.vmap(layer_loss, in_axes=(-2, 0))(output.router_logits, batch_load).mean()
        load = _count_load(output, samples.mask, batch.parallel)
        tokens_not_finite = (samples.mask & ~jnp.isfinite(log_probs)).sum(dtype=jnp.int32)
        changes = _count_changes(model, output, samples, batch.parallel)
        return loss + balance * unevenness, (terms, load, output.slot_rows, changes, tokens_not_finite)

    gradients, (shares, load, slot_rows, changes, tokens_not_finite) = accumulate_gradients(
        on_device(agent, batch.parallel.mesh),
        objective,
        batch,
        samples,
        residents=residents,
        step=optimizer.step[...],
        in_place=True,
    )
    norm = optax.tree.norm(gradients)
    terms = jax.tree.map(lambda share: share.sum(0), shares)
    factor = jnp.where(jnp.isfinite(terms.policy.loss), clip_factor(norm, largest_gradient), jnp.nan)
    apply_gradients(agent, optimizer, gradients, batch.parallel.mesh, factor=factor)
    return StepMetrics(
        terms.policy,
        norm,
        _as_micro_batches(load),
        slot_rows,
        changes,
        tokens_not_finite.sum(),
        (~jnp.isfinite(factor)).astype(jnp.int32),
        jnp.ones((), jnp.int32),
        entropy=terms.entropy,
        reference_kl=terms.reference_kl,
    )


def _policy_loss(
    model: LanguageModel,
    output: ModelOutput,
    samples: TrainingBatch,
    parallel: ExpertParallel,
    losses: Losses | None,
) -> tuple[jax.Array, Terms, jax.Array]:
    """Compute the loss of the policy in one micro-batch, its terms, and the log-probabilities of all tokens."""
    hidden, tokens, weights, packing = output.hidden, samples.tokens, samples.weights, samples.packing
    assert weights is not None
    if losses is None:
        log_probs = token_log_probs(model, hidden, tokens, parallel=parallel, packing=packing)
        supervised = supervised_loss(log_probs, weights)
        return supervised, Terms(PolicyLoss(supervised, jnp.zeros(()), jnp.zeros(()))), log_probs
    log_probs, entropies = token_log_probs_and_entropies(
        *(model, hidden, tokens), parallel=parallel, temperature=losses.temperature, packing=packing
    )
    assert samples.old_log_probs is not None
    assert samples.advantages is not None
    loss, terms = policy_terms(
        *(log_probs, entropies, samples.old_log_probs, samples.advantages, weights),
        samples.reference_log_probs,
        losses=losses,
        responses=_responses(samples, losses.num_samples) if losses.kind == "gspo" else None,
    )
    return loss, terms, log_probs


def _responses(samples: TrainingBatch, num_samples: int) -> TokenResponses:
    """Return the response of each token of a micro-batch: a sample of its own, or one of several in a sequence."""
    if samples.packing is not None:
        return TokenResponses(jnp.asarray(samples.packing.segments), num_samples)
    sequences = len(samples.tokens)
    return TokenResponses(jnp.arange(sequences)[:, None], sequences)


def join_metrics(metrics: Sequence[StepMetrics]) -> StepMetrics:
    """Join the metrics of the updates of one pass: average losses and norms, and concatenate or add up the counts."""
    return metrics[0] if len(metrics) == 1 else _join_metrics(list(metrics))


@jax.jit
def _join_metrics(metrics: list[StepMetrics]) -> StepMetrics:
    def join(*values):
        if jnp.ndim(values[0]):
            return jnp.concatenate(values)
        numbers = jnp.stack(values)
        return numbers.sum() if jnp.issubdtype(numbers.dtype, jnp.integer) else numbers.mean()

    return jax.tree.map(join, *metrics)


def _run(
    model: LanguageModel, samples: TrainingBatch, layers: PreparedLayer | None, parallel: ExpertParallel
) -> ModelOutput:
    """Run the policy on one micro-batch, in replay or live."""
    expert_ids = None if layers is None else samples.expert_ids
    return model(
        *(samples.tokens, samples.mask, expert_ids, layers), parallel=parallel, packing=samples.packing
    )


def _count_load(
    output: ModelOutput, mask: Array, parallel: ExpertParallel
) -> Int[jax.Array, "groups L N G E"]:
    """Count the load of the routing that ran in one micro-batch, group by group."""

    @functools.partial(
        jax.shard_map, mesh=parallel.mesh, in_specs=parallel.token_spec, out_specs=parallel.token_spec
    )
    def on_rank(ids, mask):
        load = sample_load(RoutingReplay(ids, mask), num_experts=parallel.topology.num_experts)
        return load.sum(0, keepdims=True, dtype=jnp.int32)

    by_rank = on_rank(output.expert_ids, mask)
    return jnp.moveaxis(by_rank.reshape(-1, *parallel.ranks, *by_rank.shape[1:]), 3, 1)


def _as_micro_batches(load: Int[Array, "M groups L N G E"]) -> Int[jax.Array, "groups*M L N G E"]:
    """Make the loads of data-parallel groups further micro-batches, one group after another, as plans have them."""
    load = jnp.asarray(load)
    return load.swapaxes(0, 1).reshape(-1, *load.shape[2:])


def _count_changes(
    model: LanguageModel, output: ModelOutput, samples: TrainingBatch, parallel: ExpertParallel
) -> Int[jax.Array, " L"]:
    """Count the expert choices of one micro-batch in which the live router differs from the record."""
    if samples.expert_ids is None:
        return jnp.zeros(model.config.moe_layers, jnp.int32)
    correction = model.layers.experts.correction_bias
    bias = None if correction is None else correction[...]
    select = functools.partial(select_experts, gating=model.config.gating)

    # Each rank selects for its own tokens, because XLA would gather the logits of all ranks to sort them.
    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(*[parallel.token_spec] * 3, PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    def on_rank(logits, recorded, mask, bias):
        select_layers = jax.vmap(lambda logits, bias: select(logits, bias=bias), in_axes=(-2, 0), out_axes=-2)
        live, recorded = select_layers(logits, bias), recorded.astype(jnp.int32)
        changed = (live[..., None] != recorded[..., None, :]).all(-1) & mask[..., None, None]
        return jax.lax.psum(changed.sum((0, 1, 3), dtype=jnp.int32), parallel.token_spec[0])

    return on_rank(output.router_logits, jnp.asarray(samples.expert_ids), samples.mask, bias)
