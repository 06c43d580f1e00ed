"""``python -m experiments.predictors``: its loads against loops, the parts of its prices, and what it writes."""

import dataclasses

import numpy as np
import pytest

from experiments.predictors import prices
from experiments.predictors.figure import Row, draw_predictors, lead
from experiments.predictors.loads import STEPS, decode_like, prefill_like
from experiments.predictors.prices import Priced, Times, price_load
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation.predictors import make_predictors
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.traces.trace import make_trace

TABLES = ("a table by position", "a table by layer below")
EXPERTS, RANKS = 8, 2
TOPOLOGY = Topology(num_nodes=1, ranks_per_node=RANKS, num_experts=EXPERTS, replica_slots=1)


@pytest.fixture(scope="module")
def trace():
    """Samples of 36 to 40 tokens of which most use the first experts, and one that is too short to be decoded."""
    rng = np.random.default_rng(0)
    lengths = np.array([36, 40, 38, 20, 37, 39, 40, 36, 38, 37, 39, 40, 38, 36, 37, 39, 40])
    popular = np.array([4, 3, 2, 2, 1, 1, 1, 1]) / 15
    ids = np.stack([rng.choice(EXPERTS, (len(lengths), 40), p=popular)] * 2, -1)[..., None, :]
    ids[..., 1] = (ids[..., 0] + 1) % EXPERTS
    mask = np.arange(40) < lengths[:, None]
    return make_trace(RoutingReplay(ids.astype(np.uint8), mask), EXPERTS, "small")


def test_decode_like_micro_batches_are_steps_and_samples_stay_on_their_ranks(trace):
    load = decode_like(trace, TOPOLOGY, tokens_per_rank=8.0, context=100.0)
    ids = np.asarray(trace.replay.expert_ids)
    longest = [one for one in np.argsort(-np.asarray(trace.replay.mask).sum(1), kind="stable") if one != 3]
    first = 36 // 2 - STEPS
    for number, replay in enumerate(load.batches.replays):
        assert replay.expert_ids.shape == (16 * STEPS, 1, 1, 2)
        assignment = pack_samples(replay.mask.sum(1), TOPOLOGY, num_micro_batches=STEPS)
        for step in range(STEPS):
            for rank in range(RANKS):
                own = replay.expert_ids[assignment.sample[step, 0, rank], 0, 0]
                samples = longest[8 * rank : 8 * rank + 8]
                np.testing.assert_array_equal(own, ids[samples, first + number * STEPS + step, 0])


def test_loads_need_samples_that_are_long_enough(trace):
    short = trace._replace(replay=RoutingReplay(*(each[:, :20] for each in trace.replay)))
    with pytest.raises(ValueError, match="small has fewer than 2 samples of at least 32 tokens"):
        decode_like(short, TOPOLOGY, tokens_per_rank=8.0, context=100.0)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_price_load_of_predictors(every, trace, monkeypatch):
    """Without ``every``, only of those that take few programs: none, the distribution and the networks."""

    def few(*args, **options):
        made, missing = make_predictors(*args, **options)
        return [each for each in made if every or each.name not in ("replay", *TABLES)], missing

    monkeypatch.setattr(prices, "ACCURACIES", (0.6, 0.9))
    monkeypatch.setattr(prices, "make_predictors", few)
    model = dataclasses.replace(MODELS["gpt-oss-20b"], num_experts=EXPERTS, top_k=2)
    clusters = [CLUSTERS["a100"], CLUSTERS["h100"]]
    load = prefill_like(trace, TOPOLOGY, tokens_per_rank=4096.0, seed=0)
    priced, skew = price_load(load, model, TOPOLOGY, clusters, seed=0)
    by_name = {each.name: each for each in priced}
    assert list(by_name)[:2] == ["none", "the last batch"]
    assert set(by_name) >= {"a network, 60%", "a network, 90%"}
    assert 1.5 < skew < 4
    none, accurate = by_name["none"], by_name["a network, 90%"]
    assert accurate.imbalance < none.imbalance
    assert accurate.error < by_name["a network, 60%"].error
    if every:
        assert set(by_name) >= set(TABLES)
        assert by_name["replay"].error == 0
    for each in priced:
        for times in each.times:
            assert min(times) >= 0
            assert times.skipped == pytest.approx(
                (each.accuracy or 0) * times.exchange / 2 if each.by_token else 0
            )
    assert none.times[0].copies == none.times[0].predictor == 0
    assert by_name["the last batch"].times[0].copies == 0, "copies of the distribution stay"
    low, high = (by_name[f"a network, {share}%"].times[0].predictor for share in (60, 90))
    assert high / low == pytest.approx(10**1.5, rel=0.01)
    assert none.times[0].experts > none.times[1].experts


@pytest.fixture
def row():
    def priced(name, accuracy, *parts):
        return Priced(name, accuracy, 0.0, 1.0, (Times(*parts), Times(*parts)))

    return [
        priced("none", None, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0),
        priced("the last batch", 0.3, 1.0, 1.5, 1.0, 0.0, 0.0, 0.0),
        priced("a table by position", 0.4, 1.0, 1.6, 1.0, 0.0, 0.0, 0.2),
        priced("a network, 50%", 0.5, 1.0, 1.2, 1.0, 0.1, 0.1, 0.25),
        priced("a network, 90%", 0.9, 1.0, 1.1, 1.0, 0.1, 0.4, 0.45),
        priced("replay", 1.0, 1.0, 1.0, 1.0, 0.1, 0.0, 0.0),
    ]


def test_lead_compares_the_distribution_with_the_best_network(row):
    # As layers run, the best network takes 3.4 s; as published 3.15 s; the distribution takes 3.5 s.
    assert lead(row, 0, published=False) == pytest.approx(-0.1 / 4)
    assert lead(row, 1, published=True) == pytest.approx(-0.35 / 4)


@pytest.mark.long
def test_draw_predictors_draws_every_load(row, tmp_path):
    rows = [Row(name, [1.2, 1.9], [row, row]) for name in ("prefill-like", "decode-like")]
    draw_predictors(tmp_path / "figure.png", rows, (300.0, 16.0), "a title")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
