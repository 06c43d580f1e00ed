"""Buffer sizes that are counted before the step suffice and are tight, and sizes that are too small raise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import planned, random_plan, random_routing

from relibra_jax.contract.replay import expert_load
from relibra_jax.contract.replay_files import load_replay
from relibra_jax.contract.types import (
    EMPTY,
    Assignment,
    BatchPlan,
    LayerPlan,
    RoutingReplay,
    Topology,
    layer_plans,
)
from relibra_jax.routing.sizes import (
    check_capacities,
    count_capacities,
    export_count,
    grow_capacities,
    padded_rows,
    round_capacity,
    with_spare_room,
    worst_case_capacities,
)
from relibra_jax.routing.split import refit_quota, source_quota
from relibra_jax.routing.visits import node_visits

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1, resident_slots=1)
"""The topology; planners leave its resident slots empty, and random plans fill them."""
SAMPLES, TOKENS, LAYERS, TOP_K = 12, 40, 2, 2


@functools.cache
def a_batch(planner, seed):
    """Return three micro-batches with skewed routing, their plan, and the tokens that cross between nodes."""
    rng = np.random.default_rng(seed)
    replay = random_routing(rng, samples=SAMPLES, tokens=TOKENS, layers=LAYERS, experts=8, top_k=TOP_K)
    assignment = Assignment(np.arange(SAMPLES).reshape(3, 2, 2, 1))
    load = expert_load(replay, assignment, num_experts=8)
    plan = random_plan(rng, load, TOPOLOGY) if planner == "any" else planned(planner, TOPOLOGY, load)
    batch_plan = BatchPlan(assignment, load, plan)
    return batch_plan, node_visits(replay, batch_plan, TOPOLOGY)


@pytest.fixture(scope="module", params=["relibra", "any"])
def batch(request):
    return a_batch(request.param, 0)


def sent_by(batch_plan):
    """Return the token copies from rank to rank, ``[M, L, P, P]``."""
    split = jax.jit(jax.vmap(jax.vmap(functools.partial(source_quota, topology=TOPOLOGY))))
    return np.asarray(split(batch_plan.layer_plans())).sum(-1).reshape(3, LAYERS, 4, 4)


def test_count_capacities_is_what_the_plan_sends_rounded_up(batch):
    batch_plan, visits = batch
    sent = sent_by(batch_plan)
    sizes = count_capacities(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    assert sizes.rows == round_capacity(int(sent.sum(2).max()))
    kept = sent.diagonal(axis1=2, axis2=3)
    assert sizes.flat.own == round_capacity(int(kept.max()))
    assert sizes.flat.pair == round_capacity(int(np.where(np.eye(4), 0, sent).max()))
    assert sizes.flat.send == round_capacity(int(sent.sum(3).max()))
    assert sizes.flat.receive == sizes.local.receive == sizes.rows
    stays = np.repeat(np.eye(2), 2, 0)
    assert sizes.node.own == round_capacity(int(np.where(stays, visits, 0).max()))
    assert sizes.node.pair == round_capacity(int(np.where(stays, 0, visits).max()))
    assert sizes.node.send == round_capacity(int(visits.sum(-1).max()))
    # The rank with the same local index receives them: [node of the source, local index, node].
    across = visits.reshape(3, LAYERS, 2, 2, 2)
    assert sizes.node.receive == round_capacity(int(across.sum(2).max()))
    through = sent.reshape(3, LAYERS, 2, 2, 2, 2).sum(2)  # all sources with the same local index
    assert sizes.local.own == round_capacity(int(through.diagonal(axis1=2, axis2=4).max()))
    assert sizes.local.pair == round_capacity(int(np.where(np.eye(2)[:, None], 0, through).max()))
    assert sizes.local.send == round_capacity(int(through.sum(-1).max()))


def test_count_capacities_exports_the_most_replicas_of_one_rank(batch):
    """A replica is fetched from its expert's home, or from a resident in its own node if the home is in another."""
    batch_plan, _ = batch
    plan, most, distinct = jax.tree.map(np.asarray, batch_plan.plan), 0, 0
    for m, layer in np.ndindex(3, LAYERS):
        slots, copies = plan.slot_expert[m, layer].reshape(4, TOPOLOGY.slots), np.zeros(4, int)
        exported = set()
        for rank, expert in enumerate(slots[:, TOPOLOGY.held_slots]):
            if expert == EMPTY:
                continue
            home, near = plan.home[layer, expert] // TOPOLOGY.home_slots, 2 * (rank // 2)
            holders = [p for p in (near, near + 1) if expert in slots[p, : TOPOLOGY.held_slots]]
            holder = home if home in holders else holders[0]
            copies[holder] += 1
            exported.add((holder, expert))
        np.testing.assert_array_equal(export_count(batch_plan.micro_batch(m).layer(layer), TOPOLOGY), copies)
        most = max(most, copies.max())
        distinct = max(distinct, *np.bincount([holder for holder, _ in exported] or [0], minlength=2))
    sizes = count_capacities(batch_plan.layer_plans(), TOPOLOGY)
    assert most > 0
    assert (sizes.export_copies, sizes.exports) == (most, distinct)


def test_grow_capacities_holds_both_batches(batch):
    small, large = (count_capacities(a_batch("relibra", seed)[0].layer_plans(), TOPOLOGY) for seed in (0, 1))
    assert small != large
    grown = grow_capacities(small, large)
    check_capacities(grown, small)
    check_capacities(grown, large)
    assert grow_capacities(grown, small) == grown
    assert grown.flat.lengths == max(small.flat, large.flat, key=lambda sizes: sizes.pair).lengths
    assert grow_capacities(small, worst_case_capacities(TOKENS, TOP_K, TOPOLOGY)).node is None


@pytest.mark.slow
def test_count_capacities_is_near_the_balanced_rows_on_recorded_routing(shared):
    """The ragged exchange receives at most 1.1 times the balanced rows of the largest micro-batch."""
    recorded, _ = load_replay(shared / "traces" / "gptoss20b_rollouts.npz")
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
    chosen = np.random.default_rng(0).permutation(len(recorded.mask))[: 2 * 8 * 4]
    replay = RoutingReplay(recorded.expert_ids[chosen][:, :, :6], recorded.mask[chosen])
    assignment = Assignment(np.arange(len(chosen)).reshape(2, 2, 4, 4))
    load = expert_load(replay, assignment, num_experts=32)
    sizes = {
        name: count_capacities(layer_plans(planned(name, topology, load), load), topology)
        for name in ("relibra", "static")
    }
    balanced = np.asarray(load).sum((2, 3, 4)).max() / topology.num_ranks
    assert sizes["relibra"].flat.receive <= 1.1 * balanced
    assert sizes["static"].flat.receive > 1.5 * balanced


def test_worst_case_capacities_hold_any_plan(batch):
    batch_plan, visits = batch
    need = count_capacities(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    check_capacities(worst_case_capacities(TOKENS, TOP_K, TOPOLOGY), dataclasses.replace(need, push=None))


@pytest.mark.parametrize("buffer", ["rows", "flat.pair", "node.send", "local.pair"])
def test_check_capacities_refuses_an_undersized_buffer_with_both_sizes(batch, buffer):
    batch_plan, visits = batch
    need = count_capacities(batch_plan.layer_plans(), TOPOLOGY, visits=visits)
    first, _, last = buffer.rpartition(".")
    inner = getattr(need, first) if first else need
    smaller = dataclasses.replace(inner, **{last: getattr(inner, last) - 8})
    have = dataclasses.replace(need, **{first: smaller}) if first else smaller
    with pytest.raises(
        ValueError, match=rf"{buffer} has size {getattr(inner, last) - 8}, .* {getattr(inner, last)}"
    ):
        check_capacities(have, need)


def test_check_capacities_needs_the_node_hop_to_be_counted(batch):
    batch_plan, visits = batch
    flat, both = (
        count_capacities(batch_plan.layer_plans(), TOPOLOGY, visits=each) for each in (None, visits)
    )
    assert flat == dataclasses.replace(both, node=None)
    with pytest.raises(ValueError, match=r"node.pair was not counted"):
        check_capacities(flat, both)


def test_count_capacities_counts_data_parallel_copies_as_micro_batches():
    """The sizes of micro-batches that share a step are the maximum over them. Lengths of lanes are fitted to all."""
    parts = [a_batch("relibra", seed)[0].layer_plans() for seed in (0, 1)]
    together = LayerPlan(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))
    sizes = [count_capacities(each, TOPOLOGY) for each in parts]
    # The copies of one batch share their residents; the copies of two batches do not.
    together, apart = count_capacities(together, TOPOLOGY), grow_capacities(*sizes)
    for one, other in ((together, apart), (apart, together)):
        check_capacities(dataclasses.replace(one, push=None), dataclasses.replace(other, push=None))
    assert together.flat.lengths[-1] == max(each.flat.lengths[-1] for each in sizes)


@given(st.integers(0, 2**31 - 1))
def test_round_capacity_gives_sizes_that_are_close_and_few(count):
    size = round_capacity(count)
    assert count <= size <= max(count * 33 / 32, count + 8)
    assert round_capacity(size) == size
    assert len({round_capacity(n) for n in range(1024, 2048)}) == 33


@pytest.mark.parametrize("spare_room", [False, True])
@given(size=st.integers(0, 2**23))
def test_padded_rows_are_those_of_the_step(size, spare_room):
    """Floats under jit give the integers that the host computes."""
    rows = round_capacity(size)
    expected = with_spare_room(rows) if spare_room else rows
    assert float(padded_rows(jnp.float32(size), spare_room=spare_room)) == expected


refit_to = jax.jit(functools.partial(refit_quota, topology=TOPOLOGY))


@given(st.integers(0, 2**32 - 1))
def test_refit_quota_sums_to_the_new_load(seed):
    """Refitted plans keep their slots, compute every copy of the new load once, and keep the shares within one copy."""
    rng = np.random.default_rng(seed)
    batch_plan, _ = a_batch(("relibra", "eplb", "any")[seed % 3], 1)
    layer = batch_plan.micro_batch(0).layer(0)
    load = jnp.asarray(rng.zipf(1.4, (2, 2, 8)).clip(0, 10**7) * (rng.random((2, 2, 8)) < 0.8), jnp.int32)
    refit = refit_to(layer._replace(load=None), load)
    np.testing.assert_array_equal(refit.load, load)
    np.testing.assert_array_equal(refit.home, layer.home)
    np.testing.assert_array_equal(refit.slot_expert, layer.slot_expert)
    assert (refit.quota >= 0).all()
    for expert, total in enumerate(np.asarray(load).sum((0, 1))):
        here = np.asarray(layer.slot_expert) == expert
        actual, planned = np.asarray(refit.quota)[here], np.asarray(layer.quota)[here]
        assert actual.sum() == total
        if planned.sum():
            np.testing.assert_allclose(actual, total * (planned / planned.sum()), atol=1 + 1e-6 * total)
