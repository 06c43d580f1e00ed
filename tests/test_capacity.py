"""Sizes counted before the step: they suffice, they are tight, and too small ones are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.traces import read_trace
from experiments.contenders import contenders
from relibra_jax.capacity import (
    batch_capacities,
    count_capacities,
    check_capacities,
    round_capacity,
    grow_capacities,
    worst_case_capacities,
)
from relibra_jax.plan import layer_plan
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.replay import expert_load
from relibra_jax.token_split import node_visits, refit_quota, source_quota
from relibra_jax.types import EMPTY, Assignment, RoutingReplay, Topology

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
SAMPLES, TOKENS, LAYERS, TOP_K = 12, 40, 2, 2


def a_batch(planner="relibra", seed=0):
    """Three micro-batches of skewed routing and their plan."""
    rng = np.random.default_rng(seed)
    popular = np.log(rng.permutation(1 / np.arange(1, 9) ** 1.3)) + rng.gumbel(
        size=(SAMPLES, TOKENS, LAYERS, 8)
    )
    ids = np.argsort(-popular, -1)[..., :TOP_K].astype(np.int8)
    mask = np.arange(TOKENS) < rng.integers(5, TOKENS, SAMPLES)[:, None]
    replay, assignment = RoutingReplay(ids, mask), Assignment(jnp.arange(SAMPLES).reshape(3, 2, 2, 1))
    load = expert_load(replay, assignment, num_experts=8)
    row = PLANNERS[planner].planner
    plan, _ = jax.jit(row.update)(load, row.init(TOPOLOGY, LAYERS, key=jax.random.key(0)), TOPOLOGY)
    return plan, load, node_visits(replay, assignment, plan, TOPOLOGY), replay, assignment


@pytest.fixture(scope="module")
def batch():
    return a_batch()[:3]


def test_sizes_are_what_the_plan_sends_rounded_up(batch):
    plan, load, visits = batch
    sent = np.asarray(source_quota(plan, load, TOPOLOGY)).sum(-1).reshape(3, LAYERS, 4, 4)
    sizes = count_capacities(plan, load, TOPOLOGY, visits=visits)
    assert sizes.rows == round_capacity(int(sent.sum(2).max()))
    assert sizes.flat.pair == round_capacity(int(sent.max()))
    assert sizes.flat.send == round_capacity(int(sent.sum(3).max()))
    assert sizes.node.pair == round_capacity(int(visits.max()))
    through = sent.reshape(3, LAYERS, 2, 2, 2, 2).sum(2)  # all sources of one local index
    assert sizes.local.pair == round_capacity(int(through.max()))
    assert sizes.local.send == round_capacity(int(through.sum(-1).max()))


def test_exports_are_the_most_replicas_of_one_rank(batch):
    plan, load, _ = batch
    most = 0
    for m, layer in np.ndindex(3, LAYERS):
        replicas = np.asarray(plan.slot_expert[m, layer, ..., TOPOLOGY.home_slots :]).ravel()
        owner = np.asarray(plan.home[layer])[replicas[replicas != EMPTY]] // TOPOLOGY.home_slots
        most = max(most, np.bincount(owner, minlength=4).max())
    assert most > 0
    assert count_capacities(plan, load, TOPOLOGY).exports == most


def test_grown_sizes_hold_both_batches(batch):
    small, large = (count_capacities(*a_batch(seed=seed)[:2], TOPOLOGY) for seed in (0, 1))
    grown = grow_capacities(small, large)
    check_capacities(grown, small)
    check_capacities(grown, large)
    assert grow_capacities(grown, small) == grown
    assert grow_capacities(small, worst_case_capacities(TOKENS, TOP_K, TOPOLOGY)).node is None


def test_received_rows_on_recorded_routing(shared):
    """With the ragged exchange at most 1.1 times the balanced rows of the largest micro-batch."""
    trace = read_trace(shared / "traces" / "gptoss20b_rollouts.npz")
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
    works = contenders(trace, topology, micro_batches=2, samples_per_rank=4, layers=6)
    balanced = np.asarray(works["relibra"].load).sum((2, 3, 4)).max() / topology.num_ranks
    assert works["relibra"].sizes.flat.receive <= 1.1 * balanced
    assert works["static"].sizes.flat.receive > 1.5 * balanced


def test_safe_sizes_hold_any_plan(batch):
    plan, load, visits = batch
    check_capacities(
        worst_case_capacities(TOKENS, TOP_K, TOPOLOGY), count_capacities(plan, load, TOPOLOGY, visits=visits)
    )


@pytest.mark.parametrize("buffer", ["rows", "flat.pair", "node.send", "local.pair"])
def test_an_undersized_buffer_is_refused_with_both_sizes(batch, buffer):
    plan, load, visits = batch
    need = count_capacities(plan, load, TOPOLOGY, visits=visits)
    first, _, last = buffer.rpartition(".")
    inner = getattr(need, first) if first else need
    smaller = dataclasses.replace(inner, **{last: getattr(inner, last) - 8})
    have = dataclasses.replace(need, **{first: smaller}) if first else smaller
    with pytest.raises(ValueError, match=rf"{buffer}: {getattr(inner, last) - 8}, .* {getattr(inner, last)}"):
        check_capacities(have, need)


def test_the_node_hop_has_to_be_counted(batch):
    plan, load, visits = batch
    with pytest.raises(ValueError, match=r"node.pair: not counted"):
        check_capacities(count_capacities(plan, load, TOPOLOGY), count_capacities(plan, load, TOPOLOGY, visits=visits))


def test_loads_of_another_batch_are_refused(batch):
    plan, load, _ = batch
    for other in (load + 1, load[..., ::-1]):
        with pytest.raises(ValueError, match=r"expert 0: quotas sum to \d+, load is \d+"):
            count_capacities(plan, other, TOPOLOGY)


def test_counting_from_the_replay_is_the_same(batch):
    plan, load, visits, replay, assignment = BATCHES[0]
    found = batch_capacities(replay, assignment, plan, TOPOLOGY, hierarchical=True)
    assert found == count_capacities(plan, load, TOPOLOGY, visits=visits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda replay, lies, plan: (replay._replace(expert_ids=replay.expert_ids[:, :, :1]), lies, plan),
         "replay of 1 MoE layers, plan of 2"),
        (lambda replay, lies, plan: (replay._replace(expert_ids=replay.expert_ids + 1), lies, plan),
         r"sample \d+, token \d+, layer \d+: .*8"),
        (lambda replay, lies, plan: (replay, Assignment(lies.sample[:2]), plan),
         r"assignment of \(2, 2, 2\) .* plan of \(3, 2, 2\)"),
        (lambda replay, lies, plan: (replay, Assignment(lies.sample[::-1]), plan),
         r"micro-batch 0, layer 0, expert \d: quotas sum to \d+, load is \d+"),
        (lambda replay, lies, plan: (replay, lies, plan._replace(home=plan.home[:, :4])),
         r"home: expected shape \(2, 8\)"),
    ],
)  # fmt: skip
def test_what_is_not_of_one_batch_is_refused(change, message):
    plan, _, _, replay, assignment = BATCHES[0]
    with pytest.raises(ValueError, match=message):
        batch_capacities(*change(replay, assignment, plan), TOPOLOGY)


@given(st.integers(0, 2**31 - 1))
def test_few_sizes_are_close_and_few(count):
    size = round_capacity(count)
    assert count <= size <= max(count * 33 / 32, count + 8)
    assert round_capacity(size) == size
    assert len({round_capacity(n) for n in range(1024, 2048)}) == 33


@given(st.integers(0, 2**32 - 1))
def test_refitted_quotas_sum_to_the_new_load(seed):
    """Same slots, every copy of the new load computed once, shares kept to a whole copy."""
    rng = np.random.default_rng(seed)
    plan = BATCHES[seed % 2][0]
    layer = layer_plan(plan, 0, 0)
    load = jnp.asarray(rng.zipf(1.4, (2, 2, 8)).clip(0, 10**7) * (rng.random((2, 2, 8)) < 0.8), jnp.int32)
    refit = refit_quota(layer, load, TOPOLOGY)
    np.testing.assert_array_equal(refit.slot_expert, layer.slot_expert)
    assert (refit.quota >= 0).all()
    for expert, total in enumerate(np.asarray(load).sum((0, 1))):
        here = np.asarray(layer.slot_expert) == expert
        got, planned = np.asarray(refit.quota)[here], np.asarray(layer.quota)[here]
        assert got.sum() == total
        if planned.sum():
            np.testing.assert_allclose(got, total * (planned / planned.sum()), atol=1 + 1e-6 * total)


BATCHES = [a_batch("relibra", 1), a_batch("eplb", 2)]
