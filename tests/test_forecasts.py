"""Forecasts: values computed by hand, no use of future loads, and the value of transitions to PopFetcher."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load
from relibra_jax.contract.planner import Planner, PlanRequest, Transitions
from relibra_jax.contract.types import EMPTY, Price, RoutingReplay, Topology
from relibra_jax.planning.baselines.eplb import eplb
from relibra_jax.planning.baselines.forecasts import FORECASTS, average, expect_loads
from relibra_jax.planning.baselines.lplb import lplb
from relibra_jax.planning.baselines.popfetcher import popfetcher
from relibra_jax.planning.baselines.static import static
from relibra_jax.planning.metrics import batch_imbalance, forecast_error
from relibra_jax.planning.plan_batch import Stage, plan_batch
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.transitions import count_transitions

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
TABLES = ("next_token", "across_layers", "popularity")


def run(forecast, loads, *, scope="micro_batch", transitions=None, topology=TOPOLOGY):
    """Return the expected loads of a forecast for each of several batches ``[M L E]``."""
    state = forecast.init(topology, loads[0].shape[1])
    results = []
    for load in loads:
        *expected, state = expect_loads(
            forecast, jnp.asarray(load), state, scope=scope, transitions=transitions
        )
        results.append(jax.tree.map(np.asarray, expected))
    return results


FIRST = np.array([[[8, 0, 0, 0]], [[0, 4, 0, 0]]])
SECOND = np.array([[[0, 0, 2, 0]], [[0, 0, 0, 6]]])


@pytest.mark.parametrize(
    ("name", "homes", "replicas"),
    [
        ("true", [0, 0, 2, 6], [[0, 0, 2, 0], [0, 0, 0, 6]]),
        ("history", [8, 4, 0, 0], [[0, 4, 0, 0], [0, 0, 2, 0]]),
        ("mean", [8, 4, 0, 0], [[8, 4, 0, 0], [8, 4, 2, 0]]),
        ("average", [2, 2, 0, 0], [[2, 2, 0, 0], [1, 1, 1, 0]]),
        # Without counts, the load is spread like the mean of the previous batch.
        ("next_token", [8, 4, 0, 0], [[4 / 3, 2 / 3, 0, 0], [4, 2, 0, 0]]),
        ("across_layers", [8, 4, 0, 0], [[4 / 3, 2 / 3, 0, 0], [4, 2, 0, 0]]),
        # The loads of both batches are in the window of 10 micro-batches: 14, and then 20.
        ("popularity", [8, 4, 0, 0], [[28 / 3, 14 / 3, 0, 0], [40 / 3, 20 / 3, 0, 0]]),
    ],
)
def test_expect_loads_of_the_second_batch_equals_values_by_hand(name, homes, replicas):
    for_homes, expected = run(FORECASTS[name], [FIRST, SECOND])[1]
    np.testing.assert_allclose(for_homes, [homes], rtol=1e-6)
    np.testing.assert_allclose(expected[:, 0], replicas, rtol=1e-6)


def test_average_decay_is_the_weight_of_the_previous_average():
    _, expected = run(average(decay=0.75), [FIRST, SECOND])[1]
    np.testing.assert_allclose(expected[:, 0], [[1.5, 1, 0, 0], [1.125, 0.75, 0.5, 0]])
    before = run(average(decay=0.0), [FIRST, SECOND])[1][1]
    np.testing.assert_array_equal(before, run(FORECASTS["history"], [FIRST, SECOND])[1][1])


def test_next_token_forecast_equals_values_by_hand():
    """One in four tokens of expert 0 stays, three go to 1; expert 2 has no counts, so its load spreads as before."""
    counts = np.zeros((1, 4, 4), np.float32)
    counts[0, 0] = [1, 3, 0, 0]
    now = np.array([[[8, 0, 0, 0]], [[4, 0, 6, 0]]])
    transitions = Transitions(counts, np.full_like(counts, np.nan))
    (_, first), (_, second) = run(FORECASTS["next_token"], [FIRST, now], transitions=transitions)
    assert not first.any(), "nothing was counted before the first batch"
    np.testing.assert_allclose(second[:, 0], [[2, 6, 0, 0], [1 + 4, 3 + 2, 0, 0]])


def test_across_layers_forecast_equals_values_by_hand():
    """Layer 1 is forecast from layer 0 of the same micro-batch, layer 0 from the previous batch."""
    counts = np.zeros((2, 4, 4), np.float32)
    counts[1] = np.roll(np.eye(4), 1, axis=1)  # expert e is followed by e + 1
    before = np.array([[[6, 2, 0, 0], [1, 1, 1, 5]]])
    now = np.array([[[0, 0, 0, 4], [4, 0, 0, 0]], [[1, 2, 0, 5], [0, 8, 0, 0]]])
    transitions = Transitions(np.full_like(counts, np.nan), counts)
    _, (for_homes, expected) = run(FORECASTS["across_layers"], [before, now], transitions=transitions)
    np.testing.assert_array_equal(for_homes, before[0])
    np.testing.assert_allclose(expected, [[[3, 1, 0, 0], [4, 0, 0, 0]], [[6, 2, 0, 0], [5, 1, 2, 0]]])


def test_expect_loads_uses_the_loads_for_homes_in_batch_scope():
    for name, forecast in FORECASTS.items():
        for_homes, expected = run(forecast, [FIRST, SECOND], scope="batch")[1]
        chex.assert_trees_all_equal(expected, for_homes[None])
        assert (expected == SECOND.sum(0)).all() == (name == "true")


@pytest.fixture(scope="module")
def replay():
    """Make random routes of two layers with padding at the end, at the start, in the middle, and throughout."""
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(4, dtype=np.uint8), (6, 9, 2, 1)), axis=-1)[..., :2]
    mask = np.ones((6, 9), bool)
    mask[0, 5:] = mask[1, :3] = mask[2, 4] = mask[3] = False
    return RoutingReplay(ids, mask)


@pytest.fixture(scope="module")
def counts(replay):
    return count_transitions(replay, num_experts=4)


@pytest.mark.parametrize("name", ["history", "mean", "average", *TABLES])
def test_forecasts_do_not_use_future_loads(name, counts):
    """Changing the loads of the last micro-batch and layer does not change forecasts that must not use them."""
    rng = np.random.default_rng(0)
    before, now = rng.integers(1, 50, (2, 3, 2, 4))
    other = now.copy()
    other[-1, -1] = rng.integers(50, 90, 4)
    one, two = (run(FORECASTS[name], [before, load], transitions=counts)[1] for load in (now, other))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1][:-1], two[1][:-1])
    np.testing.assert_array_equal(one[1][-1, :-1], two[1][-1, :-1])
    # Only ``next_token`` forecasts from the same loads.
    assert (one[1][-1, -1] == two[1][-1, -1]).all() == (name != "next_token")


@pytest.mark.parametrize("name", FORECASTS)
def test_forecasts_of_the_first_batch_have_no_past(name, counts):
    """Without a past, forecasts are zeros, with the error of a uniform forecast."""
    load = np.random.default_rng(0).integers(1, 50, (3, 2, 4))
    _, expected = run(FORECASTS[name], [load], transitions=counts)[0]
    if name == "true":
        np.testing.assert_array_equal(expected, load)
        return
    assert not expected[0].any()
    uniform = np.abs(load[0] / load[0].sum(-1, keepdims=True) - 1 / 4).sum(-1)
    np.testing.assert_allclose(forecast_error(expected, load)[0], uniform, rtol=1e-5)


def test_forecasts_learn_stationary_loads():
    """For loads from one distribution, the mean of all is the best forecast and the last micro-batch the worst."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.ones(32), 2)
    loads = [np.stack([rng.multinomial(600, share) for _ in range(4)]) for _ in range(12)]
    errors = {}
    for name in ("true", "history", "mean", "average"):
        results = run(FORECASTS[name], loads, topology=Topology(**SIZES))
        errors[name] = [
            float(forecast_error(expected, load).mean())
            for (_, expected), load in zip(results, loads, strict=True)
        ]
    assert errors["true"] == [0] * 12
    for name in ("history", "mean", "average"):
        assert errors[name][-1] < 0.8 * errors[name][0], name
    assert np.mean(errors["mean"][6:]) < np.mean(errors["average"][6:]) < np.mean(errors["history"][6:])


SIZES = {"num_nodes": 2, "ranks_per_node": 4, "num_experts": 32, "replica_slots": 2}


def test_count_transitions_is_a_plain_count(replay, counts):
    along, across = np.zeros((2, 2, 4, 4))
    for sample, real in zip(replay.expert_ids, replay.mask, strict=True):
        for token, layer in np.argwhere(np.tile(real[:, None], 2)):
            for here in sample[token, layer]:
                if token + 1 < len(real) and real[token + 1]:
                    along[layer, here, sample[token + 1, layer]] += 1
                if layer:
                    across[layer, sample[token, layer - 1], here] += 1
    np.testing.assert_array_equal(counts.along_tokens, along)
    np.testing.assert_array_equal(counts.across_layers, across)
    assert not counts.across_layers[0].any()


def test_count_transitions_does_not_read_padding(replay, counts):
    """Padding tokens may have any ids, also invalid expert ids."""
    for filler in (0, 3, 255):
        ids = np.where(replay.mask[:, :, None, None], replay.expert_ids, np.uint8(filler))
        other = count_transitions(RoutingReplay(ids, replay.mask), num_experts=4)
        chex.assert_trees_all_equal(other, counts)


def test_plan_batch_gives_transitions_to_planners_that_use_them(replay, counts):
    planner = popfetcher()
    state = planner.init(TOPOLOGY, 2, key=jax.random.key(0))
    for stages in (2, (Stage(1), Stage(2))):
        run = jax.jit(
            lambda replay, stages=stages: plan_batch(replay, planner, state, TOPOLOGY, stages=stages)
        )
        _, after = run(replay)
        chex.assert_trees_all_equal(after.seen.counts, counts.across_layers)


@pytest.mark.parametrize("uses_transitions", [False, True])
def test_plan_batch_counts_transitions_for_no_other_planner(replay, uses_transitions):
    requests = []

    def update(request, state, topology):
        requests.append(request)
        return static().update(request, state, topology)

    planner = Planner(static().init, update, uses_transitions=uses_transitions)
    plan_batch(replay, planner, (), TOPOLOGY, stages=2)
    assert [request.transitions is not None for request in requests] == [uses_transitions] * len(requests)
    assert requests
    assert eplb(loads="next_token").uses_transitions
    for other in (static(), relibra(), eplb(), eplb(loads="mean"), lplb(loads="history")):
        assert not other.uses_transitions


def test_planners_say_how_they_expect_loads():
    for name, entry in PLANNERS.items():
        assert entry.foresight == (entry.forecast == "true"), name
        assert entry.planner.uses_transitions == (entry.forecast in TABLES), name
        if not entry.foresight:
            parts = (entry.planner, FORECASTS[entry.forecast])
            state, seen = (part.init(TOPOLOGY, 2, key=jax.random.key(0)) for part in parts)
            chex.assert_trees_all_equal_shapes(state.seen, seen)


def moving_load(seed):
    """Make loads with another hot expert in layer 0 of every batch; layer 1 permutes the experts of layer 0."""
    rng = np.random.default_rng(seed)
    load = rng.integers(20, 40, (6, 2, 32))
    load[:, 0, rng.permutation(32)[0]] += 900
    load[:, 1, MOVED] = load[:, 0]
    return load


MOVED = np.random.default_rng(7).permutation(32)
"""The expert of layer 1 to which the tokens of each expert of layer 0 go."""


def test_popfetcher_finds_what_history_cannot():
    """Layer 0 determines layer 1 completely; the batch before does not help. The window holds both hot experts."""
    topology = Topology(**SIZES)
    counts = np.zeros((2, 32, 32), np.float32)
    counts[1, np.arange(32), MOVED] = 100
    reached = {}
    for name, planner in {"popfetcher": popfetcher(), "history": PLANNERS["eplb_history"].planner}.items():
        transitions = Transitions(counts, counts) if planner.uses_transitions else None
        state = planner.init(topology, 2, key=jax.random.key(0))
        update = jax.jit(planner.update)
        for seed in range(2):
            load = np.repeat(moving_load(seed)[:, :, None], 8, 2).astype(np.int32).reshape(6, 2, 2, 4, 32)
            plan, state = update(PlanRequest(load, transitions=transitions), state, topology)
        reached[name] = [float(batch_imbalance(rank_load(plan)[:, layer, None])) for layer in range(2)]
    assert reached["popfetcher"][1] < 1.2, "every rank computes its own tokens of the hot expert"
    assert min(reached["history"][1], reached["popfetcher"][0]) > 2
    expected = run(
        FORECASTS["across_layers"],
        [moving_load(0), moving_load(1)],
        transitions=Transitions(counts, counts),
        topology=topology,
    )[1][1]
    assert forecast_error(expected, moving_load(1))[:, 1].max() < 1e-6


def test_popfetcher_without_transitions_expects_the_previous_batch():
    """Rank 0 has all tokens. It holds the hottest experts, and fetches the next one, which now has no tokens."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    planner = popfetcher()
    state = planner.init(topology, 1, key=jax.random.key(0))
    for load in ([80, 10, 6, 4], [7, 0, 0, 90]):
        load = jnp.zeros((1, 1, 1, 2, 4), jnp.int32).at[0, 0, 0, 0].set(jnp.array(load, jnp.int32))
        plan, state = planner.update(PlanRequest(load), state, topology)
    assert plan.slot_expert[0, 0, 0].tolist() == [[0, 1, 2], [2, 3, -1]]
    assert plan.quota[0, 0, 0].tolist() == [[7, 0, 0], [0, 90, 0]]


PRICE = Price(
    token=1.0,
    copy=1.0,
    crossing=3.0,
    spread=2.0,
    move=0.0,
    push=0.0,
    fetch=24.0,
    fetch_across=60.0,
    weights_share=2 / 3,
)
"""A copy saves 2 between nodes and 1 inside, and the gradient of an expert costs 20 and 8."""


def port_of_popfetcher(own, popularity, tokens, price, topology):
    """Return the experts that every rank fetches, in order, in plain Python; homes are contiguous."""
    fetched = []
    for rank, load in enumerate(own):
        node, spent, mine = rank // topology.ranks_per_node, 0.0, []
        for expert in sorted(range(len(load)), key=lambda each: (-popularity[each], each)):
            home = expert // topology.home_slots
            away = home // topology.ranks_per_node != node
            row, copy = (price.crossing, price.fetch_across) if away else (price.spread, price.fetch)
            gain = load.sum() * popularity[expert] * (row - price.copy) - copy / 3
            if home == rank or gain <= 0 or len(mine) == topology.replica_slots:
                continue
            spent += copy
            if spent > tokens[rank] * price.token:
                break
            mine.append(expert)
        fetched.append(mine)
    return fetched


def test_popfetcher_fetches_what_a_port_of_its_rules_fetches():
    rng = np.random.default_rng(3)
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=3)
    before, load = rng.integers(0, 60, (2, 4, 1, 2, 2, 8)).astype(np.int32)
    before[..., 5] += 200
    popularity = before.sum((0, 1, 2, 3), dtype=float) / before.sum()
    tokens = rng.integers(20, 300, (4, 2, 2)).astype(np.float32)
    planner = popfetcher()
    _, state = planner.update(PlanRequest(before), planner.init(topology, 1, key=jax.random.key(0)), topology)
    counts = []
    for price in (
        PRICE,
        dataclasses.replace(PRICE, spread=1.0),
        dataclasses.replace(PRICE, crossing=1.0, spread=0.5),
    ):
        plan, _ = planner.update(PlanRequest(load, price=price, tokens=tokens), state, topology)
        check_plan(plan, load, topology, across_nodes=True)
        slots, quota = (np.asarray(leaf)[..., topology.home_slots :].reshape(4, 4, 3) for leaf in plan[::2])
        for micro_batch, own in enumerate(load.reshape(4, 4, 8)):
            desired = port_of_popfetcher(own, popularity, tokens[micro_batch].ravel(), price, topology)
            for rank, mine in enumerate(desired):
                assert sorted(mine) == [each for each in slots[micro_batch, rank] if each != EMPTY]
                assert [own[rank][each] for each in sorted(mine)] == quota[micro_batch, rank][
                    : len(mine)
                ].tolist()
        counts.append(int((slots != EMPTY).sum()))
    assert counts[0] > counts[1] > counts[2] == 0, "less is fetched as links become faster than products"


def test_forecast_error_equals_values_by_hand():
    """True shares 0.75, 0.25, 0, 0 with 0.25 expected for each give (0.5 + 0 + 0.25 + 0.25) / 4 of a mean share."""
    load = np.array([[[30, 10, 0, 0], [0, 0, 0, 0]]])
    error = forecast_error(np.array([[[7, 7, 7, 7], [1, 2, 3, 4]]]), load)
    assert error.tolist() == [[1.0, 0.0]]
    assert forecast_error(load, load).tolist() == [[0.0, 0.0]]
