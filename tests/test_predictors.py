"""Predictors against replay: their accuracy and loads by hand, plans from predictions, and what they gain and cost."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console
from support.traces import save_small_trace

from relibra_jax.cli.main import main
from relibra_jax.cli.predictor_table import Networks, predictor_table
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.evaluation import Batching, Costs, Ranks, make_setting, run_planner
from relibra_jax.evaluation.batches import make_batches
from relibra_jax.evaluation.predictor_prices import PredictorPrice, price_predictors
from relibra_jax.evaluation.predictors import (
    Network,
    count_right_by_layer_below,
    load_shares,
    make_predictors,
    mispredict,
    predict_by_key,
)
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.batch import count_batch
from relibra_jax.planning.metrics import forecast_error
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.relibra import relibra
from relibra_jax.traces.bootstrap import bootstrap
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import make_trace

EXPERTS, LAYERS, TOP_K = 16, 2, 2


def skewed_trace(seed=0, samples=64, tokens=32):
    """Draw a trace in which every sample has hot experts of its own, so that the past tells little of a micro-batch."""
    rng = np.random.default_rng(seed)
    ids = np.empty((samples, tokens, LAYERS, TOP_K), np.uint8)
    for sample, layer in np.ndindex(samples, LAYERS):
        chance = rng.dirichlet(np.full(EXPERTS, 0.1)) + 1e-3
        chance /= chance.sum()
        for token in range(tokens):
            ids[sample, token, layer] = rng.choice(EXPERTS, TOP_K, replace=False, p=chance)
    return make_trace(RoutingReplay(ids, np.ones((samples, tokens), bool)), EXPERTS, "skewed")


TOPOLOGY = Ranks(nodes=1, ranks_per_node=4, replica_slots=2).topology(EXPERTS)
COSTS = Costs(model="gpt-oss-20b")


@pytest.fixture(scope="module")
def setting():
    trace = skewed_trace()
    small = dataclasses.replace(COSTS, tokens_per_rank=16384.0)
    return make_setting(trace, TOPOLOGY, batching=Batching(batch_size=32, micro_batches=4), cost=small)


def priced(setting, networks):
    predictors, _ = make_predictors(setting.batches, networks, num_experts=EXPERTS, seed=setting.seed)
    return {each.name: each for each in price_predictors(predictors, setting)}


@pytest.fixture(scope="module")
def prices(setting):
    networks = [Network(accuracy, 0.0) for accuracy in (0.0, 0.5, 1.0)]
    return priced(setting, networks)


@pytest.mark.slow
def test_perfect_network_without_cost_equals_the_planner_with_the_true_loads(setting, prices):
    """Bit for bit: the plans are the same, and so is every number."""
    perfect = prices["a network, 100%"]
    outcome = run_planner("eplb", PLANNERS["eplb"], setting, timed_runs=0)
    assert (perfect.accuracy, perfect.overhead) == (1.0, 0.0)
    assert perfect.error == pytest.approx(0, abs=1e-6)
    assert (perfect.seconds, perfect.imbalance) == (outcome.modelled_seconds, outcome.imbalance)
    replay = prices["replay"]
    assert replay.seconds == perfect.seconds + replay.overhead
    assert 0 < replay.overhead < 1e-3 * replay.seconds


@pytest.mark.slow
def test_less_accurate_networks_gain_less(prices):
    names = ("a network, 0%", "a network, 50%", "a network, 100%")
    accuracy, error, imbalance, gain = (
        [getattr(prices[name], field) for name in names]
        for field in ("accuracy", "error", "imbalance", "gain")
    )
    assert accuracy == sorted(accuracy)
    assert accuracy[1] == pytest.approx(0.5, abs=0.02)
    assert error == sorted(error, reverse=True)
    assert imbalance == sorted(imbalance, reverse=True)
    assert imbalance[0] > imbalance[2] + 0.1
    assert gain == sorted(gain)
    assert prices["none"].gain == 0
    assert prices["none"].error is None


@pytest.mark.slow
def test_overhead_enters_the_time_once(setting, prices):
    """Twice the cost is twice the overhead, and nothing else changes."""
    free, one, two = (priced(setting, [Network(0.5, cost)])["a network, 50%"] for cost in (0.0, 0.1, 0.2))
    assert free == prices["a network, 50%"]
    for costly in (one, two):
        assert costly._replace(overhead=0.0, seconds=free.seconds, gain=free.gain) == free
        assert costly.seconds == pytest.approx(costly.compute + costly.communication + costly.overhead)
        assert costly.gain == pytest.approx(prices["none"].seconds / costly.seconds - 1)
    assert one.seconds - free.seconds == pytest.approx(one.overhead)
    assert two.overhead == pytest.approx(2 * one.overhead)
    model = setting.cost_model.model
    flops = 2 * (model.dense_params + TOP_K * model.expert_params) * LAYERS
    cluster = setting.cost_model.cluster
    tokens = setting.cost_model.scale * 32 * 32 / TOPOLOGY.num_ranks  # all samples are equally long
    speed = cluster.matmul_flops * cluster.matmul_efficiency
    assert one.overhead == pytest.approx(0.1 * flops * tokens / speed)


@pytest.mark.slow
def test_last_batch_is_the_strategy_from_history(setting, prices):
    outcome = run_planner("history", PLANNERS["eplb_history"], setting, timed_runs=0)
    assert prices["the last batch"].seconds == outcome.modelled_seconds
    assert prices["the last batch"].error == outcome.forecast_error


def test_error_rate_is_that_of_the_paper():
    """MoE-GPS: |estimate - share| / (1 / E), averaged over experts. With 8 experts, 0.018 / 8 off is 1.8%, 0.16 / 8 is
    16%, the paper's two rates, whatever the skew is."""
    for skew, rate in ((1.39, 0.018), (1.99, 0.16)):
        share = np.full(8, (1 - skew / 8) / 7)
        share[0] = skew / 8
        estimate = share + rate / 8 * np.tile([1, -1], 4)
        load = np.round(share * 1e8).astype(np.int32)[None, None]
        assert load.max() / load.mean() == pytest.approx(skew, rel=1e-6)
        assert forecast_error(estimate[None, None], load).item() == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.9, 1.0])
def test_mispredict_has_the_accuracy_that_is_asked_for(accuracy):
    trace = skewed_trace(1)
    share = load_shares(trace.replay, EXPERTS)
    predicted = mispredict(trace.replay, share, accuracy, seed=3)
    right = (predicted.expert_ids == trace.replay.expert_ids).mean((0, 1, 3))
    by_chance = (share**2).sum(-1)
    np.testing.assert_allclose(right, np.maximum(accuracy, by_chance), atol=0.03)
    if accuracy == 0:
        np.testing.assert_allclose(load_shares(predicted, EXPERTS), share, atol=0.02)


def test_less_accurate_networks_are_wrong_wherever_more_accurate_ones_are():
    trace = skewed_trace(2)
    share = load_shares(trace.replay, EXPERTS)
    half, most = (mispredict(trace.replay, share, each, seed=0).expert_ids for each in (0.5, 0.9))
    assert ((half != trace.replay.expert_ids) >= (most != trace.replay.expert_ids)).all()


def test_predict_by_key_equals_a_plain_count():
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (2, 5, 7, 3, 1)), axis=-1)[..., :2]
    masks = rng.random((2, 5, 7)) < 0.8
    before, now = (RoutingReplay(*each) for each in zip(ids, masks, strict=True))
    keys = rng.integers(0, 4, (5, 7)), rng.integers(0, 6, (5, 7))  # 4 and 5 are unknown
    prediction = predict_by_key(before, keys[0], now, keys[1], num_experts=6)
    load, right = np.zeros((5, 3, 6)), 0
    for sample, token, layer in np.argwhere(np.tile(now.mask[:, :, None], 3)):
        same = before.mask & (keys[0] == keys[1][sample, token])
        rows = before.expert_ids[same if same.any() else before.mask][:, layer]
        counts = np.bincount(rows.ravel(), minlength=6)
        load[sample, layer] += 2 * counts / counts.sum()
        likeliest = sorted(range(6), key=lambda expert: (-counts[expert], expert))[:2]
        right += len(set(likeliest) & set(now.expert_ids[sample, token, layer].tolist()))
    np.testing.assert_allclose(prediction.load, load, rtol=1e-5)
    assert prediction.right == right


def test_layer_below_predicts_a_permutation():
    """Layer 1 permutes the experts of layer 0, so all of layer 1 is right, and of layer 0 the most popular experts."""
    rng = np.random.default_rng(0)
    first = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (2, 6, 9, 1)), axis=-1)[..., :1]
    ids = np.stack([first, rng.permutation(8).astype(np.uint8)[first]], axis=3)
    before, now = (RoutingReplay(each, np.ones((6, 9), bool)) for each in ids)
    share = load_shares(before, 8)
    popular = int((now.expert_ids[:, :, 0] == share[0].argmax()).sum())
    assert count_right_by_layer_below(before, now, share) == 54 + popular


def test_table_by_token_needs_token_ids(tmp_path):
    """Where the experts follow from the token, a table by token is right and a table by position is not."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, 8 * 200)
    experts = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (40, LAYERS, 1)), axis=-1)[..., :TOP_K]
    rows = {"routed_experts": experts[tokens], "lengths": np.full(8, 200), "num_experts": np.int32(EXPERTS)}
    accuracy = {}
    for name, ids in (("with", {"token_ids": tokens}), ("without", {})):
        np.savez(tmp_path / f"{name}.npz", **rows, **ids)
        trace = read_trace(tmp_path / f"{name}.npz")
        assert (trace.token_ids is not None) == (name == "with")
        batches = make_batches(trace, Batching(batch_size=4, order="shuffled", seed=1), TOPOLOGY)
        predictors, missing = make_predictors(batches, [], num_experts=EXPERTS, seed=0)
        accuracy |= {each.name: each.accuracy for each in predictors}
        assert missing == ({} if name == "with" else {"a table by token": "the trace has no token_ids"})
    assert accuracy["a table by token"] == 1
    assert accuracy["a table by position"] < 0.5
    drawn = bootstrap(read_trace(tmp_path / "with.npz"), 12, seed=0)
    np.testing.assert_array_equal(experts[drawn.token_ids], drawn.replay.expert_ids)


@pytest.mark.parametrize("ids", [np.zeros(159, np.int32), np.zeros(160, np.float32)])
def test_wrong_token_ids_are_rejected(ids, tmp_path):
    experts = np.arange(160 * LAYERS, dtype=np.uint8).reshape(160, LAYERS, 1) % 4
    rows = {"routed_experts": experts, "lengths": np.full(8, 20)}
    np.savez(tmp_path / "wrong.npz", **rows, num_experts=np.int32(4), token_ids=ids)
    with pytest.raises(ValueError, match=r"token_ids must be integers \[160\], not "):
        read_trace(tmp_path / "wrong.npz")


def test_one_batch_has_no_tables():
    batches = make_batches(skewed_trace(samples=8), Batching(batch_size=8), TOPOLOGY)
    predictors, missing = make_predictors(batches, [Network(0.5, 0.1)], num_experts=EXPERTS, seed=0)
    assert [each.name for each in predictors] == ["none", "a network, 50%", "replay"]
    assert list(missing) == ["the last batch, and tables"]
    assert len(predictors[1].predicted) == 1


@pytest.mark.parametrize("stages", [2, (Stage(1), Stage(2))])
def test_plan_batch_plans_from_predicted_loads_and_runs_on_true_ones(stages):
    trace, planner = skewed_trace(samples=8), eplb()
    topology = Topology(num_nodes=1, ranks_per_node=4, num_experts=EXPERTS, replica_slots=1)
    state = planner.init(topology, LAYERS, key=jax.random.key(0))
    batch = count_batch(trace.replay, topology)
    true, _ = plan_batch(batch, planner, state, topology, stages=stages)
    same = batch._replace(predicted_load=batch.sample_load)
    jax.tree.map(
        np.testing.assert_array_equal, plan_batch(same, planner, state, topology, stages=stages)[0], true
    )
    other = batch._replace(predicted_load=batch.sample_load[:, :, ::-1])
    planned, _ = plan_batch(other, planner, state, topology, stages=stages)
    for one, plan in zip(
        *(each if isinstance(stages, tuple) else (each,) for each in (true, planned)), strict=True
    ):
        np.testing.assert_array_equal(plan.load, one.load)
        computed = np.zeros((*plan.load.shape[:2], EXPERTS), np.int64)
        for place in np.ndindex(plan.plan.quota.shape):
            computed[place[0], place[1], plan.plan.slot_expert[place]] += plan.plan.quota[place]
        np.testing.assert_array_equal(computed, np.asarray(plan.load).sum((2, 3)))
        assert (np.asarray(plan.plan.home) != np.asarray(one.plan.home)).any()


def test_predictions_are_rejected_where_nothing_would_use_them():
    topology = Topology(num_nodes=1, ranks_per_node=4, num_experts=EXPERTS, replica_slots=1)
    batch = count_batch(skewed_trace(samples=4).replay, topology)
    for planner in (relibra(), eplb(loads="history")):
        state = planner.init(topology, LAYERS, key=jax.random.key(0))
        given = batch._replace(predicted_load=batch.sample_load)
        with pytest.raises(ValueError, match="predicted_load is given, but the planner does not plan from"):
            plan_batch(given, planner, state, topology, stages=1)
    state = eplb().init(topology, LAYERS, key=jax.random.key(0))
    wrong = batch._replace(predicted_load=batch.sample_load[:2])
    with pytest.raises(ValueError, match="predicted_load"):
        plan_batch(wrong, eplb(), state, topology, stages=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--predictor-accuracy", "1.5"), "predictor_accuracy=1.5 must be from 0 to 1"),
        (("--predictor-cost", "-1"), "predictor_cost=-1.0 must be at least 0"),
        (
            ("--predictor-cost", "0.1", "0.2"),
            "predictor_cost has 2 values for 3 values of predictor_accuracy",
        ),
    ],
)
def test_advise_rejects_predictors_before_it_plans(options, says, tmp_path, capsys):
    trace = save_small_trace(tmp_path / "small.npz")
    assert main(["advise", str(trace), *options, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_predictor_table_shows_every_number_in_96_columns():
    """A predictor that predicts nothing has neither accuracy nor error."""
    none = PredictorPrice("none", None, None, 1.412, 1.114, 0.351, 0.0, 1.466, 0.0)
    network = PredictorPrice("a network, 100%", 1.0, 0.044, 1.156, 1.004, 0.327, 0.017, 1.348, 0.087)
    best = network._replace(name="a table by layer below", seconds=12.34)
    with_rows = predictor_table([none, network, best], replica_slots=1, width=96)
    console = Console(width=96, file=io.StringIO())
    console.print(with_rows)
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines if "none" in line or "network" in line] == [
        ["none", "-", "-", "1.412", "1.11s", "0.35s", "0.000s", "1.47s", "+0.0%"],
        ["a", "network,", "100%", "100.0%", "4.4%", "1.156", "1.00s", "0.33s", "0.017s", "1.35s", "+8.7%"],
    ]
    assert "a table by layer below" in console.file.getvalue()
    assert "…" not in console.file.getvalue()


def test_one_cost_is_for_all_networks():
    networks = Networks(predictor_accuracy=(0.2, 0.4), predictor_cost=(0.3,)).networks()
    assert networks == [Network(0.2, 0.3), Network(0.4, 0.3)]
