"""The critic: its values belong to the right states, it starts at the mean return, and it learns by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.runs import HASTY, SMALL

from experiments.rl.algorithms import Critic
from experiments.rl.configs import Train
from experiments.rl.critic import (
    CriticTargets,
    make_critic,
    of_states,
    of_tokens,
    state_values,
    update_critic,
)
from experiments.rl.generation import Responses
from experiments.rl.optimizer import AdamW
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.stages import RecomputeResult
from experiments.rl.targets import initialise_critic
from experiments.rl.tasks import TASKS
from experiments.rl.trainer import Trainer
from relibra_jax.contract.types import Topology
from relibra_jax.evaluation import Ranks
from relibra_jax.nnx import expert_mesh

SAMPLES, TOKENS, PROMPT, WIDTH = 8, 21, 4, 6
MASK = np.ones((SAMPLES, TOKENS), bool)
RESPONSE_MASK = MASK & (np.arange(TOKENS) >= PROMPT)
SETTINGS = Critic(width=16, learning_rate=1e-2)
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(2, SAMPLES // 2, TOKENS, WIDTH)).astype(np.float32)
RETURNS = np.square(HIDDEN[..., 0]) + 0.5 * HIDDEN[..., 1]
WEIGHTS = np.where(RNG.random(RETURNS.shape) < 0.5, 0, 1 / RETURNS.size).astype(np.float32)
ZEROS = np.zeros_like(WEIGHTS)


def make(settings=SETTINGS):
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=1, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:1])
    return make_critic(WIDTH, settings, AdamW(weight_decay=0.0), mesh, jax.random.key(0))


def randomise(critic):
    """Give all parameters of a critic random numbers, and return them in float64."""
    rng, state = np.random.default_rng(1), nnx.state(critic)
    nnx.update(
        critic,
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32), state),
    )
    pure = jax.device_get(nnx.to_pure_dict(nnx.state(critic)))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), pure)


def loop_values(parameters, hidden):
    """Compute the values one by one, with the tanh form of the GELU."""
    values = np.zeros(hidden.shape[:-1])
    for index in np.ndindex(*values.shape):
        h = hidden[index].astype(np.float64)
        x = h @ parameters["hidden"]["kernel"] + parameters["hidden"]["bias"]
        units = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        values[index] = h @ parameters["linear"] + units @ parameters["weight"] + parameters["bias"]
    return values


def test_values_equal_a_loop_in_float64_and_those_of_a_new_critic_are_0():
    critic, _ = make()
    assert not np.asarray(state_values(critic, HIDDEN)).any()
    np.testing.assert_allclose(state_values(critic, HIDDEN), 0 * ZEROS)
    parameters = randomise(critic)
    np.testing.assert_allclose(state_values(critic, HIDDEN), loop_values(parameters, HIDDEN), atol=1e-5)


def test_a_critic_without_hidden_units_is_linear():
    critic, _ = make(Critic(width=0))
    parameters = randomise(critic)
    expected = HIDDEN @ parameters["linear"] + parameters["bias"]
    np.testing.assert_allclose(state_values(critic, HIDDEN), expected, atol=1e-5)


def test_entries_of_tokens_belong_to_the_states_before_them():
    entries = RNG.normal(size=(3, 5))
    for token in range(1, 5):
        np.testing.assert_array_equal(of_states(entries)[:, token - 1], entries[:, token])
        np.testing.assert_array_equal(of_tokens(entries)[:, token], entries[:, token - 1])
    assert not of_tokens(entries)[:, 0].any()


def test_an_update_that_is_not_finite_changes_nothing():
    critic, optimizer = make()
    good, bad = (
        CriticTargets(WEIGHTS, returns, ZEROS) for returns in (RETURNS, np.full_like(RETURNS, np.inf))
    )
    update_critic(critic, optimizer, HIDDEN, good, clip=0.2)
    before = jax.device_get(nnx.to_pure_dict(nnx.state((critic, optimizer))))
    loss, _ = update_critic(critic, optimizer, HIDDEN, bad, clip=0.2)
    assert not np.isfinite(loss)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state((critic, optimizer))), before)


def test_update_takes_the_loss_and_its_gradient_from_the_used_states_alone():
    critic, optimizer = make()
    parameters = randomise(critic)
    old_values = loop_values(parameters, HIDDEN) + RNG.normal(0, 0.5, RETURNS.shape)
    clip, used = 0.2, WEIGHTS > 0

    def loss_of(parameters):
        values, total = loop_values(parameters, HIDDEN), 0.0
        for index in zip(*np.nonzero(used), strict=True):
            value, old, target = values[index], old_values[index], float(RETURNS[index])
            clipped = old + min(max(value - old, -clip), clip)
            total += 0.5 * float(WEIGHTS[index]) * max((value - target) ** 2, (clipped - target) ** 2)
        return total

    step = 1e-5
    by_bias = (
        loss_of(parameters | {"bias": parameters["bias"] + step})
        - loss_of(parameters | {"bias": parameters["bias"] - step})
    ) / (2 * step)
    hidden = np.where(used[..., None], HIDDEN, np.nan)
    targets = CriticTargets(WEIGHTS, RETURNS, old_values.astype(np.float32))
    loss, norm = update_critic(critic, optimizer, hidden, targets, clip=clip)
    assert loss == pytest.approx(loss_of(parameters), rel=1e-5)
    assert norm > 1, "the gradient is clipped"
    moments = jax.device_get(nnx.as_pure(nnx.state(optimizer))["opt_state"])[1][0]["mu"]
    assert moments["bias"] == pytest.approx(0.1 * by_bias / float(norm), rel=1e-3)
    squares = sum(np.square(leaf).sum() for leaf in jax.tree.leaves(moments))
    assert squares == pytest.approx(0.1**2, rel=1e-4)


@pytest.mark.parametrize(("width", "explained"), [(16, 0.8), (0, 0.05)])
def test_updates_explain_returns_and_hidden_units_explain_more(width, explained):
    """The returns are a square and a linear function, which has a tenth of the variance."""
    critic, optimizer = make(Critic(width=width, learning_rate=3e-2))
    for _ in range(150):
        update_critic(critic, optimizer, HIDDEN, CriticTargets(WEIGHTS, RETURNS, ZEROS), clip=100.0)
    error = (RETURNS - np.asarray(state_values(critic, HIDDEN)))[WEIGHTS > 0]
    assert 1 - error.var() / RETURNS[WEIGHTS > 0].var() > explained


def make_trainer(task=None, tokenizer=None, **changes):
    """Make a PPO trainer on one rank, with a new critic."""
    options = {"algorithm": "ppo", "warmup_steps": 0, "prompts": 2, "micro_batches": 1}
    config = Train(**(SMALL | options | changes), ranks=Ranks(nodes=1, ranks_per_node=1))
    return Trainer(config, 0, task=task, tokenizer=tokenizer)


def values_and_bias(trainer, value, finished=(True, True, False, True)):
    """Call `initialise_critic` after a recompute with ``value`` everywhere; return the values and the bias."""
    response_mask = RESPONSE_MASK[:4]
    tokens = np.zeros(response_mask.shape, np.int32)
    ids, log_probs = tokens[..., None, None], tokens * 1.0
    responses = Responses(tokens, MASK[:4], response_mask, ids, log_probs, np.ones(4, bool))
    scored = np.array(finished)
    rewards = Rewards(np.array([1, 0.5, 0, 0], np.float32), scored, [])
    rollout = Rollout(
        responses, response_mask, ~response_mask, scored, lambda: rewards, None, 0, {}, responses.tokens
    )
    values = np.full(response_mask.shape, value, np.float32)
    recomputed = RecomputeResult(np.zeros_like(values), None, old_values=values)
    actual = initialise_critic(trainer.state, trainer.config, rollout, rewards, recomputed)
    return actual.old_values, float(trainer.state.critic.bias[...])


@pytest.mark.slow
@pytest.mark.usefixtures("smallest_policy")
def test_initialise_critic_sets_the_bias_of_a_new_critic_to_the_mean_return():
    trainer = make_trainer()
    values, bias = values_and_bias(trainer, 0.0, finished=(False,) * 4)
    assert not values.any(), "no response has finished"
    assert bias == 0
    values, bias = values_and_bias(trainer, 0.0)
    assert bias == 0.5, "of three responses"
    assert (values == bias).all(), "the first losses and advantages are of that bias"
    # Only a new critic is set.
    values, bias = values_and_bias(trainer, 0.25, finished=(True, True, False, False))
    assert (values == 0.25).all()
    assert bias == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("smallest_policy")
def test_initialise_critic_discounts_the_mean_return():
    _, bias = values_and_bias(make_trainer(critic=Critic(discount=0.5)), 0.0)
    worth = 0.5 ** np.arange(RESPONSE_MASK[0].sum())
    assert bias == pytest.approx(0.5 * worth.mean(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("smallest_policy")
def test_checkpoints_have_the_critic_and_name_its_width(tmp_path):
    one, other = make_trainer(), make_trainer()
    randomise(one.state.critic)
    one.state.critic_optimizer.step[...] += 3
    with ocp.CheckpointManager(tmp_path) as manager:
        one.state.save(manager)
        manager.wait_until_finished()
        other.restore(manager)
        with pytest.raises(ValueError, match=r"have critic\.width=64, but this run has critic\.width=8$"):
            make_trainer(critic=Critic(width=8)).restore(manager)
    for module in ("critic", "critic_optimizer"):
        saved, restored = (nnx.state(getattr(trainer.state, module)) for trainer in (one, other))
        for (path, leaf), now in zip(
            jax.tree.leaves_with_path(saved), jax.tree.leaves(restored), strict=True
        ):
            np.testing.assert_array_equal(now, leaf, err_msg=jax.tree_util.keystr(path))
            assert now.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def learned(**changes):
    """Learn from one batch with a critic of random numbers; return the metrics and the critic."""
    task = dataclasses.replace(TASKS["copy"], score=lambda completion, example: 0.25 + len(completion) % 2)
    options = {"prompts": 4, "anneal_steps": 0, "planner": "static", "critic": Critic(epochs=1)}
    trainer = make_trainer(**options, **changes, task=task, tokenizer=HASTY)
    randomise(trainer.state.critic)
    metrics = trainer.learn()
    return metrics, jax.device_get(nnx.to_pure_dict(nnx.state(trainer.state.critic)))


@pytest.mark.long
@pytest.mark.usefixtures("smallest_policy")
def test_critic_learns_the_same_wherever_hidden_vectors_are_recorded():
    """By a recompute in the micro-batches of the updates, in micro-batches of its own, or live."""
    metrics, critic = learned()
    for changes in ({"recompute_micro_batches": 2, "batch_memory": "device"}, {"routing": "recompute"}):
        others, other = learned(**changes)
        for name in ("critic/loss", "critic/explained_variance", "critic/explained_variance_new"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-3), name
        assert others["critic/explained_variance_carried"] is None, "no response is carried"
        for now, then in zip(jax.tree.leaves(other), jax.tree.leaves(critic), strict=True):
            np.testing.assert_allclose(now, then, atol=1e-4)
