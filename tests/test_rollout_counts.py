"""Counts equal those of the whole routes, and so do plans that are made from them."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_encodings import ENCODINGS, LEFT_PADDED, MODEL, example, live, padded, routes, vllm, whole

from relibra_jax import (
    Batch,
    Topology,
    assign_samples,
    check_plan,
    eplb,
    join_batches,
    load_replay,
    place_experts,
    plan_batch,
    relibra,
    replay_from_rollout,
    sample_counts,
    sample_load,
    save_replay,
    static,
)
from relibra_jax.contract.types import Price, RoutingReplay
from relibra_jax.planning.routes import Routes

ROOT = Path(__file__).parents[1]
KEY = jax.random.key(1)
LEAN = relibra(place=functools.partial(place_experts, steps=100))


def assert_counts_of(replay, counts, num_experts):
    load, tokens, _ = counts
    assert type(load) is type(tokens) is np.ndarray
    np.testing.assert_array_equal(load, sample_load(replay, num_experts=num_experts))
    np.testing.assert_array_equal(tokens, np.asarray(replay.mask).sum(1))


@pytest.mark.parametrize("name", ENCODINGS)
def test_sample_counts_counts_every_layout_as_its_replay(name):
    layout, encode, _ = ENCODINGS[name]
    ids = example()
    source = encode(ids, LEFT_PADDED, 16)
    arguments = {"layout": layout, "mask": LEFT_PADDED, "start": 0} | MODEL
    arguments |= {"fill": "live", "live_routing": live(ids)}
    counts = sample_counts(source, **arguments)
    assert_counts_of(replay_from_rollout(source, **arguments), counts, 16)
    assert_counts_of(RoutingReplay(ids, LEFT_PADDED), counts, 16)


def test_sample_counts_counts_a_file(tmp_path):
    replay = RoutingReplay(example(), LEFT_PADDED)
    save_replay(tmp_path / "a.npz", replay, num_experts=16)
    assert_counts_of(replay, sample_counts(tmp_path / "a.npz", layout="npz", mask=LEFT_PADDED, **MODEL), 16)


def test_sample_counts_counts_the_recorded_trace():
    path = ROOT / "relibra_jax" / "data" / "recorded_trace.npz"
    replay, num_experts = load_replay(path)
    _, _, layers, top_k = replay.expert_ids.shape
    model = {"num_experts": num_experts, "top_k": top_k, "num_layers": layers}
    assert_counts_of(replay, sample_counts(path, layout="npz", mask=replay.mask, **model), num_experts)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(0, 4),
    num_experts=st.sampled_from([4, 200, 300]),
    top_k=st.integers(1, 4),
    moe_layers=st.sampled_from([[0, 1, 2], [2], [0, 2]]),
)
def test_sample_counts_counts_any_batch(seed, samples, num_experts, top_k, moe_layers):
    mask = np.random.default_rng(seed).random((samples, 7)) < 0.6
    ids = routes(seed, mask, layers=3, num_experts=num_experts, top_k=top_k)
    ids[(ids[:, :, moe_layers] == 0).all(axis=(2, 3))] = num_experts - 1
    model = {"num_experts": num_experts, "top_k": top_k, "num_layers": 3, "moe_layers": moe_layers}
    load, tokens, _ = sample_counts(whole(ids, mask), layout="vllm", mask=mask, **model)
    one_by_one = np.zeros((samples, len(moe_layers), num_experts), int)
    for sample, token in np.argwhere(mask):
        for number, layer in enumerate(moe_layers):
            for expert in ids[sample, token, layer]:
                one_by_one[sample, number, expert] += 1
    np.testing.assert_array_equal(load, one_by_one)
    np.testing.assert_array_equal(tokens, mask.sum(1))


@pytest.mark.parametrize(
    ("longest", "dtype"),
    [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.int32)],
)
def test_sample_counts_dtype_holds_a_sample_with_all_tokens_at_one_expert(longest, dtype):
    mask = np.arange(longest) < np.array([[3], [longest]])
    source = [np.ones((tokens, 1, 1), np.uint8) for tokens in mask.sum(1)]
    model = {"num_experts": 4, "top_k": 1, "num_layers": 1}
    load, tokens, _ = sample_counts(source, layout="vllm", mask=mask, **model)
    assert load.dtype == dtype
    assert load[:, 0].tolist() == [[0, 3, 0, 0], [0, longest, 0, 0]]
    assert tokens.dtype == np.int32


def test_sample_counts_refuses_in_the_words_of_replay_from_rollout():
    ids = example()
    ids[1, 4, 2] = 5
    for source, start in ((vllm(ids, LEFT_PADDED), 0), (padded(example(), LEFT_PADDED, -1)[0], None)):
        arguments = {"layout": "vllm", "mask": LEFT_PADDED, "start": start} | MODEL
        with pytest.raises(ValueError, match=r"^layout 'vllm': ") as from_counts:
            sample_counts(source, **arguments)
        with pytest.raises(ValueError, match=r"^layout 'vllm': ") as from_replay:
            replay_from_rollout(source, **arguments)
        assert str(from_counts.value) == str(from_replay.value)


def test_sample_counts_touches_no_device():
    """With an unknown platform any use of a JAX device raises, so the counts use none."""
    program = """if True:
        import numpy as np
        from relibra_jax import sample_counts
        rows = np.array([[[0, 1]], [[3, 2]]])
        model = {"num_experts": 4, "top_k": 2, "num_layers": 1}
        load, tokens, _ = sample_counts([rows], layout="vllm", mask=np.ones((1, 2), bool), **model)
        print(load.tolist(), tokens.tolist())
    """
    environment = os.environ | {"JAX_PLATFORMS": "none_such"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert ran.stdout == "[[[1, 1, 1, 1]]] [2]\n"


SEND = {"num_experts": 8, "top_k": 2, "num_layers": 3}


@pytest.fixture(scope="module")
def batch():
    """Make a batch of three workers, each padded to its own longest sample, and the same batch as one replay."""
    rng = np.random.default_rng(0)
    workers = []
    for samples, positions in ((8, 40), (4, 300), (12, 9)):
        mask = np.arange(positions) < rng.integers(positions // 2, positions + 1, samples)[:, None]
        workers.append((routes(samples, mask, layers=3, num_experts=8, top_k=2), mask))

    def widened(array):
        return np.pad(array, [(0, 0), (0, 300 - array.shape[1])] + [(0, 0)] * (array.ndim - 2))

    parts = [tuple(map(widened, worker)) for worker in workers]
    return workers, RoutingReplay(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def counts_of_workers(workers, every=None):
    """Return the counts of all workers, joined as a controller does."""
    sent = [
        sample_counts(whole(ids, mask), layout="vllm", mask=mask, every=every, **SEND)
        for ids, mask in workers
    ]
    assert {load.dtype for load, *_ in sent} == {np.dtype(np.uint8), np.dtype(np.uint16)}
    return join_batches([Batch(*counts) for counts in sent])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "jit"),
    [(static(), False), (eplb(), True), pytest.param(LEAN, True, marks=pytest.mark.long)],
    ids=["static", "eplb in jit", "relibra in jit"],
)
def test_plan_batch_plans_counts_as_the_whole_routes(batch, planner, jit):
    workers, replay = batch
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
    assign = functools.partial(assign_samples, steps=200)
    state = planner.init(topology, 3, key=jax.random.key(0))

    def plan(batch):
        options = {"stages": 2, "assign": assign, "key": KEY, "rounds": 1}
        return plan_batch(batch, planner, state, topology, **options)

    run = jax.jit(plan) if jit else plan
    counted, _ = run(counts_of_workers(workers))
    chex.assert_trees_all_equal(counted, run(replay)[0])
    check_plan(counted.plan, counted.load, topology)


def test_sample_counts_samples_every_nth_token_of_a_worker_and_joins_them_by_sample(batch):
    workers, replay = batch
    ids, samples, first = [], [], 0
    for expert_ids, mask in workers:
        sample, position = (index[::5] for index in np.nonzero(mask))
        ids.append(expert_ids[sample, position])
        samples.append(sample + first)
        first += len(mask)
    joined = counts_of_workers(workers, every=5)
    chex.assert_trees_all_equal(joined.routes, Routes(np.concatenate(ids), np.concatenate(samples)))
    assert joined.routes.expert_ids.dtype == np.uint8
    np.testing.assert_array_equal(joined.sample_load, sample_load(replay, num_experts=8))
    np.testing.assert_array_equal(joined.lengths, replay.mask.sum(1))


COST = Price(token=0.0, copy=1.0, spread=0.1, crossing=1.0, move=1.0, push=1.0, hierarchical=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "hierarchical"), [(1, False), (1, True), pytest.param(2, True, marks=pytest.mark.long)]
)
def test_plan_batch_uses_routes_of_a_few_tokens_where_a_token_is_sent_once(batch, nodes, hierarchical):
    workers, _ = batch
    cost = dataclasses.replace(COST, hierarchical=hierarchical)
    topology = Topology(num_nodes=nodes, ranks_per_node=4 // nodes, num_experts=8, replica_slots=1)
    state = LEAN.init(topology, 3, key=jax.random.key(0))
    with_routes, without = (
        plan_batch(counts_of_workers(workers, every), LEAN, state, topology, stages=2, cost=cost)[0]
        for every in (4, None)
    )
    check_plan(with_routes.plan, with_routes.load, topology)
    assert hierarchical == bool((with_routes.plan.home != without.plan.home).any())


def test_plan_batch_refuses_counts_of_another_model():
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
    counts = Batch(np.zeros((4, 3, 9), np.int32), np.ones(4, np.int32))
    with pytest.raises(ValueError, match=r"sample_load: expected shape \(4, 3, 8\), found \(4, 3, 9\)"):
        plan_batch(counts, static(), (), topology, stages=1)


def of_other_samples(counts):
    """Make sample 1 one that never uses the experts of its sampled tokens."""
    ids = counts.routes.expert_ids[counts.routes.sample == 1][0, 2]
    load = counts.sample_load.copy()
    load[1, 2, ids] = 0
    return counts._replace(sample_load=load)


FOREIGN = {
    "other samples": (
        of_other_samples,
        r"token \d+ of \d+: it is of sample 1 and uses expert \d in layer 2, where",
    ),
    "another sample number": (
        lambda counts: counts._replace(routes=counts.routes._replace(sample=counts.routes.sample + 20)),
        r"routes\.sample\[\d+\] is 24, but must be in -1\.\.23",
    ),
    "ids of slots": (
        lambda counts: counts._replace(
            routes=counts.routes._replace(expert_ids=counts.routes.expert_ids + np.uint8(8))
        ),
        r"routes\.expert_ids\[0, 0, 0\] is \d+, but must be in 0\.\.7",
    ),
    "other layers": (
        lambda counts: counts._replace(
            routes=counts.routes._replace(expert_ids=counts.routes.expert_ids[:, :2])
        ),
        r"routes\.expert_ids: expected shape \(\d+, 3, 2\), found \(\d+, 2, 2\)",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_routes_of_other_counts_are_refused_with_numbers(batch, name):
    change, message = FOREIGN[name]
    counts = change(counts_of_workers(batch[0], every=5))
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
    for refuse in (
        lambda: join_batches([counts]),
        lambda: plan_batch(counts, static(), (), topology, stages=1),
    ):
        with pytest.raises(ValueError, match=message):
            refuse()


def test_join_batches_refuses_parts_that_do_not_fit(batch):
    with_routes, without = (counts_of_workers(batch[0], every) for every in (5, None))
    with pytest.raises(ValueError, match=r"parts\[0\] and parts\[1\]: only one of them has routes"):
        join_batches([with_routes, without])
    fewer = without._replace(sample_load=without.sample_load[:, :2])
    with pytest.raises(
        ValueError, match=r"parts\[1\]: sample_load: expected shape \(24, 3, 8\), found \(24, 2, 8\)"
    ):
        join_batches([without, fewer])
    with pytest.raises(ValueError, match="at least one"):
        join_batches([])


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_plan_batch_refuses_counts_that_int32_cannot_hold(dtype):
    """They would wrap around silently; one below is planned exactly."""
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=2, replica_slots=0)
    load = np.zeros((2, 1, 2), dtype)
    load[1, 0, 1] = 2**31
    counts = Batch(load, np.ones(2, np.int32))
    with pytest.raises(ValueError, match=r"sample_load\[1, 0, 1\] is 2147483648, but .* at most 2147483647"):
        plan_batch(counts, static(), (), topology, stages=1)
    load[1, 0, 1] -= 1
    plan, _ = plan_batch(counts, static(), (), topology, stages=1)
    assert plan.plan.quota.sum() == 2**31 - 1
    most = np.iinfo(dtype).max
    with pytest.raises(ValueError, match=rf"lengths\[0\] is {most}, but"):
        plan_batch(counts._replace(lengths=np.array([most, 1], dtype)), static(), (), topology, stages=1)
