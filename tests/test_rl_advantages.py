"""Advantages by comparison and by a critic equal hand-computed examples, loops in NumPy, and Tunix's."""

import jax
import numpy as np
import pytest

from experiments.rl.advantages import (
    Group,
    discounted_returns,
    generalized_advantages,
    relative_advantages,
    whiten,
)

SAMPLES, TOKENS, PER_PROMPT = 12, 9, 4
RNG = np.random.default_rng(0)
REWARDS = RNG.random(SAMPLES).astype(np.float32)
SCORED = RNG.random(SAMPLES) < 0.8
FINISHED = RNG.random(SAMPLES) < 0.5
VALUES = RNG.normal(size=(SAMPLES, TOKENS)).astype(np.float32)
START, LENGTH = RNG.integers(1, 4, SAMPLES), RNG.integers(1, 7, SAMPLES)
POSITION = np.arange(TOKENS)
RESPONSE_MASK = (START[:, None] <= POSITION) & ((START + LENGTH)[:, None] > POSITION)


def test_relative_advantages_compare_the_scored_responses_to_a_prompt():
    actual = relative_advantages(REWARDS, SCORED, responses_per_prompt=PER_PROMPT)
    for first in range(0, SAMPLES, PER_PROMPT):
        responses = range(first, first + PER_PROMPT)
        used = [i for i in responses if SCORED[i]]
        for i in responses:
            expected = (
                (REWARDS[i] - np.mean(REWARDS[used])) / (np.std(REWARDS[used]) + 1e-6) if i in used else 0
            )
            assert actual[i] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("baseline", ["all", "others"])
@pytest.mark.parametrize("deviation", ["population", "sample", "none"])
def test_relative_advantages_of_all_kinds_equal_a_loop_in_float64(baseline, deviation):
    """Dr. GRPO is all and none, RLOO is others and none."""
    group = Group(baseline=baseline, deviation=deviation)
    actual = relative_advantages(REWARDS, SCORED, group, responses_per_prompt=PER_PROMPT)
    rewards = REWARDS.astype(np.float64)
    for first in range(0, SAMPLES, PER_PROMPT):
        used = [i for i in range(first, first + PER_PROMPT) if SCORED[i]]
        assert len(used) > 1
        for i in used:
            others = [j for j in used if j != i]
            centred = rewards[i] - rewards[used if baseline == "all" else others].mean()
            divisor = {
                "population": rewards[used].std() + 1e-6,
                "sample": rewards[used].std(ddof=1) + 1e-6,
                "none": 1,
            }[deviation]
            assert actual[i] == pytest.approx(centred / divisor, rel=1e-5, abs=1e-6)


def test_kinds_of_comparison_that_are_unknown_are_named():
    with pytest.raises(ValueError, match=r"group\.baseline 'other' must be one of all, others; did you mean"):
        Group(baseline="other")


def test_relative_advantages_are_0_for_equal_rewards_and_unscored_responses():
    reward = np.array([0.3] * 3 + [1.0, 2.0, 3.0], np.float32)
    scored = np.array([1, 1, 1, 0, 0, 0], bool)
    np.testing.assert_allclose(
        relative_advantages(reward, scored, responses_per_prompt=3), np.zeros(6), atol=1e-6
    )


def test_generalized_advantages_equal_a_hand_computed_example():
    """The example is a response of three tokens after one prompt token, with values 0.5, 0.25, 0.75 and reward 1.

    With gamma = 0.9 and lambda = 0.5:

    finished:   delta_2 = 1 - 0.75                 =  0.25      A_2 = 0.25
                delta_1 = 0.9 * 0.75 - 0.25        =  0.425     A_1 = 0.425 + 0.45 * 0.25    = 0.5375
                delta_0 = 0.9 * 0.25 - 0.5         = -0.275     A_0 = -0.275 + 0.45 * 0.5375 = -0.033125
    cut off:    delta_2 = 0.9 * 0.75 - 0.75        = -0.075     A_2 = -0.075
                                                                A_1 = 0.425 - 0.45 * 0.075   = 0.39125
                                                                A_0 = -0.275 + 0.45 * 0.39125 = -0.0989375
    """
    value = np.array([[9.0, 0.5, 0.25, 0.75, 9.0]] * 2, np.float32)
    response = np.array([[False, True, True, True, False]] * 2)
    reward = np.array([1.0, 1.0], np.float32)
    actual = generalized_advantages(value, reward, response, np.array([True, False]), discount=0.9, decay=0.5)
    expected = [[0, -0.033125, 0.5375, 0.25, 0], [0, -0.0989375, 0.39125, -0.075, 0]]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("decay", [1.0, 0.8, 0.0])
def test_generalized_advantages_equal_a_loop_in_numpy(discount, decay):
    options = {"discount": discount, "decay": decay}
    actual = np.asarray(generalized_advantages(VALUES, REWARDS, RESPONSE_MASK, FINISHED, **options))
    assert not actual[~RESPONSE_MASK].any()
    for i in range(SAMPLES):
        value, length = VALUES[i, START[i] : START[i] + LENGTH[i]], LENGTH[i]
        if FINISHED[i]:
            values, rewards = [*value, 0.0], [0.0] * (length - 1) + [REWARDS[i]]
        else:
            values, rewards = [*value, value[-1]], [0.0] * length
        deltas = [rewards[t] + discount * values[t + 1] - values[t] for t in range(length)]
        for t in range(length):
            expected = sum((discount * decay) ** (k - t) * deltas[k] for k in range(t, length))
            assert actual[i, START[i] + t] == pytest.approx(expected, abs=1e-5)


def test_decay_may_differ_by_response():
    decay = np.where(FINISHED, 0.9, 0.3).astype(np.float32)
    arguments, options = (VALUES, REWARDS, RESPONSE_MASK, FINISHED), {"discount": 0.95}
    actual = generalized_advantages(*arguments, decay=decay, **options)
    finished, cut = (generalized_advantages(*arguments, decay=number, **options) for number in (0.9, 0.3))
    np.testing.assert_allclose(actual, np.where(FINISHED[:, None], finished, cut), atol=1e-6)


def test_generalized_advantages_ignore_values_outside_responses():
    strange = np.where(RESPONSE_MASK, VALUES, 1e30).astype(np.float32)
    rewards = np.where(FINISHED, REWARDS, 1e30).astype(np.float32)
    options = {"discount": 0.9, "decay": 0.8}
    actual = generalized_advantages(strange, rewards, RESPONSE_MASK, FINISHED, **options)
    expected = generalized_advantages(VALUES, REWARDS, RESPONSE_MASK, FINISHED, **options)
    np.testing.assert_array_equal(actual, expected)


def test_generalized_advantages_with_decay_1_are_returns_minus_values():
    """With lambda = 1 the deltas telescope."""
    everything = np.ones(SAMPLES, bool)
    actual = generalized_advantages(VALUES, REWARDS, RESPONSE_MASK, everything, discount=0.9, decay=1.0)
    returns = discounted_returns(REWARDS, RESPONSE_MASK, discount=0.9)
    np.testing.assert_allclose(actual, np.where(RESPONSE_MASK, returns - VALUES, 0), atol=1e-5)
    for i in range(SAMPLES):
        powers = 0.9 ** np.arange(LENGTH[i])[::-1]
        np.testing.assert_allclose(returns[i][RESPONSE_MASK[i]], powers * REWARDS[i], rtol=1e-5)


def test_whiten_gives_mean_0_and_deviation_1():
    actual = np.asarray(whiten(VALUES, RESPONSE_MASK))
    assert not actual[~RESPONSE_MASK].any()
    assert actual[RESPONSE_MASK].mean() == pytest.approx(0, abs=1e-6)
    assert actual[RESPONSE_MASK].std() == pytest.approx(1, abs=1e-4)
    order = np.argsort(VALUES[RESPONSE_MASK])
    assert (np.diff(actual[RESPONSE_MASK][order]) >= 0).all()
    assert not np.asarray(whiten(VALUES, np.zeros_like(RESPONSE_MASK))).any()


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_generalized_advantages_equal_those_of_tunix(discount):
    """Tunix has no unfinished responses. A further token with the last value as its value and reward is equivalent.

    Tunix whitens its advantages. Its returns are advantages plus values that are not whitened, so they are compared.
    """
    pytest.importorskip("tunix", reason="the extra tunix is not installed")
    from tunix.rl.algo_core import compute_gae_advantages

    last = START + LENGTH - 1
    rows = np.arange(SAMPLES)
    value, mask = (np.pad(array, [(0, 0), (0, 1)]) for array in (VALUES, RESPONSE_MASK.astype(np.int32)))
    reward = np.zeros_like(value)
    reward[rows, last] = np.where(FINISHED, REWARDS, 0)
    cut = rows[~FINISHED]
    value[cut, last[cut] + 1] = reward[cut, last[cut] + 1] = value[cut, last[cut]]
    mask[cut, last[cut] + 1] = 1
    with jax.numpy_rank_promotion("allow"):
        _, returns = compute_gae_advantages(reward, value, mask, discount, 0.8)
    actual = generalized_advantages(VALUES, REWARDS, RESPONSE_MASK, FINISHED, discount=discount, decay=0.8)
    np.testing.assert_allclose(actual[RESPONSE_MASK], (returns[:, :-1] - VALUES)[RESPONSE_MASK], atol=1e-5)
