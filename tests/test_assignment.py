"""Sample assignment: every sample once, within budgets, with nodes and attention more even than in order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.costs import NEEDED
from support.plans import random_routing, request_of

from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.replay import assigned_load
from relibra_jax.contract.types import BALANCE, EMPTY, Assignment, BatchPlan, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.planning import sample_search
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.batch import Batch, count_batch
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.routes import sample_routes
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.sample_search import SampleProblem
from relibra_jax.routing.visits import node_visits

KEY = jax.random.key(0)
SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=1)
HOME = np.tile(np.arange(4, dtype=np.int32), (2, 1))


def held_tokens(sample, tokens):
    """Return the tokens of each rank, ``[M, ranks]``, under an assignment."""
    by_position = np.append(tokens, 0)[np.asarray(sample)]
    return by_position.sum(-1).reshape(len(sample), -1)


def node_imbalance(sample, sample_load, home, nodes):
    """Return the sum of maximum node loads over the sum of mean node loads, averaged over layers."""
    by_slot = np.take_along_axis(sample_load, np.argsort(home, axis=-1)[None], -1).astype(float)
    by_node = by_slot.reshape(*by_slot.shape[:2], nodes, -1).sum(-1)
    by_node = np.concatenate([by_node, np.zeros_like(by_node[:1])])
    load = by_node[np.asarray(sample).reshape(len(sample), -1)].sum(1)
    return (load.max(-1).sum(0) / load.mean(-1).sum(0)).mean()


def attention_imbalance(sample, tokens):
    per_rank = held_tokens(sample, tokens)
    return per_rank.max(1).sum() / per_rank.mean(1).sum()


def each_once(sample, samples):
    sample = np.asarray(sample)
    return np.array_equal(np.sort(sample[sample != EMPTY]), np.arange(samples))


def budgets(start, lengths, ratio):
    """Return the documented bounds on the tokens of a micro-batch and of a rank."""
    per_rank = held_tokens(start.sample, lengths)
    mean, longest = lengths.sum() / len(per_rank), lengths.max()
    of_micro_batch = max(ratio * mean, longest, per_rank.sum(1).max())
    return of_micro_batch, max(mean / per_rank.shape[1], longest, per_rank.max())


def assigned(load, lengths, home, *, start, topology=SMALL, price=BALANCE, key=KEY, **options):
    """Return the samples at each position, as a NumPy array, for homes without residents."""
    placement = Placement.without_residents(jnp.asarray(home), topology)
    batch = Batch(jnp.asarray(load), jnp.asarray(lengths))
    return np.asarray(
        assign_samples(batch, placement, topology, start=start, price=price, key=key, **options).sample
    )


@pytest.mark.parametrize("positions", [1, 3])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 2000), min_size=11, max_size=11), seed=st.integers(0, 9))
def test_assign_samples_has_every_sample_once_within_the_budgets(positions, lengths, seed):
    lengths = np.array(lengths, np.int32)
    load = np.random.default_rng(seed).integers(0, 99, (11, 2, 4)).astype(np.int32)
    start = pack_samples(lengths, SMALL, num_micro_batches=3, samples_per_rank=positions)
    assign = functools.partial(assigned, load, lengths, HOME, start=start, steps=200)
    sample = assign(key=jax.random.key(seed))
    assert sample.shape == (3, 2, 2, positions)
    assert each_once(sample, 11)
    per_rank = held_tokens(sample, lengths)
    of_micro_batch, of_rank = budgets(start, lengths, 1.05)
    assert per_rank.sum(1).max() <= of_micro_batch + 1e-3
    assert per_rank.max() <= of_rank + 1e-3
    np.testing.assert_array_equal(
        sample, assign(key=jax.random.key(seed)), "the same key, the same assignment"
    )


@pytest.mark.parametrize("senders", [3, 6])
def test_sample_search_incremental_counts_equal_new_counts(senders):
    """A sender is a rank, or a node whose ranks have equal lanes."""
    topology = Topology(num_nodes=3, ranks_per_node=2, num_experts=6, replica_slots=0)
    rng = np.random.default_rng(0)
    crossing = rng.random((25, 3, 3, 2), np.float32) * ~np.eye(3, dtype=bool)[None, ..., None]
    tables = [rng.random((25, 6), np.float32), rng.integers(1, 50, 25), crossing, rng.random(25, np.float32)]
    for table in tables:
        table[-1] = 0
    problem = SampleProblem(*map(jnp.asarray, tables), budget=jnp.array([10_000, 10_000]))
    start = jnp.asarray(np.append(rng.permutation(24), np.full(12, 24)).reshape(3, 12))
    first = sample_search._packing(problem, start, topology, senders)
    last = sample_search._anneal(problem, first, KEY, topology, 100)
    assert (np.sort(np.asarray(last.sample), axis=None) == np.sort(np.asarray(start), axis=None)).all()
    assert (np.asarray(last.sample) != np.asarray(start)).any()
    counted = sample_search._packing(problem, last.sample, topology, senders)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), last, counted)


@pytest.mark.parametrize("kind", ["zero", "one_expert", "one_long_sample", "one_micro_batch"])
def test_assign_samples_holds_extreme_batches(kind):
    load, lengths = np.ones((11, 2, 4), np.int32), np.full(11, 7, np.int32)
    if kind == "zero":
        load[:], lengths[:] = 0, 0
    elif kind == "one_expert":
        load[..., 1:] = 0
    elif kind == "one_long_sample":
        lengths[4] = 10_000
    micro_batches = 1 if kind == "one_micro_batch" else 3
    start = pack_samples(lengths, SMALL, num_micro_batches=micro_batches, samples_per_rank=3)
    sample = assigned(load, lengths, HOME, start=start, steps=200)
    assert each_once(sample, 11)
    if kind == "one_long_sample":
        assert held_tokens(sample, lengths).max() == 10_000, "nothing joins it"


def test_assign_samples_puts_samples_near_their_experts():
    kind = np.arange(16) % 2
    load = np.zeros((16, 1, 4), np.int32)
    load[np.arange(16), 0, 2 * kind] = 10
    lengths, home = np.full(16, 10, np.int32), HOME[:1]
    start = pack_samples(lengths, SMALL, num_micro_batches=4)
    price = dataclasses.replace(BALANCE, crossing=0.03)
    sample = assigned(load, lengths, home, start=start, price=price, steps=500)
    assert node_imbalance(sample, load, home, 2) == 1
    assert (kind[sample] == np.arange(2)[None, :, None, None]).all()


def test_assign_samples_does_not_recompile_for_new_data():
    placement = Placement.without_residents(HOME, SMALL)
    assign = jax.jit(functools.partial(assign_samples, topology=SMALL, key=KEY, steps=50))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        load, lengths = rng.integers(0, 9, (7, 2, 4)), rng.integers(1, 9, 7)
        start = pack_samples(lengths, SMALL, num_micro_batches=2, samples_per_rank=1)
        batch = Batch(jnp.asarray(load), jnp.asarray(lengths))
        assert each_once(assign(batch, placement, start=start).sample, 7)
    assert assign._cache_size() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"start": Assignment(np.full((2, 2, 2, 1), EMPTY))},
            "start has 8 positions, too few for 11 samples",
        ),
        ({"start": Assignment(np.full((3, 4, 1, 1), EMPTY))}, r"expected shape \(2, 2\), found \(4, 1\)"),
        ({"token_budget": 0.9}, "token_budget=0.9 must be at least 1"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"key": None}, "needs a random key"),
        ({"lengths": np.ones(12, np.int32)}, r"lengths\[12\]"),
        ({"topology": Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)}, "8 experts"),
    ],
)
def test_assign_samples_names_the_numbers_of_bad_arguments(change, message):
    load, lengths = np.ones((11, 2, 4), np.int32), np.ones(11, np.int32)
    start = pack_samples(lengths, SMALL, num_micro_batches=3)
    arguments = {"load": load, "lengths": lengths, "home": HOME, "start": start, **change}
    with pytest.raises(ValueError, match=message):
        assigned(**arguments)


@given(samples=st.integers(1, 60), micro_batches=st.integers(1, 8))
def test_assign_in_order_makes_even_runs(samples, micro_batches):
    if micro_batches > samples:
        with pytest.raises(ValueError, match=f"num_micro_batches={micro_batches}"):
            assign_in_order(samples, SMALL, num_micro_batches=micro_batches)
        return
    sample = assign_in_order(samples, SMALL, num_micro_batches=micro_batches).sample
    flat = sample.ravel()
    assert flat[flat != EMPTY].tolist() == list(range(samples))
    count = (sample != EMPTY).sum((1, 2, 3))
    assert count.max() - count.min() <= 1


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "bound"), [(2, 1.016), (4, 1.060)])
def test_assign_samples_balances_recorded_loads(shared, nodes, bound):
    trace = np.load(shared / "traces" / "gptoss20b_rollouts.npz", allow_pickle=False)
    ends, order = np.cumsum(trace["lengths"]), np.random.default_rng(0).permutation(352)[:256]
    ids = trace["routed_experts"] + np.arange(24)[:, None] * 32
    rows = [ids[ends[i] - trace["lengths"][i] : ends[i]].ravel() for i in order]
    load = np.stack([np.bincount(row, minlength=768) for row in rows]).reshape(256, 24, 32).astype(np.int32)
    tokens = trace["lengths"][order].astype(np.int32)
    topology = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=2)
    before = np.tile(np.arange(32, dtype=np.int32), (24, 1))
    request = request_of(load.reshape(32, 8, 24, 32).sum(1), topology)
    home = np.asarray(place_experts(request, before, topology, key=KEY).home)
    # One sample per rank, and micro-batches with equal numbers of tokens.
    one_rank = Topology(num_nodes=1, ranks_per_node=1, num_experts=32, replica_slots=0)
    packing = pack_samples(tokens, one_rank, num_micro_batches=32, samples_per_rank=topology.num_ranks).sample
    start = Assignment(np.asarray(packing).reshape(32, nodes, 4, 1))
    price = dataclasses.replace(BALANCE, pair=1e-2, crossing=0.1)
    sample = assigned(load, tokens, home, start=start, topology=topology, price=price, steps=8000)
    print(f"{nodes} nodes: imbalance {node_imbalance(sample, load, home, nodes):.4f}")
    in_order = assign_in_order(256, topology, num_micro_batches=32).sample
    assert each_once(sample, 256)
    assert node_imbalance(sample, load, home, nodes) <= bound
    assert attention_imbalance(sample, tokens) <= attention_imbalance(in_order, tokens)
    per_rank = held_tokens(sample, tokens)
    assert per_rank.sum(1).max() <= 1.05 * tokens.sum() / 32
    assert per_rank.max() <= tokens.max()


def test_assign_samples_starts_from_what_is_given():
    """A step swaps at most one sample per micro-batch."""
    rng = np.random.default_rng(3)
    load, lengths = rng.integers(0, 50, (24, 3, 4)), rng.integers(10, 90, 24)
    home = np.tile(np.arange(4), (3, 1))
    assign = functools.partial(assigned, load, lengths, token_budget=4.0)
    packing = pack_samples(lengths, SMALL, num_micro_batches=4, samples_per_rank=4)
    first = assign(home, start=packing, steps=100)
    other = assign(home[:, ::-1], start=Assignment(first), steps=1)
    assert each_once(other, 24)
    before, after = first.reshape(4, -1), other.reshape(4, -1)
    assert all(min(len(np.setdiff1d(old, new)) for old in before) <= 1 for new in after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "exchange"), [("hierarchical", "needed"), ("flat", "needed"), ("hierarchical", "fitted")]
)
def test_assign_samples_takes_less_modelled_time_than_random_assignments(path, exchange):
    """On three nodes of two ranks, a rank sends and receives different numbers of tokens, and both count."""
    topology = Topology(num_nodes=3, ranks_per_node=2, num_experts=12, replica_slots=1)
    rng = np.random.default_rng(0)
    replay = random_routing(rng, samples=24, tokens=40, layers=2, experts=12, top_k=2)
    cost = dataclasses.replace(NEEDED, path=path, exchange=exchange).price(topology)
    batch = count_batch(replay, topology)._replace(routes=sample_routes(replay, count=4096))
    home = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    placement = Placement.without_residents(home, topology)
    start = pack_samples(batch.lengths, topology, num_micro_batches=2, samples_per_rank=2)
    result = assign_samples(batch, placement, topology, start=start, price=cost, key=KEY, token_budget=2.0)

    @jax.jit
    def seconds(assignment):
        load = assigned_load(batch.sample_load, assignment)
        plan = replicate_experts(PlanRequest(load), placement, topology)
        batch_plan = BatchPlan(assignment, load, plan)
        visits = node_visits(replay, batch_plan, topology) if path == "hierarchical" else None
        time = batch_time(batch_plan, batch.lengths, topology, cost, visits=visits, previous_home=home)
        return time.attention + time.compute + time.exchange

    drawn = [Assignment(rng.permutation(24).astype(np.int32).reshape(2, 3, 2, 2)) for _ in range(200)]
    assert seconds(result) < min(map(seconds, drawn))
