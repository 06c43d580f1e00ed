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
from support.plans import random_routing

from relibra_jax.contract.plan import expert_totals
from relibra_jax.contract.replay import assigned_load, sample_load
from relibra_jax.contract.types import EMPTY, Assignment, BatchPlan, Topology
from relibra_jax.cost.batch_time import batch_time
from relibra_jax.planning.assignment import assign_in_order, assign_samples
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.planning.token_sample import sample_routes
from relibra_jax.routing.visits import node_visits

KEY = jax.random.key(0)
SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=1)


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


def longest_first(tokens, bins, room):
    """Return the bin of each item by longest-first packing, in plain Python."""
    load, free, where = np.zeros(bins), np.full(bins, room), np.zeros(len(tokens), int)
    for item in np.argsort(-np.asarray(tokens), kind="stable"):
        where[item] = np.argmin(np.where(free > 0, load, np.inf))
        load[where[item]] += tokens[item]
        free[where[item]] -= 1
    return where


def budgets(tokens, micro_batches, room, ratio):
    """Return the documented bounds on the tokens of a micro-batch and of a rank."""
    packed = pack_samples(tokens, SMALL, num_micro_batches=micro_batches, samples_per_rank=room).sample
    per_rank, mean, longest = (
        held_tokens(np.asarray(packed), tokens),
        tokens.sum() / micro_batches,
        tokens.max(),
    )
    in_micro_batch = per_rank.sum(1)
    if room == 1:  # a micro-batch is packed as a whole
        in_micro_batch = np.bincount(longest_first(tokens, micro_batches, SMALL.num_ranks), weights=tokens)
    ranks = per_rank.shape[1]
    return max(ratio * mean, longest, in_micro_batch.max()), max(
        ratio * mean / ranks, longest, per_rank.max()
    )


@pytest.mark.parametrize("room", [1, 3])
@settings(max_examples=15, deadline=None)
@given(tokens=st.lists(st.integers(0, 2000), min_size=11, max_size=11), seed=st.integers(0, 9))
def test_every_sample_once_and_budgets_are_held(room, tokens, seed):
    tokens = np.array(tokens, np.int32)
    load = np.random.default_rng(seed).integers(0, 99, (11, 2, 4)).astype(np.int32)
    home = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    assign = functools.partial(
        assign_samples, load, tokens, home, SMALL, num_micro_batches=3, steps=200, samples_per_rank=room
    )
    sample = np.asarray(assign(key=jax.random.key(seed)).sample)
    assert sample.shape == (3, 2, 2, room)
    assert each_once(sample, 11)
    per_rank = held_tokens(sample, tokens)
    of_micro_batch, of_rank = budgets(tokens, 3, room, 1.05)
    assert per_rank.sum(1).max() <= of_micro_batch + 1e-3
    assert per_rank.max() <= of_rank + 1e-3
    assert np.array_equal(sample, assign(key=jax.random.key(seed)).sample), (
        "the same key, the same assignment"
    )


@pytest.mark.parametrize("kind", ["zero", "one_expert", "one_long_sample", "one_micro_batch"])
def test_extreme_batches(kind):
    load, tokens = np.ones((11, 2, 4), np.int32), np.full(11, 7, np.int32)
    if kind == "zero":
        load[:], tokens[:] = 0, 0
    elif kind == "one_expert":
        load[..., 1:] = 0
    elif kind == "one_long_sample":
        tokens[4] = 10_000
    home = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    micro_batches = 1 if kind == "one_micro_batch" else 3
    sample = assign_samples(
        load, tokens, home, SMALL, num_micro_batches=micro_batches, key=KEY, steps=200, samples_per_rank=3
    ).sample
    assert each_once(sample, 11)
    if kind == "one_long_sample":
        assert held_tokens(sample, tokens).max() == 10_000, "nothing joins it"


def test_samples_lie_near_their_experts():
    kind = np.arange(16) % 2
    load = np.zeros((16, 1, 4), np.int32)
    load[np.arange(16), 0, 2 * kind] = 10
    home = np.arange(4, dtype=np.int32)[None]
    sample = np.asarray(
        assign_samples(
            load, np.full(16, 10, np.int32), home, SMALL, num_micro_batches=4, key=KEY, steps=500
        ).sample
    )
    assert node_imbalance(sample, load, home, 2) == 1
    assert (kind[sample] == np.arange(2)[None, :, None, None]).all()


def test_works_under_jit_without_recompiling():
    home = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    assign = jax.jit(
        functools.partial(assign_samples, topology=SMALL, num_micro_batches=2, key=KEY, steps=50)
    )
    for seed in range(2):
        rng = np.random.default_rng(seed)
        load, tokens = rng.integers(0, 9, (7, 2, 4)), rng.integers(1, 9, 7)
        assert each_once(assign(jnp.asarray(load), jnp.asarray(tokens), home).sample, 7)
    assert assign._cache_size() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_micro_batches": 12}, "num_micro_batches=12 must be at least 1 and at most 11"),
        ({"samples_per_rank": 0}, "samples_per_rank=0 is too small for 11 samples on 4 ranks"),
        ({"token_budget": 0.9}, "token_budget=0.9 must be at least 1"),
        ({"steps": 0}, "steps=0"),
        ({"attention_cost": -1.0}, "attention_cost=-1.0"),
        ({"topology": Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)}, "8 experts"),
    ],
)
def test_bad_arguments_name_their_numbers(change, message):
    arguments = {"topology": SMALL, "num_micro_batches": 3, "key": KEY, **change}
    home = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    with pytest.raises(ValueError, match=message):
        assign_samples(np.ones((11, 2, 4), np.int32), np.ones(11, np.int32), home, **arguments)


@given(samples=st.integers(1, 60), micro_batches=st.integers(1, 8))
def test_in_order(samples, micro_batches):
    if micro_batches > samples:
        with pytest.raises(ValueError, match=f"num_micro_batches={micro_batches}"):
            assign_in_order(samples, SMALL, num_micro_batches=micro_batches)
        return
    sample = assign_in_order(samples, SMALL, num_micro_batches=micro_batches).sample
    flat = sample.ravel()
    assert flat[flat != EMPTY].tolist() == list(range(samples))
    count = (sample != EMPTY).sum((1, 2, 3))
    assert count.max() - count.min() <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "bound"), [(2, 1.016), (4, 1.060)])
def test_recorded_loads(shared, nodes, bound):
    trace = np.load(shared / "traces" / "gptoss20b_rollouts.npz", allow_pickle=False)
    ends, order = np.cumsum(trace["lengths"]), np.random.default_rng(0).permutation(352)[:256]
    ids = trace["routed_experts"] + np.arange(24)[:, None] * 32
    rows = [ids[ends[i] - trace["lengths"][i] : ends[i]].ravel() for i in order]
    load = np.stack([np.bincount(row, minlength=768) for row in rows]).reshape(256, 24, 32).astype(np.int32)
    tokens = trace["lengths"][order].astype(np.int32)
    topology = Topology(num_nodes=nodes, ranks_per_node=4, num_experts=32, replica_slots=2)
    start = np.tile(np.arange(32, dtype=np.int32), (24, 1))
    by_micro_batch = load.reshape(32, 8, 24, 32).sum(1).astype(np.int32)
    home = np.asarray(place_experts(by_micro_batch, start, topology, key=KEY).home)
    sample = assign_samples(load, tokens, home, topology, num_micro_batches=32, key=KEY).sample
    in_order = assign_in_order(256, topology, num_micro_batches=32).sample
    assert each_once(sample, 256)
    assert node_imbalance(sample, load, home, nodes) <= bound
    assert attention_imbalance(sample, tokens) <= attention_imbalance(in_order, tokens)
    per_rank = held_tokens(sample, tokens)
    assert per_rank.sum(1).max() <= 1.05 * tokens.sum() / 32
    assert per_rank.max() <= tokens.max()


def test_refining_starts_from_what_is_given():
    """A step swaps at most one sample per micro-batch; an EMPTY ``refine`` starts from packing, as None does."""
    rng = np.random.default_rng(3)
    load, tokens = rng.integers(0, 50, (24, 3, 4)), rng.integers(10, 90, 24)
    home = np.tile(np.arange(4), (3, 1))
    assign = functools.partial(
        assign_samples, num_micro_batches=4, key=KEY, samples_per_rank=4, token_budget=4.0
    )
    first = assign(load, tokens, home, SMALL, steps=100)
    other = assign(load, tokens, home[:, ::-1], SMALL, steps=1, refine=first).sample
    assert each_once(other, 24)
    before, after = (np.asarray(sample).reshape(4, -1) for sample in (first.sample, other))
    assert all(min(len(np.setdiff1d(old, new)) for old in before) <= 1 for new in after)
    nobody = Assignment(np.full_like(first.sample, EMPTY))
    again = assign(load, tokens, home, SMALL, steps=100, refine=nobody)
    np.testing.assert_array_equal(again.sample, first.sample)
    with pytest.raises(ValueError, match=r"refine: expected shape \(4, 2, 2, 4\), found \(3, 2, 2, 4\)"):
        assign(load, tokens, home, SMALL, refine=Assignment(first.sample[:3]))


@pytest.mark.parametrize("hierarchical", [True, False])
def test_no_random_assignment_takes_less_modelled_time(hierarchical):
    """On three nodes of two ranks, a rank sends and receives different numbers of tokens, and both count."""
    topology = Topology(num_nodes=3, ranks_per_node=2, num_experts=12, replica_slots=1)
    rng = np.random.default_rng(0)
    replay = random_routing(rng, samples=24, tokens=40, layers=2, experts=12, top_k=2)
    path = "hierarchical" if hierarchical else "flat"
    cost = dataclasses.replace(NEEDED, path=path).price(topology)
    load, tokens = sample_load(replay, num_experts=12), replay.mask.sum(1)
    home = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    result = assign_samples(
        *(load, tokens, home, topology),
        num_micro_batches=2,
        key=KEY,
        samples_per_rank=2,
        token_budget=2.0,
        routes=sample_routes(replay, count=4096),
        cost=cost,
    )

    @jax.jit
    def seconds(assignment):
        batch = assigned_load(load, assignment)
        plan = replicate_experts(expert_totals(batch), home, topology)
        batch_plan = BatchPlan(assignment, batch, plan)
        visits = node_visits(replay, batch_plan, topology) if hierarchical else None
        time = batch_time(batch_plan, tokens, topology, cost, visits=visits, previous_home=home)
        return time.attention + time.compute + time.exchange

    drawn = [Assignment(rng.permutation(24).astype(np.int32).reshape(2, 3, 2, 2)) for _ in range(200)]
    assert seconds(result) < min(map(seconds, drawn))
