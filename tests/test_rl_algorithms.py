"""The algorithms: which tokens each may learn from, and which settings are rejected."""

import dataclasses
import json

import numpy as np
import pytest
from support.runs import SMALL

from experiments.rl.advantages import Group, relative_advantages
from experiments.rl.algorithms import ALGORITHMS, Critic, RolloutBatch
from experiments.rl.configs import Train
from experiments.rl.correction import Correction
from experiments.rl.dapo import Dapo
from experiments.rl.generation import Responses
from experiments.rl.losses import Clip
from experiments.rl.optimizer import AdamW
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.run_folder import saved_config
from experiments.rl.stages import RecomputeResult
from experiments.rl.targets import compute_targets

pytestmark = pytest.mark.usefixtures("smallest_policy")
SAMPLES, TOKENS, PER_PROMPT = 16, 10, 4
CRITIC = Critic(discount=0.95, decay=0.9)
TPPO = {"algorithm": "tppo", "window": 14, "response_tokens": 42}


def random_batch(algorithm, seed=0):
    """Make a random batch for an algorithm: with values for a critic, and unfinished responses for windows."""
    rng, entry = np.random.default_rng(seed), ALGORITHMS[algorithm]
    start, length = rng.integers(1, 4, SAMPLES), rng.integers(2, 7, SAMPLES)
    position = np.arange(TOKENS)
    response_mask = (position >= start[:, None]) & (position < (start + length)[:, None])
    finished, new_mask = np.ones(SAMPLES, bool), response_mask
    if entry.learns_unfinished:
        finished = rng.random(SAMPLES) < 0.5
        new_mask = response_mask & (position >= (start + length // 2)[:, None])
    values = rng.normal(size=response_mask.shape).astype(np.float32) if entry.critic else None
    usable = rng.random(SAMPLES) < 0.7
    rewards = np.where(finished, rng.random(SAMPLES), 0).astype(np.float32)
    return RolloutBatch(rewards, usable, finished, response_mask, new_mask, values)


def targets_of(algorithm, batch, critic=CRITIC):
    return ALGORITHMS[algorithm].compute_targets(batch, critic, Group(), responses_per_prompt=PER_PROMPT)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_targets_are_on_new_tokens_of_usable_samples(algorithm, seed):
    batch, critic = random_batch(algorithm, seed), ALGORITHMS[algorithm].critic
    targets = targets_of(algorithm, batch)
    policy = np.asarray(targets.policy_mask)
    assert policy.any()
    assert not (policy & ~batch.new_mask).any(), "only new tokens have an advantage under the policy as it is"
    assert not policy[~batch.usable].any()
    assert policy[batch.usable].sum() == batch.new_mask[batch.usable].sum()
    advantages = np.asarray(targets.advantages)
    assert np.isfinite(advantages).all()
    assert not advantages[~policy].any()
    assert np.ptp(advantages[policy]) > 0
    assert (targets.critic_mask is not None) == (targets.returns is not None) == critic
    if critic:
        critic_mask = np.asarray(targets.critic_mask)
        assert critic_mask.any()
        assert not (critic_mask & ~batch.response_mask).any()
        assert not critic_mask[~batch.usable].any()
        assert np.isfinite(targets.returns).all()
    again = targets_of(algorithm, batch)
    for one, other in zip(targets, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_group_relative_advantages_are_equal_on_all_tokens_of_a_response(algorithm):
    batch = random_batch(algorithm)
    targets = targets_of(algorithm, batch)
    expected = relative_advantages(batch.rewards, batch.usable, responses_per_prompt=PER_PROMPT)
    for sample in np.flatnonzero(batch.usable):
        assert (targets.advantages[sample][batch.response_mask[sample]] == expected[sample]).all()


def test_tppo_critic_learns_returns_of_finished_responses_from_their_first_token():
    batch = random_batch("tppo")
    targets = targets_of("tppo", batch)
    critic_mask = np.asarray(targets.critic_mask)
    for sample in range(SAMPLES):
        if not (batch.usable & batch.finished)[sample]:
            assert not critic_mask[sample].any()
            continue
        np.testing.assert_array_equal(critic_mask[sample], batch.response_mask[sample])
        worth = CRITIC.discount ** np.arange(critic_mask[sample].sum())[::-1]
        actual = targets.returns[sample][critic_mask[sample]]
        np.testing.assert_allclose(actual, worth * batch.rewards[sample], rtol=1e-5)


def test_tppo_advantages_equal_those_of_ppo_if_no_response_is_cut_off():
    batch = random_batch("ppo")
    one, other = targets_of("ppo", batch), targets_of("tppo", batch)
    np.testing.assert_array_equal(one.policy_mask, other.policy_mask)
    np.testing.assert_array_equal(one.advantages, other.advantages)
    np.testing.assert_array_equal(one.critic_mask, other.critic_mask)


def test_cut_decay_is_the_lambda_of_unfinished_responses_alone():
    batch = random_batch("tppo")
    both, cut, other = (
        targets_of("tppo", batch, dataclasses.replace(CRITIC, whiten="none", **changes)).advantages
        for changes in ({}, {"cut_decay": 0.3}, {"decay": 0.3})
    )
    assert np.asarray(both != other)[~batch.finished].any()
    np.testing.assert_array_equal(cut, np.where(batch.finished[:, None], both, other))


def test_whiten_says_over_what_tokens_advantages_are_whitened():
    batch = random_batch("tppo")
    together, apart, none = (
        targets_of("tppo", batch, dataclasses.replace(CRITIC, whiten=kind))
        for kind in ("together", "apart", "none")
    )
    mask = np.asarray(together.policy_mask)
    plain = np.asarray(none.advantages, np.float64)
    finished = np.broadcast_to(batch.finished[:, None], mask.shape)
    for targets, parts in ((together, [mask]), (apart, [mask & finished, mask & ~finished])):
        expected = np.zeros(mask.shape)
        for part in parts:
            expected[part] = (plain[part] - plain[part].mean()) / (plain[part].std() + 1e-6)
        np.testing.assert_allclose(targets.advantages, expected, atol=1e-5)
        np.testing.assert_array_equal(targets.policy_mask, mask)
    for name in ("critic_mask", "returns"):
        np.testing.assert_array_equal(getattr(apart, name), getattr(together, name))


def test_compute_targets_masks_and_counts_samples_without_finite_values():
    batch, config = random_batch("tppo"), Train(**(SMALL | TPPO))
    shape = batch.response_mask.shape
    values = batch.values.copy()
    values[3, np.flatnonzero(batch.response_mask[3])[0]] = np.nan
    values[5, 0] = np.nan  # a prompt token, whose value is not read
    nothing = np.zeros(shape, np.float32)
    ids = np.zeros((*shape, 1, 1), np.uint8)
    responses = Responses(
        nothing.astype(np.int32), batch.response_mask, batch.response_mask, ids, nothing, batch.finished
    )
    scored = batch.finished & batch.usable
    rewards = Rewards(np.where(scored, batch.rewards, 0).astype(np.float32), scored, [])
    rollout = Rollout(
        responses,
        batch.new_mask,
        ~batch.new_mask,
        batch.finished,
        lambda: rewards,
        None,
        0,
        {},
        responses.tokens,
    )
    recomputed = RecomputeResult(nothing, None, old_values=values)
    targets, not_finite = compute_targets(config, rollout, rewards, recomputed)
    assert not_finite == 1
    left_out = ~(scored | ~batch.finished)
    left_out[3] = True
    np.testing.assert_array_equal(targets.policy_mask, batch.new_mask & ~left_out[:, None])
    assert not targets.critic_mask[left_out].any()
    assert np.isfinite(targets.advantages).all()


@pytest.mark.parametrize(
    "changes",
    [
        TPPO | {"critic": Critic(decay=0.5, cut_decay=0.9, whiten="apart", width=8)},
        {"algorithm": "dapo", "dapo": Dapo(overlong_share=0.5)},
        {"evaluate_every": 2},
        {"correction": Correction(kind="mask", high=5.0)},
        {"loss": "gspo", "clip": Clip(dual=3.0), "group": Group(deviation="none")},
    ],
    ids=["tppo", "dapo", "evaluate_every", "correction", "loss"],
)
def test_saved_config_equals_the_settings(changes, tmp_path):
    config = Train(**(SMALL | changes))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config), default=str))
    assert saved_config(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "gpso"}, "loss 'gpso' must be one of clip, gspo, cispo; did you mean"),
        (
            {"loss": "cispo", "clip": Clip(dual=3.0)},
            "clip.dual=3.0 is not for loss=cispo, whose ratios have no gradient",
        ),
        (
            {"loss": "gspo", "clip": Clip(dual=3.0), "correction": Correction(kind="truncate")},
            "correction.kind=truncate bounds the ratio of every token, but loss=gspo has one ratio for a response",
        ),
        ({"algorithm": "ppo", "group": Group(baseline="others")}, "algorithm=ppo does not use Group"),
        (
            {"loss": "gspo"},
            r"loss=gspo needs bounds for the ratio of a response, .* Clip\(low=0.2, high=0.28",
        ),
        (
            {"loss": "gspo", "clip": Clip(low=3e-4, high=4e-4), "algorithm": "ppo"},
            "loss=gspo has one ratio for a response, but algorithm=ppo has an advantage for each of its tokens",
        ),
        (
            {"correction": Correction(kind="truncate"), "top_p": 0.9},
            "correction.kind=truncate needs top_p=1, not 0.9",
        ),
        (
            {"algorithm": "ppo", "critic": Critic(cut_decay=0.5)},
            "critic.cut_decay=0.5 is not for algorithm=ppo, which learns from no unfinished response",
        ),
        (
            {"algorithm": "ppo", "critic": Critic(whiten="apart")},
            "critic.whiten=apart is not for algorithm=ppo",
        ),
        (
            {"adamw": AdamW(rising_updates=7)},
            "adamw.rising_updates=7 must be at most 6, the updates of the run",
        ),
        ({"algorithm": "gppo"}, "algorithm 'gppo' must be one of grpo, dapo, ppo, tppo; did you mean"),
        (
            {"algorithm": "tppo"},
            "algorithm=tppo needs a window, the tokens that it learns from at once",
        ),
        (
            TPPO | {"algorithm": "dapo"},
            "window=14 is not for algorithm=dapo, which replaces prompts by their rewards",
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
def test_train_rejects_settings_that_do_not_fit_the_algorithm(changes, says):
    with pytest.raises(ValueError, match=says):
        Train(**(SMALL | changes))


def test_train_accepts_one_response_to_a_prompt_with_a_critic():
    assert Train(**(SMALL | {"algorithm": "ppo", "responses_per_prompt": 1, "prompts": 32})).samples == 32


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"discount": 1.5}, "critic.discount=1.5 must be at least 0 and at most 1"),
        ({"decay": float("nan")}, "critic.decay=nan must be at least 0 and at most 1"),
        ({"clip": 0.0}, "critic.clip=0.0 must be positive and finite"),
        ({"cut_decay": -0.5}, "critic.cut_decay=-0.5 must be at least 0 and at most 1"),
        ({"whiten": "appart"}, "critic.whiten 'appart' must be one of together, apart, none; did you mean"),
        ({"learning_rate": 0.0}, "critic.learning_rate=0.0 must be positive and finite"),
        ({"epochs": 0}, "critic.epochs=0 must be an integer of at least 1"),
        ({"width": -1}, "critic.width=-1 must be an integer of at least 0"),
    ],
)
def test_critic_rejects_numbers_out_of_range(changes, says):
    with pytest.raises(ValueError, match=says):
        Critic(**changes)
