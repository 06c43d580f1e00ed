"""The float8 experiments: the arithmetic of their tables, and one-line errors for invalid input."""

import numpy as np
import pytest
from support.plans import planned

from experiments.float8 import __main__ as program
from experiments.float8.hot_ranks import HotRanks
from experiments.float8.policy_error import compare
from experiments.float8.recompute_time import PLANNED, float8_price, price_recompute
from experiments.program import run_program
from experiments.rl.losses import Clip
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import BatchPlan, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import Batching, Costs, PlannedBatch, make_setting
from relibra_jax.planning.assignment import assign_in_order

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=0)


def run(*args):
    return run_program(program.main, program.Command.__value__, args)


def test_compare_equals_errors_computed_by_hand():
    """The ratio of an exact update is the exact probability over that of float8."""
    reference, float8 = np.log([0.5, 0.2, 0.9, 0.1]), np.log([0.5, 0.1, 0.9, 0.2])
    errors = compare(float8, reference, Clip())
    assert errors.mean == pytest.approx(np.log(2) / 2)
    assert errors.largest == pytest.approx(np.log(2))
    assert errors.clipped == 0.5  # ratios 2 and 1/2
    assert errors.kl == pytest.approx(((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 4)
    wide = compare(float8, reference, Clip(low=0.5, high=1.5))
    assert wide.clipped == 0


def test_price_recompute_waits_for_the_slowest_rank_with_and_without_float8():
    """In one node, and without effects of tiles, the expert time of a micro-batch is that of its largest rank load."""
    trace = synthetic_trace(samples=16, mean_tokens=24, layers=2, num_experts=8, top_k=2)
    costs = Costs(dispatch="flat", tokens_per_rank=1e6)
    setting = make_setting(trace, TOPOLOGY, batching=Batching(batch_size=16, micro_batches=2), cost=costs)
    cost, (replay,) = setting.cost_model, setting.batches.replays
    assignment = assign_in_order(16, TOPOLOGY, num_micro_batches=2)
    load = np.asarray(expert_load(replay, assignment, num_experts=8))
    plan = planned("static", TOPOLOGY, load)
    batch = PlannedBatch(replay, BatchPlan(assignment, load, plan), plan.home, np.zeros((2, 2), np.float32))
    rows = plan.quota.sum(-1).astype(float)

    def seconds(rows):
        flops = cost.cluster.matmul_flops * cost.cluster.matmul_efficiency
        return cost.scale * rows.max((-2, -1)).sum() * 2 * cost.model.expert_params / flops

    exact, hot, all_ranks = (
        price_recompute([batch], TOPOLOGY, cost, rule)
        for rule in (None, HotRanks(threshold=1.0, min_rows=1), HotRanks(threshold=0.0, min_rows=1))
    )
    marks = rows > rows.mean((-2, -1), keepdims=True)
    cluster, model = cost.cluster, cost.model
    ratio = (
        cluster.float8_flops * cluster.float8_efficiency / (cluster.matmul_flops * cluster.matmul_efficiency)
    )
    # Rounding reads 2 bytes of a number twice and writes 1; of the hidden numbers, it reads gate and up.
    memory = cluster.memory_bandwidth * cluster.memory_efficiency
    weights = 5 * TOPOLOGY.home_slots * model.expert_params / memory
    row = cost.scale * (5 * model.width + 9 * model.expert_width) / memory
    per_row = cost.scale * 2 * model.expert_params / (cluster.matmul_flops * cluster.matmul_efficiency)
    float8 = rows * (per_row / ratio + row) + weights
    expected = np.where(marks, float8, rows * per_row).max((-2, -1)).sum()
    assert 1e-3 * exact.compute == pytest.approx(seconds(rows), rel=1e-2)
    assert 1e-3 * hot.compute == pytest.approx(expected, rel=1e-2)
    assert 1e-3 * all_ranks.compute == pytest.approx(float8.max((-2, -1)).sum(), rel=1e-2)
    assert (exact.marked, hot.marked, all_ranks.marked) == (0, pytest.approx(marks.mean()), 1)
    assert exact.total - exact.compute == pytest.approx(hot.total - hot.compute, rel=1e-4)


def test_float8_is_faster_on_clusters_that_have_it_and_only_costs_rounding_on_others():
    for name, cluster in CLUSTERS.items():
        price = float8_price(CostModel(cluster=cluster, model=MODELS["qwen3-30b-a3b"]), slots=18)
        assert (price.products < 1) == (name not in ("a100", "cpu-host"))
        assert price.products <= 1
        assert price.weights > 0


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["error", "--run", "nowhere"], "nowhere: no run to resume, because there is no config.json"),
        (["error", "--thresholds", "-1"], "thresholds=-1.0 must be at least 0 and at most 1e+09"),
        (["error", "--batches", "0"], "batches=0 must be an integer of at least 1"),
        (["time", "--min-rows", "0"], "min_rows=0 must be an integer of at least 1"),
        (["time", "--thresholds", "nan"], "thresholds=nan must be at least 0"),
        (["time", "--model", "gpt"], "model='gpt' must be one of"),
        ([], "Expected one of {error, time}"),
    ],
    ids=" ".join,
)
def test_program_reports_invalid_input_in_one_line(args, line, capsys):
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_program_prints_modelled_times_of_every_plan(capsys, tmp_path):
    figure = tmp_path / "recompute.png"
    settings = ("--thresholds", "1.25", "--batch-size", "32", "--micro-batches", "2")
    assert run("time", "synthetic-32", *settings, "--figure", str(figure)) == 0
    out = capsys.readouterr().out
    assert "modelled, not measured" in out
    for name in PLANNED:
        assert f" {name} " in out
    assert figure.read_bytes().startswith(b"\x89PNG")
