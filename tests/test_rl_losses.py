"""The losses against NumPy, loop by loop, and against what must not enter them: micro-batches and ranks."""

import jax
import numpy as np
import pytest

from experiments.rl.advantages import relative_advantages
from experiments.rl.losses import policy_loss, supervised_loss, token_weights

SAMPLES, TOKENS, PER_PROMPT = 12, 7, 4
RNG = np.random.default_rng(0)
REWARD = RNG.random(SAMPLES).astype(np.float32)
SCORED = RNG.random(SAMPLES) < 0.8
SAMPLED = RNG.random((SAMPLES, TOKENS)) < 0.6
OLD = np.log(RNG.random((SAMPLES, TOKENS))).astype(np.float32)
NEW = (OLD + RNG.normal(0, 0.4, OLD.shape)).astype(np.float32)


def test_advantages_are_relative_to_the_scored_responses_to_a_prompt():
    found = relative_advantages(REWARD, SCORED, responses_per_prompt=PER_PROMPT)
    for first in range(0, SAMPLES, PER_PROMPT):
        responses = range(first, first + PER_PROMPT)
        used = [i for i in responses if SCORED[i]]
        for i in responses:
            wanted = (REWARD[i] - np.mean(REWARD[used])) / (np.std(REWARD[used]) + 1e-6) if i in used else 0
            assert found[i] == pytest.approx(wanted, abs=1e-5)


def test_equal_rewards_of_a_prompt_teach_nothing_and_unscored_ones_neither():
    reward = np.array([0.3] * 3 + [1.0, 2.0, 3.0], np.float32)
    scored = np.array([1, 1, 1, 0, 0, 0], bool)
    np.testing.assert_allclose(
        relative_advantages(reward, scored, responses_per_prompt=3), np.zeros(6), atol=1e-6
    )
    assert not token_weights(np.zeros_like(SAMPLED), token_level=True).any()


@pytest.mark.parametrize("token_level", [True, False])
def test_weights_sum_to_one_over_what_is_scored(token_level):
    found = np.asarray(token_weights(SAMPLED & SCORED[:, None], token_level=token_level))
    counted = SAMPLED & SCORED[:, None]
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert ((found > 0) == counted).all()
    answers = counted.any(1).sum()
    for sample in np.flatnonzero(counted.any(1)):
        weight = 1 / counted.sum() if token_level else 1 / (answers * counted[sample].sum())
        np.testing.assert_allclose(found[sample][counted[sample]], weight, rtol=1e-5)


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28)], ids=["GRPO", "DAPO"])
@pytest.mark.parametrize("token_level", [True, False])
def test_policy_loss_and_its_gradient(clip, token_level):
    low, high = clip
    weight = np.asarray(token_weights(SAMPLED & SCORED[:, None], token_level=token_level))
    advantage = np.asarray(relative_advantages(REWARD, SCORED, responses_per_prompt=PER_PROMPT))
    of_tokens = np.repeat(advantage[:, None], TOKENS, 1)

    def loss(new):
        share = policy_loss(new, OLD, of_tokens, weight, clip_low=low, clip_high=high)
        return share.loss, share

    (_, found), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(NEW)
    wanted, clipped, kl, slopes = 0.0, 0.0, 0.0, np.zeros_like(NEW)
    for i, t in zip(*np.nonzero(weight), strict=True):
        ratio = np.exp(NEW[i, t] - OLD[i, t])
        free, held = ratio * advantage[i], np.clip(ratio, 1 - low, 1 + high) * advantage[i]
        wanted -= weight[i, t] * min(free, held)
        clipped += weight[i, t] * (held < free)
        kl += weight[i, t] * (ratio - 1 - np.log(ratio))
        slopes[i, t] = 0 if held < free else -weight[i, t] * free
    assert 0 < clipped < 1
    np.testing.assert_allclose([found.loss, found.clipped, found.kl], [wanted, clipped, kl], rtol=1e-4)
    np.testing.assert_allclose(slope, slopes, rtol=1e-4, atol=1e-7)


def test_clip_higher_lets_good_tokens_rise_further():
    one = np.ones((1, 1), np.float32)
    shares = {
        high: policy_loss(0.25 * one, 0 * one, one, one, clip_low=0.2, clip_high=high)
        for high in (0.2, 0.28, 0.3)
    }
    assert [float(share.clipped) for share in shares.values()] == [1, 1, 0]
    assert float(shares[0.28].loss) == pytest.approx(-1.28)


def test_micro_batches_add_up_whatever_is_in_them():
    weight = token_weights(SAMPLED & SCORED[:, None], token_level=False)
    advantage = np.random.default_rng(2).normal(size=SAMPLED.shape).astype(np.float32)

    def share(samples):
        parts = (NEW[samples], OLD[samples], advantage[samples], weight[samples])
        return np.array(policy_loss(*parts, clip_low=0.2, clip_high=0.28))

    whole = share(np.arange(SAMPLES))
    mixed = np.random.default_rng(1).permutation(SAMPLES)
    np.testing.assert_allclose(sum(share(part) for part in np.split(mixed, [5, 6])), whole, atol=1e-6)


def test_what_has_no_weight_may_be_anything():
    weight = np.array([[0.0, 1.0]], np.float32)
    strange = np.array([[-1e30, -0.5]], np.float32)
    loss, slope = jax.value_and_grad(
        lambda new: (
            policy_loss(new, 0 * strange - 0.5, np.ones((1, 2)), weight, clip_low=0.2, clip_high=0.2).loss
        )
    )(strange)
    assert loss == pytest.approx(-1)
    np.testing.assert_allclose(slope, [[0, -1]])


def test_supervised_loss_is_the_mean_over_weighted_tokens():
    weight = np.asarray(token_weights(SAMPLED & SCORED[:, None], token_level=True))
    counted = SAMPLED & SCORED[:, None]
    assert float(supervised_loss(NEW, weight)) == pytest.approx(-NEW[counted].mean(), rel=1e-5)
