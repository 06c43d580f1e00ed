"""Replication: valid for any load, near the mixed-integer optimum, exact on request, and compiled once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.plans import request_of

from experiments.reference_solvers import solve_replication
from relibra_jax.contract.check import check_plan
from relibra_jax.contract.plan import rank_load, replica_count, replica_experts
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.planning.ablation.token_splits import (
    place_heaviest,
    replicate_with_eplb_places,
    replicate_with_even_split,
    replicate_with_fixed_places,
    split_tokens,
)
from relibra_jax.planning.greedy_replication import least_top_load, replicate_domain
from relibra_jax.planning.replication import replicate_experts

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
ONES = request_of(np.ones((1, 1, 32), np.int32), TOPOLOGY)
IN_ORDER = Placement.without_residents(np.arange(32)[None], TOPOLOGY)
OPTIONS = {
    "joint": {},
    "across_nodes": {"across_nodes": True},
    "tiles": {"tile": 16, "min_tokens": 40},
    "exact": {"exact": True},
    "few exports": {"exports": 1},
}
METHODS = {
    option: functools.partial(replicate_experts, **arguments) for option, arguments in OPTIONS.items()
} | {
    "even split": replicate_with_even_split,
    "EPLB's places": replicate_with_eplb_places,
    "fixed places": replicate_with_fixed_places,
}


@functools.cache
def compiled(method, topology=TOPOLOGY):
    return jax.jit(functools.partial(METHODS[method], topology=topology))


def replicated(method, load, home, topology=TOPOLOGY):
    """Plan token copies ``[M L E]`` for given homes without residents."""
    placement = Placement.without_residents(home, topology)
    return compiled(method, topology)(request_of(load, topology), placement)


@functools.cache
def domains(**options):
    """Run `replicate_domain` over rows of loads."""
    return jax.jit(jax.vmap(functools.partial(replicate_domain, **options)))


def random_loads(rng, kind, rows, ranks, homes):
    experts = ranks * homes
    share = {
        "zipf": lambda: rng.permuted(np.tile(1 / np.arange(1, experts + 1), (rows, 1)), axis=1),
        "lognormal": lambda: rng.lognormal(0, 1.2, (rows, experts)),
        "one-hot": lambda: np.eye(experts)[rng.integers(experts, size=rows)] + 0.001,
        "uniform": lambda: rng.random((rows, experts)),
        # Some ranks are nearly idle and no expert is large, so slots run out before ranks reach the mean.
        "idle ranks": lambda: (
            rng.lognormal(0, 0.5, (rows, experts)) * np.repeat(rng.choice([0.05, 1], (rows, ranks)), homes, 1)
        ),
    }[kind]()
    share /= share.sum(1, keepdims=True)
    return rng.multinomial(20_000, share).reshape(rows, ranks, homes)


KINDS = ("zipf", "lognormal", "one-hot", "uniform", "idle ranks")


def recorded_loads(shared, homes):
    """Return rows of a recorded trace, with 8 sequences per micro-batch, as domains of four ranks."""
    trace = np.load(shared / "traces" / "gptoss20b_rollouts.npz")
    last = np.cumsum(trace["lengths"])[:64:8][1:]
    batches = np.split(trace["routed_experts"][: last[-1]], last[:-1])
    counts = [[np.bincount(ids[:, layer].ravel(), minlength=32) for layer in range(24)] for ids in batches]
    return np.array(counts).reshape(-1, 4, homes)


token_counts = st.one_of(
    st.integers(0, 40), st.sampled_from([0, 0, 0, 1, 1000]), st.integers(0, (2**31 - 1) // 32)
)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, deadline=None)
@given(load=arrays(np.int32, (1, 2, 32), elements=token_counts), seed=st.integers(0, 99))
@example(load=np.zeros((1, 2, 32), np.int32), seed=0)
@example(load=np.full((1, 2, 32), (2**31 - 1) // 32, np.int32), seed=0)
@example(load=np.where(np.arange(32) == 5, 2**31 - 1, 0).astype(np.int32)[None, None].repeat(2, 1), seed=0)
def test_replicate_experts_gives_valid_plans(method, load, seed):
    rng = np.random.default_rng(seed)
    home = np.stack([rng.permutation(32), np.arange(32)]).astype(np.int32)
    plan = replicated(method, load, home)
    source = np.zeros((1, 2, 2, 4, 32), np.int32)
    source[:, :, 0, 0] = load
    check_plan(plan, source, TOPOLOGY, across_nodes=method == "across_nodes")

    tokens, experts = (
        np.asarray(plan.quota)[..., TOPOLOGY.held_slots :],
        np.asarray(replica_experts(plan, TOPOLOGY)),
    )
    tile, least = (OPTIONS.get(method, {}).get(name, 1) for name in ("tile", "min_tokens"))
    assert (tokens[experts != EMPTY] >= least).all()
    assert (tokens % tile == 0).all()
    if "exports" in OPTIONS.get(method, {}):
        layers = np.arange(2)[None, :, None, None, None]
        source_rank = np.where(experts == EMPTY, -1, home[layers, experts] // TOPOLOGY.home_slots)
        for rank in range(TOPOLOGY.num_ranks):
            from_rank = np.where(source_rank == rank, experts, EMPTY)[0].reshape(2, -1)
            assert all(len(np.unique(row[row != EMPTY])) <= OPTIONS[method]["exports"] for row in from_rank)

    if method != "even split":
        static = (
            np.stack([load[:, i, np.argsort(home[i])] for i in range(2)], 1).reshape(1, 2, 2, 4, 4).sum(-1)
        )
        ranks = (-2, -1) if method == "across_nodes" else -1
        assert (np.asarray(rank_load(plan)).max(ranks) <= static.max(ranks)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "ranks", "experts", "slots"), [(1, 1, 4, 2), (2, 1, 2, 1), (2, 3, 6, 0), (1, 2, 2, 5)]
)
@pytest.mark.parametrize("method", ["joint", "exact", "EPLB's places"])
def test_replicate_experts_gives_valid_plans_for_odd_shapes(nodes, ranks, experts, slots, method):
    topology = Topology(num_nodes=nodes, ranks_per_node=ranks, num_experts=experts, replica_slots=slots)
    source = np.random.default_rng(0).integers(0, 90, (2, 1, nodes, ranks, experts)).astype(np.int32)
    home = np.arange(experts, dtype=np.int32)[None]
    plan = replicated(method, source.sum((2, 3)), home, topology)
    check_plan(plan, source, topology)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "recorded"])
def test_replicate_domain_is_near_the_mixed_integer_optimum(kind, slots, shared):
    rng = np.random.default_rng(3)
    gaps = []
    for ranks, homes in ((4, 2), (4, 4)):
        rows = rng.permutation(recorded_loads(shared, homes))[:8] if kind == "recorded" else None
        loads = random_loads(rng, kind, 8, ranks, homes) if rows is None else rows
        _, quota = domains(replica_slots=slots)(loads.astype(np.int32))
        best = np.array([solve_replication(load, slots) for load in loads])
        bound = jax.vmap(functools.partial(least_top_load, replica_slots=slots))(loads.astype(np.int32))
        assert (np.asarray(bound) <= best).all()
        gaps.append(np.asarray(quota).sum(-1).max(-1) / best - 1)
    assert np.mean(gaps) < 0.001
    assert np.max(gaps) < 0.01


@pytest.mark.slow
def test_replicate_domain_reaches_the_bound_with_recorded_loads(shared):
    for homes in (2, 4):
        loads = recorded_loads(shared, homes).astype(np.int32)
        for slots, allowed in ((1, 0.0005), (2, 0.0)):
            _, quota = domains(replica_slots=slots)(loads)
            bound = jax.vmap(functools.partial(least_top_load, replica_slots=slots))(loads)
            assert np.mean(np.asarray(quota).sum(-1).max(-1) / bound - 1) <= allowed
            if slots == 2:
                assert (np.asarray(bound) == -(-loads.sum((1, 2)) // 4)).all()


def test_replicate_domain_balances_tiles_near_the_optimum():
    loads = random_loads(np.random.default_rng(4), "lognormal", 8, 4, 4)
    _, quota = domains(replica_slots=2, tile=128)(loads.astype(np.int32))
    best = np.array([solve_replication(load, 2, tile=128) for load in loads])
    assert np.mean(np.asarray(quota).sum(-1).max(-1) / best - 1) < 0.005


def test_replicate_domain_uses_few_replicas_among_equally_good_plans():
    loads = random_loads(np.random.default_rng(5), "lognormal", 8, 4, 2) // 400
    replica, quota = domains(replica_slots=2)(loads.astype(np.int32))
    tops = np.asarray(quota).sum(-1).max(-1)
    fewest = [solve_replication(load, 2, top=int(top)) for load, top in zip(loads, tops, strict=True)]
    used = (np.asarray(replica) != EMPTY).sum((1, 2))
    assert used.sum() <= 1.1 * np.sum(fewest)


def test_replicate_experts_uses_no_replica_for_balanced_loads():
    load = np.full((1, 1, 32), 7, np.int32)
    plan = replicated("joint", np.repeat(load, 2, 1), np.tile(np.arange(32, dtype=np.int32), (2, 1)))
    assert np.asarray(replica_count(plan, TOPOLOGY)).tolist() == [[0, 0]]


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_replicate_domain_exact_balances_to_one_tile(kind, tile):
    loads = random_loads(np.random.default_rng(6), kind, 64, 4, 4).astype(np.int32)
    _, quota = domains(replica_slots=4, tile=tile, exact=True)(loads)
    total = np.asarray(quota).sum(-1)
    if tile == 1:
        assert (np.ptp(total, axis=-1) <= 1).all()
    else:  # an expert gives only whole tiles, so its last tokens stay
        assert np.mean(np.ptp(total, axis=-1) <= tile) > 0.9


@pytest.mark.slow
def test_replicate_experts_is_better_than_either_half_alone():
    loads = (
        random_loads(np.random.default_rng(7), "lognormal", 64, 8, 16).reshape(16, 4, 128).astype(np.int32)
    )
    topology = Topology(num_nodes=1, ranks_per_node=8, num_experts=128, replica_slots=1)
    home = np.tile(np.arange(128, dtype=np.int32), (4, 1))
    top = {
        method: np.asarray(rank_load(replicated(method, loads, home, topology))).max(-1).sum()
        for method in ("joint", "EPLB's places", "even split")
    }
    assert top["joint"] < top["EPLB's places"]
    assert top["joint"] < top["even split"]


def test_split_tokens_comes_near_the_best_for_its_places():
    loads = random_loads(np.random.default_rng(8), "zipf", 16, 4, 4).astype(np.int32)
    replica = jax.jit(jax.vmap(functools.partial(place_heaviest, replica_slots=2)))(loads)
    kept, quota = jax.jit(jax.vmap(split_tokens))(loads, replica)
    assert ((kept == EMPTY) | (kept == replica)).all()
    best = [
        solve_replication(load, 2, replica=row) for load, row in zip(loads, np.asarray(replica), strict=True)
    ]
    gaps = np.asarray(quota).sum(-1).max(-1) / np.array(best) - 1
    assert gaps.mean() < 0.001
    assert gaps.max() < 0.01


def test_replicate_experts_gives_the_same_plan_without_compiling_again():
    plan_with = jax.jit(functools.partial(replicate_experts, topology=TOPOLOGY))
    placement = Placement.without_residents(np.tile(np.arange(32, dtype=np.int32), (2, 1)), TOPOLOGY)
    for seed in range(3):
        load = np.random.default_rng(seed).integers(0, 1000, (1, 2, 32))
        request = request_of(load, TOPOLOGY)
        plan, again = plan_with(request, placement), plan_with(request, placement)
        assert all((a == b).all() for a, b in zip(plan, again, strict=True))
    assert plan_with._cache_size() == 1


def test_replicate_experts_works_under_scan():
    placement = Placement.without_residents(jnp.tile(jnp.arange(32, dtype=jnp.int32), (2, 1)), TOPOLOGY)
    loads = np.random.default_rng(0).integers(0, 1000, (3, 1, 2, 32))
    loads = jnp.stack([request_of(load, TOPOLOGY).load for load in loads])

    def step(carry, load):
        return carry, replicate_experts(PlanRequest(load), placement, TOPOLOGY)

    _, plans = jax.lax.scan(step, None, loads)
    one = compiled("joint")(PlanRequest(loads[1]), placement)
    assert (plans.quota[1] == one.quota).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, "min_tokens=-1 must be an integer of at least 1"),
        ({"tile": 0}, "tile=0 must be an integer of at least 1"),
    ],
)
def test_replicate_experts_rejects_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        replicate_experts(ONES, IN_ORDER, TOPOLOGY, **options)


def test_replicate_experts_rejects_a_boolean_tile():
    with pytest.raises(TypeError, match="tile must be an integer, found True"):
        replicate_experts(ONES, IN_ORDER, TOPOLOGY, tile=True)


@pytest.mark.parametrize("tolerance", [0.05, 0.5, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_replicate_domain_saves_replicas_within_the_tolerance(kind, tolerance):
    """Largest rank loads stay within the tolerance; no domain has more replicas, and all together have fewer.

    A single hot expert needs a replica on every other rank also with 5%.
    """
    load = random_loads(np.random.default_rng(0), kind, 60, 4, 8)
    (_, strict), (replica, loose) = (
        domains(replica_slots=2, tolerance=amount)(load) for amount in (0.0, tolerance)
    )
    top, allowed = (np.asarray(quota).sum(2).max(1) for quota in (loose, strict))
    assert (top <= allowed * (1 + tolerance)).all()
    used, before = ((np.asarray(quota)[:, :, 8:] > 0).sum((1, 2)) for quota in (loose, strict))
    assert (used <= before).all()
    assert used.sum() < before.sum() or (kind, tolerance) == ("one-hot", 0.05)
    np.testing.assert_array_equal(np.asarray(replica) != EMPTY, np.asarray(loose)[:, :, 8:] > 0)
    if tolerance > 1e6:
        assert used.sum() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -0.1}, "tolerance=-0.1 must be at least 0"),
        ({"tolerance": float("nan")}, "tolerance=nan must be at least 0"),
        ({"tolerance": 0.05, "exact": True}, "tolerance=0.05 cannot be combined with exact=True"),
    ],
)
def test_replicate_experts_rejects_tolerances_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        replicate_experts(ONES, IN_ORDER, TOPOLOGY, **options)
