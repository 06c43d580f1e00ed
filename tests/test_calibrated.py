"""Synthetic routing is as uneven as the recording to which it was fitted, and as its parameters say."""

import dataclasses

import numpy as np
import pytest

from relibra_jax.contract.replay import check_replay
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.traces.calibrate import calibrate, measure_likeness
from relibra_jax.traces.calibrated import GPT_OSS_20B, SYNTHETIC, draw_trace
from relibra_jax.traces.drawn_steps import TURN, changed_choices, draw_steps
from relibra_jax.traces.drift import measure_drift
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.statistics import count_load, load_spread, pair_lift
from relibra_jax.traces.trace import make_trace


@pytest.fixture(scope="module")
def recorded(shared):
    return read_trace(shared / "traces" / "gptoss20b_rollouts.npz")


def close(drawn, target):
    """The imbalance may differ by 5%, its excess over 1 and the skew by 10%, churn and correlation by 15%."""
    np.testing.assert_allclose(drawn.imbalance, target.imbalance, rtol=0.05)
    np.testing.assert_allclose(drawn.imbalance - 1, target.imbalance - 1, rtol=0.1)
    np.testing.assert_allclose(drawn.spread, target.spread, rtol=0.1)
    np.testing.assert_allclose(drawn.hottest, target.hottest, rtol=0.1)
    np.testing.assert_allclose(drawn.lift - 1, target.lift - 1, rtol=0.1)
    np.testing.assert_allclose(drawn.churn, target.churn, rtol=0.15)
    np.testing.assert_allclose(1 - drawn.correlation, 1 - target.correlation, rtol=0.15)
    growth = target.imbalance[-1] - target.imbalance[0]
    np.testing.assert_allclose(drawn.imbalance[-1] - drawn.imbalance[0], growth, rtol=0.15)


@pytest.mark.slow
def test_draw_trace_is_as_uneven_as_the_recording_of_gpt_oss(recorded):
    """The drawn trace has the samples and layers of the recording, and a different seed than that of the fit."""
    samples, _, layers, _ = recorded.replay.expert_ids.shape
    drawn = draw_trace(GPT_OSS_20B, samples=samples, layers=layers, seed=1)
    close(measure_likeness(drawn), measure_likeness(recorded))
    lengths = [trace.replay.mask.sum(1) for trace in (drawn, recorded)]
    np.testing.assert_allclose(*[length.mean() for length in lengths], rtol=0.1)
    assert lengths[0].max() == lengths[1].max()


@pytest.mark.long
def test_calibrate_repeats_the_stored_fit(recorded):
    fitted = calibrate(recorded)
    assert fitted.lengths == GPT_OSS_20B.lengths
    for field in ("popularity", "topic", "factors", "domain_share", "domains"):
        np.testing.assert_allclose(getattr(fitted, field), getattr(GPT_OSS_20B, field), rtol=0.02)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_draw_trace_keeps_the_spread_of_an_expert_in_wider_models(name):
    """Larger models keep the recorded spread (0.72) and lift of pairs (1.87)."""
    wide = SYNTHETIC[name]
    trace = draw_trace(
        wide.calibration, samples=96, num_experts=wide.num_experts, top_k=wide.top_k, layers=4, seed=1
    )
    check_replay(trace.replay, num_experts=wide.num_experts)
    assert ("by assumption" in trace.note) == (wide.num_experts > 32)
    load = count_load(trace.replay, wide.num_experts).sum(0)
    np.testing.assert_allclose(load_spread(load).mean(), 0.72, rtol=0.15)
    np.testing.assert_allclose(pair_lift(trace.replay, wide.num_experts).mean.mean(), 1.87, rtol=0.15)


def test_calibrate_finds_a_calibration_again():
    """A calibration fitted to a drawn trace draws similar traces."""
    truth = dataclasses.replace(
        GPT_OSS_20B, popularity=1.0, topic=2.0, factors=4.0, domains=16, lengths=(40, 60, 80)
    )
    trace = draw_trace(truth, samples=160, num_experts=16, top_k=2, layers=6, seed=5)
    fitted = calibrate(trace, rounds=8)
    drawn = draw_trace(fitted, samples=160, num_experts=16, top_k=2, layers=6, seed=6)
    one, other = measure_likeness(drawn), measure_likeness(trace)
    np.testing.assert_allclose(one.imbalance, other.imbalance, rtol=0.1)
    np.testing.assert_allclose(one.lift, other.lift, rtol=0.1)
    assert fitted.domain_share == pytest.approx(truth.domain_share, abs=0.15)
    assert fitted.domains == pytest.approx(16, abs=2)
    assert (fitted.lengths[0], fitted.lengths[-1]) == pytest.approx((40, 80), abs=1)


@pytest.mark.parametrize(
    ("part", "measure"),
    [
        ("popularity", lambda likeness: likeness.imbalance[0]),
        ("topic", lambda likeness: likeness.imbalance[-1] - likeness.imbalance[0]),
        ("topic", lambda likeness: likeness.churn),
        ("factors", lambda likeness: likeness.lift),
    ],
    ids=["imbalance", "growth", "churn", "lift"],
)
def test_draw_trace_lets_each_part_answer_for_its_measure(part, measure):
    small = {"samples": 64, "num_experts": 32, "layers": 4, "seed": 0}
    base = dataclasses.replace(GPT_OSS_20B, popularity=1.0, topic=1.0, factors=1.0, lengths=(64, 64))
    more = dataclasses.replace(base, **{part: 4.0})
    assert measure(measure_likeness(draw_trace(more, **small))) > measure(
        measure_likeness(draw_trace(base, **small))
    )


def test_read_trace_draws_the_size_that_a_name_stands_for():
    """The drawn trace has 1,024 samples, as many as a training batch."""
    trace = read_trace("synthetic-32")
    assert trace.replay.expert_ids.shape == (1024, 511, 8, 4)
    assert list(SYNTHETIC) == ["synthetic-32", "synthetic-128", "synthetic-256"]


def test_draw_trace_says_that_the_trace_is_synthetic():
    trace = draw_trace(GPT_OSS_20B, samples=40, layers=1, seed=3)
    assert trace.synthetic
    assert trace.note == f"synthetic, seed 3, calibrated on {GPT_OSS_20B.source}"
    assert len(trace.domain) == 40
    assert len(trace.domains) == len(set(trace.domain)) > 20
    again, other = (draw_trace(GPT_OSS_20B, samples=40, layers=1, seed=seed) for seed in (3, 4))
    np.testing.assert_array_equal(trace.replay.expert_ids, again.replay.expert_ids)
    assert trace.replay.mask.sum() != other.replay.mask.sum()


def test_draw_trace_and_measure_likeness_reject_what_they_cannot_do(monkeypatch):
    for options, message in (
        ({"samples": 0}, "samples=0 must be an integer of at least 1"),
        ({"num_experts": 3}, "num_experts=3 must be an integer of at least 4"),
        ({"seed": -1}, "seed=-1 must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_trace(GPT_OSS_20B, **options)
    few = make_trace(RoutingReplay(np.zeros((40, 1, 1, 1), np.uint8), np.ones((40, 1), bool)), 8, "few")
    with pytest.raises(
        ValueError, match="few has 40 samples with tokens, and top-1 of 8 experts; a calibration needs"
    ):
        measure_likeness(few)
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: 2**20)
    with pytest.raises(ValueError, match=r"drawing 1024 samples x \d+ tokens x 8 layers of 32 experts needs"):
        draw_trace(GPT_OSS_20B)


def test_an_update_changes_a_tenth_of_the_choices_of_the_same_tokens():
    changed = changed_choices(SYNTHETIC["synthetic-128"], TURN, layers=4, tokens=512)
    assert changed == pytest.approx(0.1, rel=0.15)


def test_drawn_steps_drift_only_if_they_turn(monkeypatch):
    monkeypatch.setattr("relibra_jax.traces.drawn_steps.MEDIAN_LENGTH", 64)
    sizes = {"steps": 2, "prompts": 128, "responses_per_prompt": 1}
    for turn, least, most in ((0.0, 0.0, 0.1), (0.5, 0.3, np.inf)):
        trace = draw_steps(SYNTHETIC["synthetic-32"], turn=turn, **sizes)
        assert trace.synthetic
        check_replay(trace.replay, num_experts=32)
        drift = measure_drift(count_load(trace.replay, 32), trace.recording.step, trace.recording.prompt)
        more = drift.between.distance.mean() / drift.by_chance.distance.mean() - 1
        assert least - 0.1 < more < most, turn
    lengths = trace.replay.mask.sum(1)
    assert np.median(lengths) == pytest.approx(64, rel=0.25)
    assert (trace.recording.versions[trace.replay.mask] == np.repeat(trace.recording.step, lengths)).all()
