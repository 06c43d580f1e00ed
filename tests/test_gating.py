"""Tests of experts and gates against the models' formulas, and of an auxiliary loss independent of micro-batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.gating import GATINGS, Gating, balance_loss, check_gating, gates_at, select_experts

EXPERTS = 32
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(40, EXPERTS)).astype(np.float32) * 2
BIAS = RNG.normal(size=EXPERTS).astype(np.float32)


def published(name, logits, bias):
    """Return the model's own computation for one token in NumPy: the selected ids as a set, and the gates by id."""
    logits = logits.astype(np.float64)
    if name == "gpt-oss":
        chosen = np.argsort(-logits)[:4]
        weights = np.exp(logits[chosen] - logits[chosen].max())
        return chosen, weights / weights.sum()
    if name == "qwen3-moe":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        chosen = np.argsort(-scores)[:8]
        return chosen, scores[chosen] / scores[chosen].sum()
    scores = 1 / (1 + np.exp(-logits))
    corrected = scores + bias
    if name == "deepseek-v3":
        groups = np.sort(corrected.reshape(8, -1))[:, -2:].sum(-1)
        worst = np.argsort(-groups)[4:]
        corrected.reshape(8, -1)[worst] = -np.inf
    chosen = np.argsort(-corrected)[:8]
    scale = 1.0 if name == "glm-4.5-air" else 2.5
    return chosen, scale * scores[chosen] / scores[chosen].sum()


@pytest.mark.parametrize("name", GATINGS)
def test_gatings_equal_the_code_of_the_models(name):
    gating = GATINGS[name]
    bias = BIAS if gating.correction_bias else None
    ids = select_experts(LOGITS, gating, bias=bias)
    gates = gates_at(LOGITS, ids, gating)
    assert ids.dtype == jnp.int32
    assert gates.dtype == jnp.float32
    for token in range(len(LOGITS)):
        want_ids, want_gates = published(name, LOGITS[token], BIAS)
        np.testing.assert_array_equal(ids[token], want_ids)
        np.testing.assert_allclose(gates[token], want_gates, rtol=2e-6)


def test_select_experts_breaks_ties_by_id():
    for name, gating in GATINGS.items():
        bias = jnp.zeros(EXPERTS) if gating.correction_bias else None
        ids = select_experts(jnp.zeros((3, EXPERTS)), gating, bias=bias)
        np.testing.assert_array_equal(ids, np.tile(np.arange(gating.top_k), (3, 1)), err_msg=name)


def test_select_experts_keeps_groups_with_negative_scores():
    # Masking with 0 instead of minus infinity would select from groups that were not chosen.
    ids = select_experts(LOGITS, GATINGS["deepseek-v3"], bias=BIAS - 10)
    assert len({int(i) // 4 for i in ids[0]}) <= 4
    np.testing.assert_array_equal(ids, select_experts(LOGITS, GATINGS["deepseek-v3"], bias=BIAS))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_gates_at_replayed_ids_have_gradients(scores, normalise):
    gating = Gating(top_k=4, scores=scores, normalise=normalise, scale=1.5)
    ids = RNG.permuted(np.tile(np.arange(EXPERTS), (40, 1)), axis=1)[:, :4].astype(np.uint8)

    def dense(logits):
        values = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
        values = jnp.take_along_axis(values, ids.astype(np.int32), -1)
        return 1.5 * (values / values.sum(-1, keepdims=True) if normalise else values)

    weights = RNG.normal(size=(40, 4)).astype(np.float32)
    actual = jax.value_and_grad(lambda logits: (gates_at(logits, ids, gating) * weights).sum())(LOGITS)
    expected = jax.value_and_grad(lambda logits: (dense(logits) * weights).sum())(LOGITS)
    np.testing.assert_allclose(gates_at(LOGITS, ids, gating), dense(LOGITS), rtol=1e-5)
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", GATINGS)
def test_gates_at_padding_and_unlikely_experts_are_finite(name, normalise):
    gating = dataclasses.replace(GATINGS[name], normalise=normalise)
    # A padding token, one without a second expert, and one whose experts have tiny scores from the live router.
    logits = jnp.zeros((3, EXPERTS)).at[2, :2].set(-300.0)
    ids = jnp.array([[EMPTY, EMPTY], [5, EMPTY], [0, 1]])
    gates, vjp = jax.vjp(lambda logits: gates_at(logits, ids, gating), logits)
    (slope,) = vjp(jnp.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]))
    assert np.isfinite(slope).all()
    assert (slope[0] == 0).all()
    assert gates[0].tolist() == [0, 0]
    assert gates[1, 1] == 0
    if normalise:
        np.testing.assert_allclose(gates[1, 0], gating.scale)
        np.testing.assert_allclose(gates[2], gating.scale / 2)
        assert slope[2, 1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balance_loss_shares_add_up(scores):
    gating = Gating(top_k=2, scores=scores)
    mask = RNG.random(40) < 0.8
    ids = np.asarray(select_experts(LOGITS, gating))
    load = np.bincount(ids[mask].ravel(), minlength=EXPERTS)

    def whole(logits):
        values = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
        values = (values / values.sum(-1, keepdims=True))[mask]
        return EXPERTS * (load / load.sum()) @ values.mean(0)

    def shares(logits):
        order = np.random.default_rng(1).permutation(40)
        parts = order[:5], order[5:12], order[12:]
        return sum(balance_loss(logits[part], load, gating, mask=mask[part]) for part in parts)

    actual, expected = jax.value_and_grad(shares)(LOGITS), jax.value_and_grad(whole)(LOGITS)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-8)
    assert (actual[1][~mask] == 0).all()
    assert balance_loss(LOGITS, np.zeros(EXPERTS, np.int32), gating) == 0


def test_gating_rejects_what_cannot_be_routed():
    with pytest.raises(ValueError, match="top_k=0"):
        Gating(top_k=0, scores="softmax")
    with pytest.raises(ValueError, match="scores='linear' must be 'softmax' or 'sigmoid'"):
        Gating(top_k=1, scores="linear")
    with pytest.raises(ValueError, match="expert_groups=8"):
        Gating(top_k=1, scores="softmax", expert_groups=8)
    with pytest.raises(ValueError, match=r"top_expert_groups=3 must be in 1\.\.expert_groups=2"):
        Gating(top_k=1, scores="sigmoid", expert_groups=2, top_expert_groups=3)
    deepseek = GATINGS["deepseek-v3"]
    with pytest.raises(ValueError, match="12 experts must divide evenly into expert_groups=8"):
        check_gating(deepseek, 12)
    with pytest.raises(ValueError, match="expert_groups=8 has 1 expert in each group"):
        check_gating(dataclasses.replace(deepseek, top_k=2), 8)
    with pytest.raises(ValueError, match="top_k=9 is more than the 8 experts"):
        check_gating(dataclasses.replace(deepseek, top_k=9), 16)
    with pytest.raises(ValueError, match="correction_bias=True, but no bias"):
        select_experts(LOGITS, deepseek)
