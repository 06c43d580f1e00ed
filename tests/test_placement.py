"""Reordering: valid placements that are never worse than their start, near the optimum, and with few moves."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from relibra_jax.contract.types import Price, TokenSample, Topology
from relibra_jax.planning.ablation.placement_methods import place_by_descent, place_longest_first
from relibra_jax.planning.metrics import moved_experts
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.plan_batch import plan_loads
from relibra_jax.planning.relibra import relibra

KEY = jax.random.key(0)
SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
NODES = Topology(num_nodes=2, ranks_per_node=1, num_experts=8, replica_slots=1)


def home_of(place):
    """Wrap a placement function so that it returns only homes."""
    return lambda *args, **options: place(*args, **options).home


METHODS = {"anneal": place_experts, "descent": place_by_descent, "lpt": place_longest_first}


def in_order(layers, experts):
    return np.tile(np.arange(experts, dtype=np.int32), (layers, 1))


def imbalance(load, home, groups):
    """Return the imbalance of each layer over groups of neighbouring home slots."""
    load = np.take_along_axis(np.asarray(load, float), np.argsort(home, axis=-1)[None], -1)
    load = load.reshape(*load.shape[:2], groups, -1).sum(-1)
    return load.max(-1).sum(0) / np.maximum(load.mean(-1).sum(0), 1e-9)


def is_placement(home, experts):
    return np.array_equal(np.sort(home, axis=-1), in_order(len(home), experts))


@functools.cache
def recorded(shared, seed):
    """Return the load of 256 recorded sequences in random order, ``[32 micro-batches, 24 layers, 32 experts]``."""
    trace = np.load(shared / "traces" / "gptoss20b_rollouts.npz", allow_pickle=False)
    ends = np.cumsum(trace["lengths"])
    samples = np.random.default_rng(seed).permutation(len(ends))[:256]
    layer = np.arange(24)[:, None] * 32
    ids = trace["routed_experts"] + layer
    rows = [ids[ends[i] - trace["lengths"][i] : ends[i]].ravel() for i in samples]
    load = np.stack([np.bincount(row, minlength=24 * 32) for row in rows])
    return load.reshape(32, 8, 24, 32).sum(1).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None)
@given(
    load=st.lists(st.integers(0, 2**25), min_size=48, max_size=48),
    before=st.permutations(range(8)),
    seed=st.integers(0, 9),
)
def test_every_load_gives_a_placement_no_worse_than_its_start(method, load, before, seed):
    load = np.array(load, np.int32).reshape(3, 2, 8)
    before = np.tile(np.array(before, np.int32), (2, 1))
    home = np.asarray(METHODS[method](load, before, SMALL, key=jax.random.key(seed), steps=200).home)
    assert is_placement(home, 8)
    if method != "lpt":
        assert (imbalance(load, home, 2) <= imbalance(load, before, 2) + 1e-5).all()
    stays = home // 2 == before // 2
    assert (home == before)[stays].all()


@pytest.mark.parametrize("kind", ["zero", "one_hot", "layer_without_tokens", "near_2_31"])
def test_extreme_loads(kind):
    load = np.random.default_rng(0).integers(0, 100, (3, 2, 8)).astype(np.int32)
    if kind == "zero":
        load[:] = 0
    elif kind == "one_hot":
        load[..., 1:] = 0
    elif kind == "layer_without_tokens":
        load[:, 1] = 0
    else:
        load[:] = 2**31 - 1 - load
    home = np.asarray(place_experts(load, in_order(2, 8), SMALL, key=KEY, steps=200).home)
    assert is_placement(home, 8)
    still = {"zero": [0, 1], "layer_without_tokens": [1]}.get(kind, [])
    assert (home[still] == np.arange(8)).all(), "nothing is moved for nothing"


@pytest.mark.parametrize(
    ("nodes", "ranks", "slots", "level"),
    [(1, 4, 1, 4), (8, 1, 1, 8), (2, 2, 0, 4), (1, 1, 2, 1)],
)
def test_every_shape_of_group(nodes, ranks, slots, level):
    topology = Topology(num_nodes=nodes, ranks_per_node=ranks, num_experts=8, replica_slots=slots)
    load = np.random.default_rng(1).lognormal(3, 1, (4, 3, 8)).astype(np.int32)
    home = np.asarray(place_experts(load, in_order(3, 8), topology, key=KEY, steps=200).home)
    assert is_placement(home, 8)
    assert (imbalance(load, home, level) <= imbalance(load, in_order(3, 8), level) + 1e-5).all()


def test_tiny_instances_nearly_always_reach_the_optimum():
    load = np.random.default_rng(2).lognormal(4, 1, (3, 20, 8)).astype(np.int32)
    best = np.full(20, np.inf)
    for left in itertools.combinations(range(8), 4):
        home = np.argsort([*left, *(set(range(8)) - set(left))])
        best = np.minimum(best, imbalance(load, np.tile(home, (20, 1)), 2))
    setting = {"key": KEY, "move_cost": 0.0}
    result = imbalance(
        load, np.asarray(place_experts(load, in_order(20, 8), NODES, **setting, steps=1000).home), 2
    )
    assert (result >= best - 1e-5).all()
    assert (result <= best * 1.01).all()
    assert (result <= best + 1e-5).mean() >= 0.9
    descended, packed = (
        imbalance(load, np.asarray(place(load, in_order(20, 8), NODES, **setting).home), 2)
        for place in (place_by_descent, place_longest_first)
    )
    assert best.mean() <= descended.mean() <= packed.mean()


def test_works_under_vmap_and_layers_are_independent():
    load = np.random.default_rng(3).lognormal(4, 1, (3, 2, 8)).astype(np.int32)
    place = home_of(functools.partial(place_experts, topology=NODES, key=KEY, steps=200))
    together = place(load, in_order(2, 8))
    assert np.array_equal(together, place(load, in_order(2, 8))), "the same key, the same placement"
    alone = jax.vmap(lambda one: place(one[:, None], in_order(1, 8))[0], 1)(load)
    assert np.array_equal(together, alone)


def test_new_data_do_not_recompile():
    sizes = []
    for seed in range(3):
        load = np.random.default_rng(seed).integers(0, 99, (3, 2, 8)).astype(np.int32)
        place_experts(load, in_order(2, 8), SMALL, key=jax.random.key(seed), steps=200)
        sizes.append(place_experts._cache_size())
    assert sizes[0] == sizes[-1]


def test_a_price_on_crossing_brings_experts_to_their_tokens():
    load = np.full((2, 1, 8), 10, np.int32)
    source = np.zeros((2, 1, 2, 8), np.int32)
    source[:, 0, np.arange(8) % 2, np.arange(8)] = 10
    place = home_of(functools.partial(place_experts, steps=500, source_load=source))
    home = np.asarray(place(load, in_order(1, 8), NODES, key=KEY))
    assert np.array_equal(home[0] // 4, np.arange(8) % 2)


FREE = Price(token=0.0, copy=1.0, crossing=0.0, spread=0.0, move=0.0, push=0.0)


@pytest.mark.parametrize("crossing", [0.1, 10.0])
def test_unit_times_price_crossings_without_tokens(crossing):
    """Balance asks for the hot experts to be apart, and crossings for all to be with their tokens."""
    load = np.full((2, 1, 8), 10, np.int32)
    load[..., [0, 2]] = 60
    source = np.zeros((2, 1, 2, 8), np.int32)
    source[:, 0, np.arange(8) % 2, np.arange(8)] = load[0, 0]
    cost = dataclasses.replace(FREE, crossing=crossing)
    home = place_experts(load, in_order(1, 8), NODES, key=KEY, steps=500, source_load=source, cost=cost).home
    with_tokens = np.array_equal(np.asarray(home)[0] // 4, np.arange(8) % 2)
    assert with_tokens == (crossing > 1)


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("replica_slots", [0, 1])
def test_unit_times_price_moves_without_tokens(nodes, local, replica_slots):
    """Between nodes and inside them, experts move if moves are cheap, and stay if they cost more than the batch."""
    topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=8, replica_slots=replica_slots)
    load = np.sort(np.random.default_rng(5).lognormal(4, 1, (2, 3, 8)).astype(np.int32))

    def moved(cost, **options):
        home = place_experts(load, in_order(3, 8), topology, key=KEY, steps=200, cost=cost, **options).home
        slots = topology.home_slots
        return int(moved_experts(home, in_order(3, 8), home_slots=slots).sum())

    dear = dataclasses.replace(FREE, move=1e6)
    assert moved(FREE) > moved(dear) == 0
    assert moved(dear, horizon=1e9) > 0, "a placement for ever"
    assert moved(dear, move_cost=0.0) == 0, "unit times replace it"


def test_residents_without_tokens_pay_for_their_push():
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0, resident_slots=1)
    load, before = np.full((1, 1, 4), 8, np.int32), in_order(1, 4)
    source = np.full((1, 1, 2, 4), 4, np.int32)
    for push, some in ((0.1, True), (1e3, False)):
        cost = dataclasses.replace(FREE, crossing=1.0, move=1e3, push=push)
        placed = place_experts(load, before, topology, key=KEY, steps=10, source_load=source, cost=cost)
        assert (np.asarray(placed.resident) >= 0).any() == some


def test_nothing_known_never_overwrites_what_a_caller_fixed():
    """A planner whose search has a price keeps it where the batch is planned without one."""
    load = np.sort(np.random.default_rng(6).lognormal(3, 1, (12, 2, 8)).astype(np.int32))
    dear = functools.partial(place_experts, steps=200, cost=dataclasses.replace(FREE, move=1e6))
    free = functools.partial(place_experts, steps=200)
    moved = []
    for place in (dear, free):
        planner = relibra(place=place)
        state = planner.init(NODES, 2, key=KEY)
        counts = load, load[:, 0].sum(-1)
        batch_plan, _ = plan_loads(*counts, planner, state, NODES, num_micro_batches=2)
        moved.append(int((np.asarray(batch_plan.plan.home) != in_order(2, 8)).sum()))
    assert moved[1] > moved[0] == 0


def test_refining_starts_from_the_placement_it_is_given():
    load = np.random.default_rng(4).lognormal(4, 1, (3, 2, 8)).astype(np.int32)
    result = np.asarray(place_experts(load, in_order(2, 8), NODES, key=KEY, steps=200).home)
    again = np.asarray(place_experts(load, result, NODES, key=KEY, steps=1, refine=result).home)
    assert (imbalance(load, again, 2) <= imbalance(load, result, 2) + 1e-6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"move_cost": -1.0}, "move_cost=-1.0"),
        ({"crossing_cost": -1.0}, "crossing_cost=-1.0"),
        ({"load": np.ones((2, 2, 6), np.int32), "previous_home": in_order(2, 6)}, "agree .* 8 experts"),
    ],
)
def test_bad_arguments_name_their_numbers(change, message):
    arguments = {"load": np.ones((2, 2, 8), np.int32), "previous_home": in_order(2, 8), **change}
    with pytest.raises(ValueError, match=message):
        place_experts(topology=SMALL, key=KEY, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "static", "bound"), [(2, 1.534, 1.022), (4, 2.120, 1.078)])
def test_recorded_loads(shared, nodes, static, bound):
    topology = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=2)
    load, start = recorded(shared, 0), in_order(24, 32)
    assert imbalance(load, start, topology.num_ranks).mean() == pytest.approx(static, abs=1e-3)
    place = home_of(functools.partial(place_experts, topology=topology))
    homes = [np.asarray(place(load, start, key=jax.random.key(seed))) for seed in range(3)]
    reached = np.mean([imbalance(load, home, nodes).mean() for home in homes])
    assert reached <= bound
    home = homes[0]
    if nodes == 4:
        descended = np.asarray(place_by_descent(load, start, topology, key=KEY).home)
        longest_first = np.asarray(place_longest_first(load, start, topology, key=KEY).home)
        peers = [imbalance(load, peer, nodes).mean() for peer in (descended, longest_first)]
        assert [reached, *peers] == sorted([reached, *peers]), "annealing beats descent beats LPT"

    # Compare the next batch with a new placement by LPT whose ranks are relabelled to move the fewest experts.
    after = recorded(shared, 1)
    later = np.asarray(place(after, home, key=KEY))
    fresh = np.asarray(place_longest_first(after, start, topology, key=KEY).home)
    slots = topology.home_slots
    relabelled = 0
    for now, before in zip(fresh // slots, home // slots, strict=True):
        stay = np.zeros((topology.num_ranks,) * 2)
        np.add.at(stay, (now, before), 1)
        relabelled += 32 - stay[linear_sum_assignment(-stay)].sum()
    assert moved_experts(later, home, home_slots=slots).sum() < relabelled
    assert imbalance(after, later, nodes).mean() < imbalance(after, fresh, nodes).mean()


@pytest.mark.slow
def test_many_ranks():
    topology = Topology(num_nodes=64, ranks_per_node=8, num_experts=512, replica_slots=1)
    load = jnp.asarray(np.random.default_rng(0).lognormal(5, 0.5, (8, 2, 512)).astype(np.int32))
    home = np.asarray(place_experts(load, in_order(2, 512), topology, key=KEY, steps=3000).home)
    assert is_placement(home, 512)
    assert imbalance(load, home, 64).mean() < imbalance(load, in_order(2, 512), 64).mean() - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("replica_slots", "moves"), [(1, False), (0, True)])
def test_in_time_ranks_of_a_node_are_left_to_replicas(replica_slots, moves):
    """Nodes are even, but one rank of each has all load; experts move only if there are no replica slots."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=replica_slots)
    before = in_order(1, 8)
    load = np.tile(np.array([64, 64, 0, 0] * 2), (1, 1, 1))
    ids = np.tile(np.array([0, 1, 4, 5]), 32).reshape(-1, 1, 1)
    rank = np.where(ids[:, 0, 0] < 4, 0, 2)
    tokens = TokenSample(ids, np.zeros(128, int), rank)
    home = place_experts(load, before, topology, key=KEY, tokens=tokens).home
    np.testing.assert_array_equal(np.asarray(home) // 4, before // 4, "nodes are even")
    assert (np.asarray(home) // 2 != before // 2).any() == moves
