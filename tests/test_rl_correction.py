"""Importance weights equal a loop in float64, also at extremes, and multiply what losses learn from tokens."""

import math

import numpy as np
import pytest

from experiments.rl.configs import Train
from experiments.rl.correction import Correction, importance_weights, measure_correction
from experiments.rl.generation import Responses
from experiments.rl.losses import LARGEST_LOG_RATIO
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.stages import RecomputeResult
from experiments.rl.targets import compute_targets

RNG = np.random.default_rng(0)
SAMPLED = np.log(RNG.random((8, 6))).astype(np.float32)
OLD = (SAMPLED + RNG.normal(0, 1.0, SAMPLED.shape)).astype(np.float32)
OLD[0, :3] = SAMPLED[0, :3] + [100, -100, np.inf]
RESPONSE = np.arange(6) >= np.array([[1], [2], [3], [1], [2], [3], [1], [2]])


def weight_of(old, sampled, correction):
    """Return the weight of one token, from the definition."""
    if not math.isfinite(old) or not math.isfinite(sampled):
        return 0.0
    ratio = math.exp(max(min(float(old) - float(sampled), LARGEST_LOG_RATIO), -LARGEST_LOG_RATIO))
    if correction.kind == "truncate":
        return min(ratio, correction.high)
    return ratio if correction.low <= ratio <= correction.high else 0.0


@pytest.mark.parametrize("correction", [Correction(kind="truncate"), Correction(kind="mask", high=5.0)])
def test_importance_weights_equal_a_loop_also_at_extremes(correction):
    actual = importance_weights(OLD, SAMPLED, correction)
    expected = [
        [weight_of(old, sampled, correction) for old, sampled in zip(*rows, strict=True)]
        for rows in zip(OLD, SAMPLED, strict=True)
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    metrics = measure_correction(actual, RESPONSE, correction)
    bound = correction.high if correction.kind == "truncate" else 0
    assert metrics["mismatch/bounded_share"] == np.mean(np.array(expected)[RESPONSE] == bound)
    assert 0 < metrics["mismatch/bounded_share"] < 1
    assert metrics["mismatch/weight"] == pytest.approx(np.mean(np.array(expected)[RESPONSE]), rel=1e-6)


def test_without_a_correction_weights_are_1_and_there_are_no_metrics():
    weights = importance_weights(OLD, SAMPLED, Correction())
    assert (weights == 1).all()
    assert measure_correction(weights, RESPONSE, Correction()) == {}


@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_advantages_are_weighted_and_masked_tokens_are_not_learned_from(kind):
    config = Train(correction=Correction(kind=kind), prompts=2, responses_per_prompt=4, micro_batches=1)
    targets = targets_of(config, np.ones(8, bool))
    weights = importance_weights(OLD, SAMPLED, config.correction)
    np.testing.assert_array_equal(targets.policy_mask, RESPONSE & (weights > 0))
    first = RESPONSE[1].argmax()
    advantage = (1 - 1.5) / np.std(np.arange(4))
    np.testing.assert_allclose(targets.advantages[1, first], advantage * weights[1, first], rtol=1e-4)


def targets_of(config, ended):
    """Return the targets of a batch whose rewards are 0 to 7."""
    everywhere, ids = np.ones_like(RESPONSE), np.zeros((*RESPONSE.shape, 1, 1), np.uint8)
    tokens, whole = np.zeros(RESPONSE.shape, np.int32), np.ones(8, bool)
    responses = Responses(tokens, everywhere, RESPONSE, ids, SAMPLED, ended)
    rewards = Rewards(np.arange(8, dtype=np.float32), whole, [])
    rollout = Rollout(responses, RESPONSE, ~RESPONSE, whole, lambda: rewards, None, 0, {}, tokens)
    return compute_targets(config, rollout, rewards, RecomputeResult(OLD, None))[0]


def test_truncated_responses_are_masked_if_the_run_says_so():
    ended = np.arange(8) % 3 > 0
    settings = {"prompts": 2, "responses_per_prompt": 4, "micro_batches": 1}
    whole = targets_of(Train(**settings), ended)
    masked = targets_of(Train(**settings, mask_truncated=True), ended)
    np.testing.assert_array_equal(whole.policy_mask, RESPONSE)
    np.testing.assert_array_equal(masked.policy_mask, RESPONSE & ended[:, None])
    # They still count in the mean of their group.
    np.testing.assert_array_equal(masked.advantages, whole.advantages)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "truncated"},
            "correction.kind 'truncated' must be one of none, truncate, mask; did you mean",
        ),
        ({"high": 3.0}, "correction.high=3.0 is not used by correction.kind=none"),
        ({"kind": "truncate", "low": 0.1}, "correction.low=0.1 is not used by correction.kind=truncate"),
        ({"kind": "mask", "low": 2.0}, "correction.low=2.0 must be below correction.high=2.0"),
    ],
)
def test_corrections_that_mean_nothing_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Correction(**settings)
