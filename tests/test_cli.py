"""The command line as a user runs it: the output, the files that it writes, and the runs of planners behind it."""

import json
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.traces import save_small_trace

from experiments.ablation import main as run_ablation
from relibra_jax.cli.ablation import ablation
from relibra_jax.cli.batch_prices import count_crossings, count_visits
from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.main import EXTRA, main
from relibra_jax.cli.modelled_time import make_cost_model
from relibra_jax.cli.planner_runs import Contender, run_contender
from relibra_jax.contract.plan_files import load_plan
from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import EMPTY, Planner
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import Batching, Costs, Ranks
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.metrics import forecast_error
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.starts import start_assignment
from relibra_jax.traces.read import read_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return save_small_trace(tmp_path_factory.mktemp("traces") / "small.npz")


SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--replica-slots", "1", "--micro-batches", "4"]


def check_written(folder, names, shown):
    """Check the printed table and the files of a comparison of the planners ``names``."""
    numbers = json.loads((folder / "compare.json").read_text())
    assert [row["planner"] for row in numbers["planners"]] == list(names)
    for row in numbers["planners"]:
        assert row["planner"] in shown
        assert f"{row['imbalance']:.4f}" in shown
        assert 1 <= row["imbalance"] <= row["imbalance_max"]
        assert sum(row["modelled_parts"].values()) == pytest.approx(row["modelled_seconds"])
        assert row["crossings"] <= row["crossings_busiest"]
        assert 0 < row["least_seconds"] <= row["modelled_seconds"]
        assert row["left"] == pytest.approx(row["modelled_seconds"] / row["least_seconds"] - 1)
        assert f"{row['left']:.0%}" in shown
        assert f"{row['share_overlapped']:.1%}" in shown
        assert row["share_as_needed"] > row["share_of_balanced"] > row["share_planning_exposed"] > 0
        assert row["share_of_local"] <= row["share_of_balanced"] * 1.2
    table = shown.split("imbalance: max / mean")[0]
    assert "…" not in table, "no number is cut on a terminal of 80 characters"
    assert max(map(len, table.splitlines()[1:])) <= 124
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.png", "timeline.png"]


@pytest.mark.slow
def test_compare_writes_table_figures_and_numbers(trace, tmp_path, capsys, monkeypatch):
    two_planners = {name: PLANNERS[name] for name in ("static", "relibra")}
    monkeypatch.setattr("relibra_jax.cli.compare.PLANNERS", two_planners)
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    check_written(tmp_path, two_planners, capsys.readouterr().out)


@pytest.mark.slow
def test_compare_counts_what_residents_cost(trace, tmp_path, capsys, monkeypatch):
    """Pushes are part of the time, and only planners that fill resident slots need their memory."""
    two_planners = {name: PLANNERS[name] for name in ("static", "relibra")}
    monkeypatch.setattr("relibra_jax.cli.compare.PLANNERS", two_planners)
    options = ["--resident-slots", "2", "--updates", "2", "--recompute", "--tokens-per-rank", "200000"]
    assert main(["compare", str(trace), *SMALL, *options, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    check_written(tmp_path, two_planners, shown)
    shown = " ".join(shown.split())
    for words in (
        "2 resident slots",
        " push ",
        " resid ",
        "hierarchical dispatch, 2 updates per batch, recompute, padded exchange between nodes, ragged inside",
    ):
        assert words in shown
    static, relibra = json.loads((tmp_path / "compare.json").read_text())["planners"]
    assert static["residents"] == static["modelled_parts"]["push"] == 0
    assert relibra["residents"] > 0
    assert relibra["modelled_parts"]["push"] > 0
    model = MODELS["gpt-oss-20b"]
    slot_bytes = 2 * model.moe_layers * model.expert_params * 6
    assert relibra["rank_memory"] - static["rank_memory"] == pytest.approx(slot_bytes)


@pytest.mark.long
def test_compare_runs_every_planner(trace, tmp_path, capsys):
    assert main(["compare", str(trace), *SMALL, "--out", str(tmp_path)]) == 0
    check_written(tmp_path, PLANNERS, capsys.readouterr().out)


@pytest.mark.long
def test_ablation_runs_every_variant(trace, tmp_path, capsys):
    assert run_ablation([str(trace), *SMALL, "--dispatch", "hierarchical", "--out", str(tmp_path)]) == 0
    check_written(tmp_path, ablation(), capsys.readouterr().out)


def test_plan_can_be_read_back(trace, tmp_path):
    out = tmp_path / "deep" / "plan.npz"
    assert main(["plan", str(trace), *SMALL, "--planner", "lplb", "--out", str(out)]) == 0
    plan, topology = load_plan(out)
    assert topology.num_experts == 16
    assert plan.quota.shape == (4, 2, 2, 2, topology.slots)


LAYOUTS = {
    (): (1, 16),
    ("--batch-size", "32"): (2, 32),
    ("--micro-batches", "16"): (16, 16),
    ("--token-budget", "1000"): (1, 16),
    ("--token-budget", "60"): (2, 16),
}


@pytest.mark.parametrize("options", LAYOUTS, ids=" ".join)
def test_a_batch_has_the_requested_micro_batches(trace, options):
    """And every rank stays within its token budget if samples are packed by tokens."""
    replay, topology = read_trace(trace).replay, Ranks(nodes=2, ranks_per_node=2).topology(16)
    sizes = {name[2:].replace("-", "_"): int(value) for name, value in zip(*[iter(options)] * 2, strict=True)}
    batches = make_batches(read_trace(trace), Batching(**sizes), topology)
    micro_batches, samples = LAYOUTS[options]
    assert batches.num_micro_batches == micro_batches
    for number, batch in enumerate(batches.replays):
        lengths = replay.mask.sum(1)[number * samples : (number + 1) * samples]
        np.testing.assert_array_equal(batch.mask.sum(1), lengths)
        packed = start_assignment(lengths, topology, num_micro_batches=micro_batches, cost=None)
        rank_tokens = np.append(lengths, 0)[packed.sample].sum(-1)
        assert rank_tokens.max() <= sizes.get("token_budget", rank_tokens.mean() + lengths.max())


TOPOLOGY = Ranks(nodes=2, ranks_per_node=2, replica_slots=1).topology(16)


@pytest.fixture(scope="module")
def batches(trace):
    return make_batches(read_trace(trace), Batching(), TOPOLOGY)


def test_every_planner_gets_the_same_input(trace, batches):
    """Planners get packed samples, unit times, and some tokens with the ranks where they lie."""
    inputs = []

    def update(load, state, topology, *, tokens, cost):
        jax.debug.callback(lambda ids, cost: inputs.append((ids.shape[1:], cost)), tokens.expert_ids, cost)
        return static().update(load, state, topology)

    entry = PlannerEntry(planner=Planner(static().init, update), summary="a planner that records its input")
    costs = Costs(dispatch="flat", updates=1, recompute=True, cluster="gb200-nvl72", context=1000.0)
    model = make_cost_model(costs, read_trace(trace), batches, TOPOLOGY)
    cost = model.price(TOPOLOGY)
    (planned,), _ = run_contender(Contender(entry=entry), batches, TOPOLOGY, cost=cost, seed=0)
    lengths = batches.replays[-1].mask.sum(1)
    packed = start_assignment(lengths, TOPOLOGY, num_micro_batches=batches.num_micro_batches, cost=cost)
    np.testing.assert_array_equal(planned.batch_plan.assignment.sample, packed.sample)
    np.testing.assert_array_equal(
        planned.batch_plan.load, expert_load(planned.replay, packed, num_experts=16)
    )
    jax.effects_barrier()
    assert inputs[0][0] == (2, 2)
    chex.assert_trees_all_close(inputs[0][1], jax.tree.map(jnp.float32, cost))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_contender_is_planned_as_a_user_plans(trace, batches, layout):
    """The plans are those of `plan_batch` with the keys of a Balancer, bit for bit."""
    model = make_cost_model(Costs(row_layout=layout), read_trace(trace), batches, TOPOLOGY)
    cost, relibra = model.price(TOPOLOGY), PLANNERS["relibra"]
    contender = Contender(entry=relibra, assign=assign_samples)
    (planned,), _ = run_contender(contender, batches, TOPOLOGY, cost=cost, seed=3, timed_runs=0)
    planner_key, key = jax.random.split(jax.random.key(3))
    state = relibra.planner.init(TOPOLOGY, 2, key=planner_key)
    for replay in batches.replays:
        key, assign_key = jax.random.split(key)
        batch_plan, state = plan_batch(
            *(replay, relibra.planner, state, TOPOLOGY),
            num_micro_batches=batches.num_micro_batches,
            assign=assign_samples,
            key=assign_key,
            cost=cost,
        )
    chex.assert_trees_all_equal(planned.batch_plan, batch_plan)


def test_the_cost_model_is_that_of_the_options(trace, batches):
    costs = Costs(cluster="gb200-nvl72", context=1000.0, tokens_per_rank=500.0, exchange="padded", shards=3)
    model = make_cost_model(costs, read_trace(trace), batches, TOPOLOGY)
    lengths = np.concatenate([replay.mask.sum(1) for replay in batches.replays])
    mean = lengths.sum() / len(batches.replays) / batches.num_micro_batches
    assert model.scale == pytest.approx(500.0 * 4 / mean)
    assert model.stretch == pytest.approx(1000.0 / lengths.mean())
    assert (model.model.num_experts, model.model.top_k) == (16, 2)
    assert model.model.width == MODELS["gpt-oss-20b"].width
    assert (model.cluster, model.shards) == (CLUSTERS["gb200-nvl72"], 3)
    run = model.on(TOPOLOGY)
    assert (run.path, run.between, run.inside, run.fetch) == ("hierarchical", "padded", "padded", "ragged")


@pytest.mark.parametrize("name", ["eplb", "eplb_batch", "eplb_history", "popfetcher"])
def test_forecast_errors_are_those_of_the_planners_forecast(trace, batches, name):
    entry, model = PLANNERS[name], make_cost_model(Costs(), read_trace(trace), batches, TOPOLOGY)
    cost = model.price(TOPOLOGY)
    (planned,), _ = run_contender(Contender(entry=entry), batches, TOPOLOGY, cost=cost, seed=0, timed_runs=0)
    before, now = (
        expert_load(
            replay,
            start_assignment(
                replay.mask.sum(1), TOPOLOGY, num_micro_batches=batches.num_micro_batches, cost=cost
            ),
            num_experts=16,
        ).sum((2, 3))
        for replay in batches.replays
    )
    expected = {"eplb": now, "eplb_batch": now, "eplb_history": before.sum(0)[None]}
    if name in expected:
        np.testing.assert_allclose(planned.forecast_error, forecast_error(expected[name], now), rtol=1e-5)
    history = forecast_error(expected["eplb_history"], now)
    assert (planned.forecast_error == history).all() == (name == "eplb_history")
    if name == "popfetcher":
        np.testing.assert_allclose(planned.forecast_error[:, 0], history[:, 0], rtol=1e-5)
        assert (planned.forecast_error[:, 1] != history[:, 1]).all(), (
            "these layers are forecast from the transitions of the batch before"
        )


@pytest.mark.parametrize(
    ("name", "moves"), [("eplb", False), ("eplb_history", False), ("eplb_repacked", True)]
)
def test_initial_moves_are_not_counted(trace, batches, name, moves):
    """Planners place homes in the first batch, or in the second if they only forecast loads: no moves are counted."""
    model = make_cost_model(Costs(), read_trace(trace), batches, TOPOLOGY)
    contender = Contender(entry=PLANNERS[name])
    (planned,), _ = run_contender(
        contender, batches, TOPOLOGY, cost=model.price(TOPOLOGY), seed=0, timed_runs=0
    )
    contiguous = np.arange(16)[None]
    assert (np.asarray(planned.batch_plan.plan.home) != contiguous).any()
    assert (planned.previous_home != planned.batch_plan.plan.home).any() == moves


@pytest.mark.parametrize("cluster", ["h100", "h100-ethernet-200"])
@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
def test_crossings_are_counted_token_by_token(trace, batches, dispatch, cluster):
    """Under static placement an expert is on one node, so tokens cross if they lie on another node."""
    model = make_cost_model(Costs(dispatch=dispatch, cluster=cluster), read_trace(trace), batches, TOPOLOGY)
    contender = Contender(entry=PLANNERS["static"])
    (planned,), _ = run_contender(contender, batches, TOPOLOGY, cost=model.price(TOPOLOGY), seed=0)
    ids, mask = planned.replay
    tokens, sent, busiest = 0, 0, 0.0
    for ranks in np.asarray(planned.batch_plan.assignment.sample):
        ends = np.zeros((2, 2, 2, 2))  # sent or received, layer, node, local
        for (node, local), samples in ((place, ranks[place]) for place in np.ndindex(2, 2)):
            token_experts = np.concatenate(
                [ids[sample][mask[sample]] for sample in samples if sample != EMPTY]
            )
            away = (token_experts // 8 != node).astype(int)  # 8 experts per node
            if dispatch == "hierarchical":
                away = away.max(-1, keepdims=True)
            tokens += len(token_experts) * 2  # layers
            sent += away.sum()
            ends[0, :, node, local] += away.sum((0, 2))
            if dispatch == "hierarchical":
                ends[1, :, 1 - node, local] += away.sum((0, 2))
            else:
                for rank in range(2):
                    ends[1, :, 1 - node, rank] += (token_experts // 4 == 2 * (1 - node) + rank).sum((0, 2))
        if cluster != "h100":
            ends = ends.mean(-1, keepdims=True)
        busiest += ends.max((0, 2, 3)).sum()
    cost = model.price(TOPOLOGY)
    crossings = count_crossings(planned, TOPOLOGY, cost, visits=count_visits(planned, TOPOLOGY, cost))
    assert crossings == pytest.approx((sent / tokens, 4 * busiest / tokens))


def test_inspect_counts(trace, capsys):
    assert main(["inspect", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "16, top-2" in shown
    assert "32" in shown


def test_the_default_trace_is_the_recorded_one(monkeypatch, capsys):
    monkeypatch.delenv("RELIBRA_TRACE", raising=False)
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out
    assert "recorded_trace.npz" in shown
    assert "16, top-2" in shown


def test_a_trace_by_name(capsys):
    assert main(["inspect", "recorded"]) == 0
    assert "recorded_trace.npz" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["compare", "plan", "inspect"])
def test_help_names_the_trace(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "TRACE The trace: a name" in " ".join(capsys.readouterr().out.split())


def test_environment_names_a_trace(trace, monkeypatch, capsys):
    monkeypatch.setenv("RELIBRA_TRACE", str(trace))
    assert main(["inspect"]) == 0
    assert "small.npz" in capsys.readouterr().out


@pytest.mark.parametrize("package", EXTRA)
def test_missing_extra_is_one_line_and_status_2(package):
    program = f"""
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
from relibra_jax.cli.main import main
sys.exit(main(["inspect"]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f'error: relibra needs {package}: pip install "relibra-jax[cli]"\n'


def test_the_library_starts_without_its_command_line():
    names = (*EXTRA, "relibra_jax.cli")
    program = f"import relibra_jax, sys; sys.exit(bool(set(sys.modules) & set({names})))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_trace_with_inferred_experts_says_so(trace, tmp_path, capsys):
    with np.load(trace) as file:
        np.savez(tmp_path / "bare.npz", routed_experts=file["routed_experts"], lengths=file["lengths"])
    assert main(["inspect", str(tmp_path / "bare.npz")]) == 0
    assert "inferred" in capsys.readouterr().out
