"""The algorithms: which tokens each may learn from, and which settings are rejected."""

import dataclasses
import json

import numpy as np
import pytest
from support.runs import SMALL

from experiments.rl.advantages import relative_advantages
from experiments.rl.algorithms import ALGORITHMS, Critic, Sampled
from experiments.rl.configs import Train
from experiments.rl.dapo import Dapo
from experiments.rl.generation import Responses
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.saved_config import saved_config
from experiments.rl.stages import OldPolicy, teach

pytestmark = pytest.mark.usefixtures("smallest_policy")
SAMPLES, TOKENS, PER_PROMPT = 16, 10, 4
CRITIC = Critic(discount=0.95, decay=0.9)
TPPO = {"algorithm": "tppo", "window": 14, "response_tokens": 42}


def sampled(algorithm, seed=0):
    """Make a random batch for an algorithm: with values for a critic, and unfinished responses for windows."""
    rng, entry = np.random.default_rng(seed), ALGORITHMS[algorithm]
    start, length = rng.integers(1, 4, SAMPLES), rng.integers(2, 7, SAMPLES)
    position = np.arange(TOKENS)
    response = (position >= start[:, None]) & (position < (start + length)[:, None])
    finished, new = np.ones(SAMPLES, bool), response
    if entry.windows:
        finished = rng.random(SAMPLES) < 0.5
        new = response & (position >= (start + length // 2)[:, None])
    value = rng.normal(size=response.shape).astype(np.float32) if entry.critic else None
    usable = rng.random(SAMPLES) < 0.7
    reward = np.where(finished, rng.random(SAMPLES), 0).astype(np.float32)
    return Sampled(reward, usable, finished, response, new, value)


def lessons_of(algorithm, batch):
    return ALGORITHMS[algorithm].teach(batch, PER_PROMPT, CRITIC)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_what_every_algorithm_teaches(algorithm, seed):
    batch, critic = sampled(algorithm, seed), ALGORITHMS[algorithm].critic
    lessons = lessons_of(algorithm, batch)
    policy = np.asarray(lessons.policy_tokens)
    assert policy.any()
    assert not (policy & ~batch.new).any(), "only new tokens have an advantage under the policy as it is"
    assert not policy[~batch.usable].any()
    assert policy[batch.usable].sum() == batch.new[batch.usable].sum()
    advantage = np.asarray(lessons.advantage)
    assert np.isfinite(advantage).all()
    assert not advantage[~policy].any()
    assert np.ptp(advantage[policy]) > 0
    assert (lessons.critic_tokens is not None) == (lessons.value_target is not None) == critic
    if critic:
        critic_tokens = np.asarray(lessons.critic_tokens)
        assert critic_tokens.any()
        assert not (critic_tokens & ~batch.response).any()
        assert not critic_tokens[~batch.usable].any()
        assert np.isfinite(lessons.value_target).all()
    again = lessons_of(algorithm, batch)
    for one, other in zip(lessons, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_tokens_of_a_response_have_its_advantage_over_the_others(algorithm):
    batch = sampled(algorithm)
    lessons = lessons_of(algorithm, batch)
    expected = relative_advantages(batch.reward, batch.usable, responses_per_prompt=PER_PROMPT)
    for sample in np.flatnonzero(batch.usable):
        assert (lessons.advantage[sample][batch.response[sample]] == expected[sample]).all()


def test_the_critic_of_tppo_learns_returns_of_finished_responses_from_their_first_token_on():
    batch = sampled("tppo")
    lessons = lessons_of("tppo", batch)
    critic_tokens = np.asarray(lessons.critic_tokens)
    for sample in range(SAMPLES):
        if not (batch.usable & batch.finished)[sample]:
            assert not critic_tokens[sample].any()
            continue
        np.testing.assert_array_equal(critic_tokens[sample], batch.response[sample])
        worth = CRITIC.discount ** np.arange(critic_tokens[sample].sum())[::-1]
        actual = lessons.value_target[sample][critic_tokens[sample]]
        np.testing.assert_allclose(actual, worth * batch.reward[sample], rtol=1e-5)


def test_tppo_gives_the_advantages_of_ppo_where_nothing_is_cut_off():
    batch = sampled("ppo")
    one, other = lessons_of("ppo", batch), lessons_of("tppo", batch)
    np.testing.assert_array_equal(one.policy_tokens, other.policy_tokens)
    np.testing.assert_array_equal(one.advantage, other.advantage)
    np.testing.assert_array_equal(one.critic_tokens, other.critic_tokens)


def test_a_sample_without_finite_values_is_masked_and_counted():
    batch, config = sampled("tppo"), Train(**(SMALL | TPPO))
    shape = batch.response.shape
    value = batch.value.copy()
    value[3, np.flatnonzero(batch.response[3])[0]] = np.nan
    value[5, 0] = np.nan  # a prompt token, whose value is not read
    nothing = np.zeros(shape, np.float32)
    ids = np.zeros((*shape, 1, 1), np.uint8)
    responses = Responses(
        nothing.astype(np.int32), batch.response, batch.response, ids, nothing, batch.finished
    )
    scored = batch.finished & batch.usable
    rewards = Rewards(np.where(scored, batch.reward, 0).astype(np.float32), scored, [])
    rollout = Rollout(responses, batch.new, batch.finished, lambda: rewards, None, 0, {})
    taught = teach(config, rollout, rewards, OldPolicy(nothing, None, None, value))
    assert taught.not_finite == 1
    left_out = ~(scored | ~batch.finished)
    left_out[3] = True
    np.testing.assert_array_equal(taught.lessons.policy_tokens, batch.new & ~left_out[:, None])
    assert not taught.lessons.critic_tokens[left_out].any()
    assert np.isfinite(taught.lessons.advantage).all()


@pytest.mark.parametrize(
    "changes",
    [
        TPPO | {"critic": Critic(decay=0.5)},
        {"algorithm": "dapo", "dapo": Dapo(overlong_share=0.5)},
        {"evaluate_every": 2},
    ],
    ids=["tppo", "dapo", "evaluate_every"],
)
def test_settings_are_saved(changes, tmp_path):
    config = Train(**(SMALL | changes))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    assert saved_config(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": "gppo"}, "algorithm 'gppo' must be one of grpo, dapo, ppo, tppo; did you mean"),
        (
            {"algorithm": "tppo"},
            "algorithm=tppo with window=None: tppo needs a window, and the other algorithms",
        ),
        ({"window": 14}, "algorithm=grpo with window=14: tppo needs a window, and the other algorithms"),
        (
            TPPO | {"window": 7},
            "window=7 must be at least prompt_tokens=14: every rollout runs the prompts again",
        ),
        (TPPO | {"window": 0}, "window=0 must be an integer of at least 1"),
        (TPPO | {"response_tokens": 43}, "response_tokens=43 must be a multiple of window=14"),
        (TPPO | {"routing": "recompute"}, "algorithm=tppo needs routing=rollout: it replays the routing"),
        ({"critic": Critic(decay=0.5)}, r"algorithm=grpo does not use Critic\("),
        ({"algorithm": "ppo", "dapo": Dapo(more_rollouts=1)}, r"algorithm=ppo does not use Dapo\("),
        (
            {"algorithm": "dapo", "plan_ahead": 0.5},
            "algorithm=dapo replaces prompts after their responses are scored, so plan_ahead=0.5 cannot plan for them",
        ),
        ({"responses_per_prompt": 1}, "responses_per_prompt=1 must be an integer of at least 2"),
        ({"evaluate_every": 0}, "evaluate_every=0 must be an integer of at least 1"),
    ],
)
def test_settings_that_do_not_fit(changes, says):
    with pytest.raises(ValueError, match=says):
        Train(**(SMALL | changes))


def test_a_critic_needs_no_second_response_to_a_prompt():
    assert Train(**(SMALL | {"algorithm": "ppo", "responses_per_prompt": 1, "prompts": 32})).samples == 32


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"discount": 1.5}, "critic.discount=1.5 must be at least 0 and at most 1"),
        ({"decay": float("nan")}, "critic.decay=nan must be at least 0 and at most 1"),
        ({"clip": 0.0}, "critic.clip=0.0 must be positive and finite"),
        ({"rate": 0.0}, "critic.rate=0.0 must be positive and finite"),
        ({"factor": -1.0}, "critic.factor=-1.0 must be at least 0"),
    ],
)
def test_numbers_of_the_critic_out_of_range(changes, says):
    with pytest.raises(ValueError, match=says):
        Critic(**changes)
