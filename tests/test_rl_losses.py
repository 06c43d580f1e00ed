"""The losses equal loops in NumPy and Tunix's, and do not depend on micro-batches and ranks."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.rl.losses import (
    Clip,
    TokenResponses,
    policy_loss,
    supervised_loss,
    token_weights,
    value_loss,
)

SAMPLES, TOKENS = 12, 7
RNG = np.random.default_rng(0)
ADVANTAGES = RNG.normal(size=(SAMPLES, TOKENS)).astype(np.float32)
SCORED = RNG.random(SAMPLES) < 0.8
RESPONSE_MASK = RNG.random((SAMPLES, TOKENS)) < 0.6
OLD_LOG_PROBS = np.log(RNG.random((SAMPLES, TOKENS))).astype(np.float32)
LOG_PROBS = (OLD_LOG_PROBS + RNG.normal(0, 0.4, OLD_LOG_PROBS.shape)).astype(np.float32)


@pytest.mark.parametrize("kind", ["tokens", "responses"])
def test_token_weights_add_up_to_1_over_the_mask(kind):
    actual = np.asarray(token_weights(RESPONSE_MASK & SCORED[:, None], kind))
    counted = RESPONSE_MASK & SCORED[:, None]
    assert actual.sum() == pytest.approx(1, abs=1e-6)
    assert ((actual > 0) == counted).all()
    answers = counted.any(1).sum()
    for sample in np.flatnonzero(counted.any(1)):
        weight = 1 / counted.sum() if kind == "tokens" else 1 / (answers * counted[sample].sum())
        np.testing.assert_allclose(actual[sample][counted[sample]], weight, rtol=1e-5)


CLIPS = {
    "GRPO": ("clip", "responses", Clip(high=0.2)),
    "DAPO": ("clip", "tokens", Clip()),
    "dual clip": ("clip", "tokens", Clip(dual=1.3)),
    "GSPO": ("gspo", "responses", Clip(low=0.05, high=0.1)),
    "GSPO, dual clip": ("gspo", "tokens", Clip(low=0.05, high=0.1, dual=1.05)),
    "CISPO": ("cispo", "tokens", Clip(low=0.3, high=0.2)),
    "Dr. GRPO": ("clip", "length", Clip()),
}


@pytest.mark.parametrize("name", CLIPS)
def test_policy_loss_and_its_gradient_equal_a_loop_in_float64(name):
    kind, weigh, clip = CLIPS[name]
    weight = np.asarray(token_weights(RESPONSE_MASK & SCORED[:, None], weigh, length=TOKENS), np.float64)
    responses = TokenResponses(np.arange(SAMPLES)[:, None], SAMPLES)

    def loss(new):
        share = policy_loss(
            new,
            OLD_LOG_PROBS,
            ADVANTAGES,
            weight.astype(np.float32),
            clip=clip,
            kind=kind,
            responses=responses,
        )
        return share.loss, share

    (_, actual), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(LOG_PROBS)
    new, old, advantage = (each.astype(np.float64) for each in (LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES))
    expected, clipped, kl, slopes = 0.0, 0.0, 0.0, np.zeros_like(new)
    for i, t in zip(*np.nonzero(weight), strict=True):
        tokens = np.flatnonzero(weight[i])
        own = np.exp(new[i, t] - old[i, t])
        ratio = np.exp((new[i] - old[i])[tokens].mean()) if kind == "gspo" else own
        bounded = np.clip(ratio, 1 - clip.low, 1 + clip.high)
        kl += weight[i, t] * (own - 1 - np.log(own))
        if kind == "cispo":
            expected -= weight[i, t] * bounded * advantage[i, t] * new[i, t]
            slopes[i, t] -= weight[i, t] * bounded * advantage[i, t]
            clipped += weight[i, t] * (bounded != ratio)
            continue
        gain = min(ratio * advantage[i, t], bounded * advantage[i, t])
        if clip.dual is not None and advantage[i, t] < 0:
            gain = max(gain, clip.dual * advantage[i, t])
        expected -= weight[i, t] * gain
        if gain != ratio * advantage[i, t]:
            clipped += weight[i, t]
        elif kind == "gspo":
            slopes[i, tokens] -= weight[i, t] * gain / len(tokens)
        else:
            slopes[i, t] -= weight[i, t] * gain
    assert 0 < clipped < 1
    np.testing.assert_allclose([actual.loss, actual.clipped, actual.kl], [expected, clipped, kl], rtol=1e-4)
    np.testing.assert_allclose(slope, slopes, rtol=1e-4, atol=1e-7)


def test_ratios_of_responses_do_not_depend_on_where_their_tokens_are():
    """Several responses lie in one sequence, and a split one in several, as on ranks."""
    weight = np.asarray(token_weights(RESPONSE_MASK))
    number = np.broadcast_to(np.arange(SAMPLES)[:, None], RESPONSE_MASK.shape)
    arrays = (LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, weight)

    def loss(arrays, number):
        return policy_loss(*arrays, clip=Clip(), kind="gspo", responses=TokenResponses(number, SAMPLES)).loss

    order = np.random.default_rng(2).permutation(number.size)
    mixed = [each.ravel()[order].reshape(4, -1) for each in (*arrays, number)]
    np.testing.assert_allclose(loss(mixed[:4], mixed[4]), loss(arrays, number), rtol=1e-5)


def test_policy_loss_with_clip_higher_lets_ratios_rise_further():
    one = np.ones((1, 1), np.float32)
    shares = {
        high: policy_loss(0.25 * one, 0 * one, one, one, clip=Clip(high=high)) for high in (0.2, 0.28, 0.3)
    }
    assert [float(share.clipped) for share in shares.values()] == [1, 1, 0]
    assert float(shares[0.28].loss) == pytest.approx(-1.28)


def test_policy_loss_is_the_sum_over_any_micro_batches():
    weight = token_weights(RESPONSE_MASK & SCORED[:, None], "responses")

    def share(samples):
        parts = (LOG_PROBS[samples], OLD_LOG_PROBS[samples], ADVANTAGES[samples], weight[samples])
        return np.array(policy_loss(*parts, clip=Clip()))

    whole = share(np.arange(SAMPLES))
    mixed = np.random.default_rng(1).permutation(SAMPLES)
    np.testing.assert_allclose(sum(share(part) for part in np.split(mixed, [5, 6])), whole, atol=1e-6)


def test_policy_loss_ignores_tokens_without_weight():
    weight = np.array([[0.0, 1.0]], np.float32)
    strange = np.array([[-1e30, -0.5]], np.float32)
    loss, slope = jax.value_and_grad(
        lambda new: policy_loss(new, 0 * strange - 0.5, np.ones((1, 2)), weight, clip=Clip(high=0.2)).loss
    )(strange)
    assert loss == pytest.approx(-1)
    np.testing.assert_allclose(slope, [[0, -1]])


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policy_loss_and_its_gradient_are_finite_at_any_log_ratio(log_ratio, advantage):
    one = np.ones((1, 1), np.float32)
    loss, slope = jax.value_and_grad(
        lambda new: policy_loss(new, 0 * one, advantage * one, one, clip=Clip()).loss
    )(log_ratio * one)
    assert np.isfinite(loss)
    assert np.isfinite(slope).all()


def test_supervised_loss_is_the_mean_over_weighted_tokens():
    weight = np.asarray(token_weights(RESPONSE_MASK & SCORED[:, None]))
    counted = RESPONSE_MASK & SCORED[:, None]
    assert float(supervised_loss(LOG_PROBS, weight)) == pytest.approx(-LOG_PROBS[counted].mean(), rel=1e-5)


def test_token_weights_of_an_empty_mask_are_0():
    assert not np.asarray(token_weights(np.zeros_like(RESPONSE_MASK))).any()


def test_value_loss_and_its_gradient_equal_a_loop_in_numpy():
    rng, clip = np.random.default_rng(3), 0.3
    value, old, target = (rng.normal(0, 0.5, RESPONSE_MASK.shape).astype(np.float32) for _ in range(3))
    weight = np.asarray(token_weights(RESPONSE_MASK))
    # Values without a weight may be anything.
    strange = [np.where(RESPONSE_MASK, each, np.nan).astype(np.float32) for each in (value, old, target)]
    actual, slope = jax.jit(
        jax.value_and_grad(lambda value: value_loss(value, *strange[1:], weight, clip=clip))
    )(strange[0])
    expected, slopes, clipped = 0.0, np.zeros_like(value), 0
    for i, t in zip(*np.nonzero(RESPONSE_MASK), strict=True):
        free = value[i, t] - target[i, t]
        clipped_error = old[i, t] + np.clip(value[i, t] - old[i, t], -clip, clip) - target[i, t]
        expected += 0.5 * weight[i, t] * max(free**2, clipped_error**2)
        # If the clipped error is larger, the value has moved far enough and has no gradient.
        cut = clipped_error**2 > free**2
        clipped += cut
        slopes[i, t] = 0 if cut else weight[i, t] * free
    assert 0 < clipped < RESPONSE_MASK.sum()
    assert float(actual) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(slope, slopes, rtol=1e-4, atol=1e-7)


def test_value_loss_equals_that_of_tunix(monkeypatch):
    pytest.importorskip("tunix", reason="the extra tunix is not installed")
    from tunix.rl import algo_core

    rng = np.random.default_rng(4)
    value, old, target = (rng.normal(0, 0.5, RESPONSE_MASK.shape).astype(np.float32) for _ in range(3))
    ahead = np.pad(value, [(0, 0), (0, 1)])  # Tunix expects one more value, which it ignores
    monkeypatch.setattr(algo_core.common, "compute_score", lambda *_, **__: jax.numpy.asarray(ahead))
    example = SimpleNamespace(
        prompt_ids=None, completion_ids=value, completion_mask=RESPONSE_MASK, old_values=old, returns=target
    )
    expected, _ = algo_core.ppo_value_loss_fn(None, example, 0.2, 0, 0)
    actual = value_loss(value, old, target, token_weights(RESPONSE_MASK), clip=0.2)
    assert float(actual) == pytest.approx(float(expected), rel=1e-5)
