"""The critic: its values belong to the right states, it starts at the mean return, and it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.runs import SMALL

from experiments.rl.algorithms import Critic
from experiments.rl.configs import Train
from experiments.rl.generation import Responses
from experiments.rl.objective import Losses
from experiments.rl.policy import ValueHead, token_values
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.stages import RecomputeResult, prepare_live
from experiments.rl.step import CriticTargets, TrainingBatch, update
from experiments.rl.targets import initialize_critic
from experiments.rl.trainer import Trainer
from relibra_jax.contract.types import Topology
from relibra_jax.evaluation import Ranks
from relibra_jax.nnx import ExpertParallel, expert_mesh

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("smallest_policy")]
SAMPLES, TOKENS, PROMPT = 8, 21, 4
CRITIC = Critic(factor=0.3, rate=7.0, clip=100.0)
MASK = np.ones((SAMPLES, TOKENS), bool)
RESPONSE_MASK = MASK & (np.arange(TOKENS) >= PROMPT)


def make_trainer(**changes):
    """Make a PPO trainer on one rank, with a new value head."""
    options = {"algorithm": "ppo", "critic": CRITIC, "warmup_steps": 0, "prompts": 2, "micro_batches": 1}
    return Trainer(Train(**(SMALL | options | changes), ranks=Ranks(nodes=1, ranks_per_node=1)), 0)


def test_token_values_belong_to_the_states_before_tokens():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 5, 3)).astype(np.float32)
    head = ValueHead(3)
    head.weight[...], head.bias[...] = rng.normal(size=3).astype(np.float32), jnp.float32(0.5)
    expected = hidden @ np.asarray(head.weight[...]) + 0.5
    used = rng.random((2, 5)) < 0.5
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=1, replica_slots=0)
    parallel = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:1]), topology=topology)
    for actual, counts in (
        (token_values(head, hidden, parallel=parallel), True),
        (token_values(head, hidden, used, parallel=parallel), used[:, 1:]),
    ):
        np.testing.assert_allclose(actual[:, 1:], np.where(counts, expected[:, :-1], 0), atol=1e-6)
        assert not actual[:, 0].any()


@pytest.fixture(scope="module")
def learned(smallest_policy):
    """Train a new head with 60 updates on one batch, with advantages of 0 for the policy.

    Returns the returns, the losses, and the state after the first update: head, first moments and gradient norm.
    """
    trainer, rng = make_trainer(), np.random.default_rng(1)
    tokens = rng.integers(97, 101, (SAMPLES, TOKENS)).astype(np.int32)
    returns = np.zeros((SAMPLES, TOKENS), np.float32)
    returns[:, 1:] = tokens[:, :-1] % 2 + rng.normal(0, 0.05, (SAMPLES, TOKENS - 1))
    weights = (RESPONSE_MASK / RESPONSE_MASK.sum()).astype(np.float32)
    nothing = np.zeros_like(weights)
    state = trainer.state
    targets = CriticTargets(weights, returns, nothing)
    on_host = TrainingBatch(tokens, MASK, None, weights, nothing, nothing, targets)
    batch, samples = prepare_live(state, trainer.config, on_host)
    load = jnp.zeros((trainer.config.model_config.moe_layers, 16), jnp.int32)
    losses, first = [], None
    for _ in range(60):
        ran = update(state.agent, state.optimizer, batch, samples, load, losses=Losses(), critic=CRITIC)
        losses.append(float(ran.critic_loss))
        if first is None:
            moments = nnx.as_pure(state.optimizer.opt_state)[0][0].mu["critic"]
            head = nnx.as_pure(nnx.state(state.agent.critic))
            first = jax.device_get((head, moments, ran.gradient_norm))
    return returns[RESPONSE_MASK], losses, first


def test_critic_loss_of_a_new_head_is_that_of_values_of_0(learned):
    returns, losses, _ = learned
    assert losses[0] == pytest.approx(0.5 * np.square(returns).mean(), rel=1e-5)


def test_critic_factor_scales_the_gradient_and_critic_rate_the_step(learned):
    returns, _, (head, moments, norm) = learned
    # Adam's first moments are a tenth of the gradient, whose norm is clipped to 1.
    cut = min(1, 1 / norm)
    assert moments["bias"] == pytest.approx(-0.1 * cut * CRITIC.factor * returns.mean(), rel=1e-4)
    assert np.linalg.norm([*moments["weight"], moments["bias"]]) == pytest.approx(0.1 * cut * norm, rel=1e-4)
    # Adam's first step is the learning rate.
    step = SMALL["learning_rate"] * CRITIC.rate
    assert head["bias"] == pytest.approx(step, rel=1e-3)
    np.testing.assert_allclose(np.abs(head["weight"]), step, rtol=1e-2)


def test_critic_loss_falls_below_half_of_the_variance(learned):
    returns, losses, _ = learned
    # The loss is half the mean squared error, so more than half of the variance is explained.
    assert losses[-1] < 0.5 * 0.5 * returns.var()


def values_and_bias(trainer, value, finished=(True, True, False, True)):
    """Call `initialize_critic` after a recompute with ``value`` everywhere; return the values and the head's bias."""
    response_mask = RESPONSE_MASK[:4]
    tokens = np.zeros(response_mask.shape, np.int32)
    ids, log_probs = tokens[..., None, None], tokens * 1.0
    responses = Responses(tokens, MASK[:4], response_mask, ids, log_probs, np.ones(4, bool))
    scored = np.array(finished)
    rewards = Rewards(np.array([1, 0.5, 0, 0], np.float32), scored, [])
    rollout = Rollout(responses, response_mask, scored, lambda: rewards, None, 0, {})
    values = np.full(response_mask.shape, value, np.float32)
    recomputed = RecomputeResult(np.zeros_like(values), None, old_values=values)
    actual = initialize_critic(trainer.state, trainer.config, rollout, rewards, recomputed)
    return actual.old_values, float(trainer.state.agent.critic.bias[...])


def test_initialize_critic_sets_the_bias_of_a_new_head_to_the_mean_return():
    trainer = make_trainer()
    values, bias = values_and_bias(trainer, 0.0, finished=(False,) * 4)
    assert not values.any(), "no response has finished"
    assert bias == 0
    values, bias = values_and_bias(trainer, 0.0)
    assert bias == 0.5, "of three responses"
    assert (values == bias).all(), "the first losses and advantages are of that head"
    # Only a new critic is set.
    values, bias = values_and_bias(trainer, 0.25, finished=(True, True, False, False))
    assert (values == 0.25).all()
    assert bias == 0.5


def test_initialize_critic_discounts_the_mean_return():
    _, bias = values_and_bias(make_trainer(critic=Critic(discount=0.5)), 0.0)
    worth = 0.5 ** np.arange(RESPONSE_MASK[0].sum())
    assert bias == pytest.approx(0.5 * worth.mean(), rel=1e-6)
