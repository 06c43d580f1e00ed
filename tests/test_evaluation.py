"""Evaluation of planners: the batches and the price that they get, and what is counted of their plans."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.traces import save_small_trace

from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.types import BALANCE, EMPTY
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import Batching, Costs, Outcome, Ranks, make_setting, run_planner
from relibra_jax.evaluation.batches import make_batches
from relibra_jax.evaluation.replica_nodes import with_replica_nodes
from relibra_jax.evaluation.variants import with_samples_assigned
from relibra_jax.planning.assignment import assign_samples
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.metrics import forecast_error
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.starts import start_assignment
from relibra_jax.traces.read import read_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return read_trace(save_small_trace(tmp_path_factory.mktemp("traces") / "small.npz"))


LAYOUTS = {
    (): (1, 16),
    ("--batch-size", "32"): (2, 32),
    ("--micro-batches", "16"): (16, 16),
    ("--token-budget", "1000"): (1, 16),
    ("--token-budget", "60"): (2, 16),
}


@pytest.mark.parametrize("options", LAYOUTS, ids=" ".join)
def test_make_batches_has_the_requested_micro_batches(trace, options):
    """Every rank also stays within its token budget if samples are packed by tokens."""
    replay, topology = trace.replay, Ranks(nodes=2, ranks_per_node=2).topology(16)
    sizes = {name[2:].replace("-", "_"): int(value) for name, value in zip(*[iter(options)] * 2, strict=True)}
    batches = make_batches(trace, Batching(**sizes), topology)
    micro_batches, samples = LAYOUTS[options]
    assert batches.num_micro_batches == micro_batches
    for number, batch in enumerate(batches.replays):
        lengths = replay.mask.sum(1)[number * samples : (number + 1) * samples]
        np.testing.assert_array_equal(batch.mask.sum(1), lengths)
        packed = start_assignment(lengths, topology, num_micro_batches=micro_batches, price=BALANCE)
        rank_tokens = np.append(lengths, 0)[packed.sample].sum(-1)
        assert rank_tokens.max() <= sizes.get("token_budget", rank_tokens.mean() + lengths.max())


TOPOLOGY = Ranks(nodes=2, ranks_per_node=2, replica_slots=1).topology(16)


def setting_of(trace, *, seed=0, **costs):
    return make_setting(trace, TOPOLOGY, batching=Batching(seed=seed), cost=Costs(**costs))


def plan_last(entry, setting):
    """Return the last batch with its plan."""
    return run_planner("a planner", entry, setting, timed_runs=0).batches[-1]


def test_run_planner_prices_feplb_in_the_cheaper_order(trace):
    """Replicas are late where attention is too short to hide them, because that gathers rows once more."""
    for tokens, late in ((512.0, True), (65_536.0, False)):
        setting = setting_of(trace, tokens_per_rank=tokens, context=256.0)
        outcome = run_planner("feplb", PLANNERS["feplb"], setting, timed_runs=0)
        assert outcome.cost_model.late_replicas == late


def packed(replay, setting):
    """Return the assignment of a batch's samples by their lengths alone."""
    return start_assignment(
        replay.mask.sum(1),
        TOPOLOGY,
        num_micro_batches=setting.batches.num_micro_batches,
        price=setting.cost_model.price(TOPOLOGY),
    )


def test_run_planner_gives_packed_samples_the_price_and_routes(trace):
    """Planners get packed samples, the price, and some tokens with the ranks where they lie."""
    inputs = []

    def update(request, state, topology):
        ids, price = request.routes.expert_ids, request.price
        jax.debug.callback(lambda ids, price: inputs.append((ids.shape[1:], price)), ids, price)
        return static().update(request, state, topology)

    costs = {"dispatch": "flat", "recompute": True, "cluster": "gb200-nvl72", "context": 1000.0}
    setting = setting_of(trace, **costs)
    batch = plan_last(static()._replace(update=update), setting)
    start = packed(setting.batches.replays[-1], setting)
    np.testing.assert_array_equal(batch.batch_plan.assignment.sample, start.sample)
    np.testing.assert_array_equal(batch.batch_plan.load, expert_load(batch.replay, start, num_experts=16))
    jax.effects_barrier()
    assert inputs[0][0] == (2, 2)
    chex.assert_trees_all_close(inputs[0][1], jax.tree.map(jnp.asarray, setting.cost_model.price(TOPOLOGY)))


@pytest.mark.parametrize("layout", ["packed", pytest.param("padded", marks=pytest.mark.long)])
def test_run_planner_plans_as_a_user_does(trace, layout):
    """The plans are those of `plan_batch` with the keys and the choice of a Balancer, bit for bit."""
    entry = with_samples_assigned("relibra")
    setting = with_replica_nodes(entry, setting_of(trace, seed=3, sequence_layout=layout))
    batches, cost, planner = setting.batches, setting.cost_model.price(TOPOLOGY), entry.planner
    planner_key, key = jax.random.split(jax.random.key(3))
    state = planner.init(TOPOLOGY, 2, key=planner_key)
    for replay in batches.replays:
        key, assign_key = jax.random.split(key)
        batch_plan, state = plan_batch(
            replay,
            planner,
            state,
            TOPOLOGY,
            stages=batches.num_micro_batches,
            assign=assign_samples,
            key=assign_key,
            cost=cost,
        )
    chex.assert_trees_all_equal(plan_last(entry, setting).batch_plan, batch_plan)


def test_make_setting_makes_the_cost_model_of_the_settings(trace):
    sizes = {"context": 1000.0, "tokens_per_rank": 500.0, "shards": 3}
    setting = setting_of(trace, cluster="gb200-nvl72", exchange="padded", **sizes)
    batches, model = setting.batches, setting.cost_model
    lengths = np.concatenate([replay.mask.sum(1) for replay in batches.replays])
    mean = lengths.sum() / len(batches.replays) / batches.num_micro_batches
    assert model.scale == pytest.approx(500.0 * 4 / mean)
    assert model.stretch == pytest.approx(1000.0 / lengths.mean())
    assert (model.model.num_experts, model.model.top_k) == (16, 2)
    assert model.model.width == MODELS["gpt-oss-20b"].width
    assert (model.cluster, model.shards) == (CLUSTERS["gb200-nvl72"], 3)
    run = model.on(TOPOLOGY)
    assert (run.path, run.exchange, run.fetch) == ("hierarchical", "padded", "padded")
    assert make_setting(trace, TOPOLOGY, cost=model).cost_model is model


@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
def test_outcome_waits_for_the_lanes_that_exchanges_send(trace, dispatch):
    """A fitted exchange waits for no more than a padded one, and one without lanes for what the busiest rank needs."""
    planned = [plan_last(PLANNERS["eplb"], setting_of(trace))]
    waits = []
    for exchange in ("padded", "fitted", "needed"):
        setting = setting_of(trace, exchange=exchange, dispatch=dispatch)
        outcome = Outcome("eplb", PLANNERS["eplb"], setting, planned)
        waits.append((outcome.waited_between, outcome.waited_inside))
    padded, fitted, needed = np.array(waits)
    assert (padded >= fitted).all()
    assert (padded > 1).all()
    assert (fitted >= 1).all()
    assert needed == pytest.approx([1, 1])


@pytest.mark.parametrize("name", ["eplb", "eplb_batch", "eplb_history", "popfetcher"])
def test_run_planner_has_the_error_of_the_planners_forecast(trace, name):
    setting = setting_of(trace)
    planned = plan_last(PLANNERS[name], setting)
    before, now = (
        expert_load(replay, packed(replay, setting), num_experts=16).sum((2, 3))
        for replay in setting.batches.replays
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
def test_run_planner_does_not_count_initial_moves(trace, name, moves):
    """Planners place homes in the first batch, or in the second if they only forecast loads: no moves are counted."""
    planned = plan_last(PLANNERS[name], setting_of(trace))
    contiguous = np.arange(16)[None]
    assert (np.asarray(planned.batch_plan.plan.home) != contiguous).any()
    assert (planned.previous_home != planned.batch_plan.plan.home).any() == moves


@pytest.mark.parametrize("cluster", ["h100", "h100-ethernet-200"])
@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
def test_run_planner_counts_crossings_token_by_token(trace, dispatch, cluster):
    """Under static placement an expert is on one node, so tokens cross if they lie on another node."""
    setting = setting_of(trace, dispatch=dispatch, cluster=cluster)
    outcome = run_planner("static", static(), setting, timed_runs=0)
    (planned,) = outcome.batches
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
    assert outcome.crossings == pytest.approx(sent / tokens)
    assert outcome.crossings_busiest == pytest.approx(4 * busiest / tokens)


@pytest.mark.parametrize(("exchange", "once"), [("auto", True), ("ragged", False)])
def test_run_planner_counts_what_the_ranks_of_a_node_send_to_each_other(trace, exchange, once):
    """A token is sent once to each rank that has some of its experts; by a ragged exchange, each of its copies is."""
    node = dataclasses.replace(TOPOLOGY, num_nodes=1, ranks_per_node=4)
    setting = make_setting(trace, node, batching=Batching(), cost=Costs(exchange=exchange))
    outcome = run_planner("static", static(), setting, timed_runs=0)
    (planned,) = outcome.batches
    ids, mask = planned.replay
    sent = tokens = 0
    for (_, _, rank, _), sample in np.ndenumerate(planned.batch_plan.assignment.sample):
        if sample != EMPTY:
            target = ids[sample][mask[sample]] // 4  # 4 experts per rank
            tokens += target.shape[0] * target.shape[1]
            copies = (target != rank).sum()
            sent += (
                sum(((target == other).any(-1)).sum() for other in range(4) if other != rank)
                if once
                else copies
            )
    assert outcome.crossings == pytest.approx(sent / tokens)
    assert outcome.share_as_needed >= outcome.share_of_balanced
