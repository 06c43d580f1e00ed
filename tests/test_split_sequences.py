"""Tests that samples which the ranks of a node share give the results of whole ones, and even out the ranks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.plans import random_planner

from experiments.rl.configs import Train
from experiments.rl.policy import TINY
from relibra_jax import RoutingReplay, Topology, assign_samples, check_plan, pack_samples, plan_batch, relibra
from relibra_jax.contract.types import BALANCE, EMPTY, Assignment
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import attention_time
from relibra_jax.evaluation import Ranks
from relibra_jax.evaluation.setting import Batching, make_setting
from relibra_jax.execution.node_streams import shift_tokens
from relibra_jax.models import make_model, token_log_probs
from relibra_jax.models.attention import Attention
from relibra_jax.nnx import Balancer, ExpertParallel, accumulate_gradients, check_executed, expert_mesh
from relibra_jax.planning.batch import count_batch
from relibra_jax.planning.plan_batch import Stage
from relibra_jax.planning.starts import start_assignment
from relibra_jax.routing.node_streams import CHUNK, chunk_length, lay_out_streams
from relibra_jax.routing.sequence_packing import lay_out_sequences
from relibra_jax.traces.read import read_trace

CONFIG = dataclasses.replace(
    TINY, width=16, layers=2, heads=2, kv_heads=1, head_width=8, expert_width=8, vocabulary=23
)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)
GROUPS = Topology(num_nodes=2, ranks_per_node=2, num_experts=16, replica_slots=1)
RNG = np.random.default_rng(0)
LENGTH, MICRO_BATCHES = 90, 2
LENGTHS = np.array([90, 41, *RNG.integers(2, 21, 21)])
"""A rank's share of a micro-batch is 21 tokens, so the first two samples are longer."""
SAMPLES = len(LENGTHS)
MASK = np.arange(LENGTH) < LENGTHS[:, None]
TOKENS = np.where(MASK, RNG.integers(0, 23, (SAMPLES, LENGTH)), 0).astype(np.int32)
IDS = np.argsort(RNG.random((SAMPLES, LENGTH, 2, 16)) * RNG.random(16))[..., :2].astype(np.uint8)
WEIGHT = np.where(MASK & (np.arange(LENGTH) > 0), RNG.random((SAMPLES, LENGTH)), 0).astype(np.float32)
SPLIT = dataclasses.replace(BALANCE, sequences="split")


@functools.cache
def prepared(sequences, data=1, **options):
    topology = TOPOLOGY if data == 1 else GROUPS
    mesh = expert_mesh(topology) if data == 1 else expert_mesh(topology, data=data)
    model = make_model(CONFIG, topology, mesh=mesh, key=jax.random.key(0), shard_dense=data > 1)
    parallel = ExpertParallel(mesh=mesh, topology=topology, check_rows=True, **options)
    balancer = Balancer(
        *(random_planner(), parallel),
        num_layers=2,
        num_micro_batches=MICRO_BATCHES,
        key=jax.random.key(1),
        sequences=sequences,
    )
    return model, balancer.prepare(model, None, RoutingReplay(IDS, MASK)), balancer


def step(model, batch, sequences):
    def loss_of(model, sequences, layers):
        (tokens, mask, ids, weight), packing = sequences
        output = model(tokens, mask, ids, layers, parallel=batch.parallel, packing=packing)
        log_prob = token_log_probs(model, output.hidden, tokens, parallel=batch.parallel, packing=packing)
        return (weight * log_prob).sum(), (log_prob, output.slot_rows)

    return accumulate_gradients(model, loss_of, batch, sequences)


@functools.cache
def result(sequences, data=1, **options):
    """Return the gradients, with experts in their logical order, and the log-probabilities of the samples."""
    model, batch, _ = prepared(sequences, data, **options)
    samples = batch.to_ranks((TOKENS, MASK, IDS, WEIGHT))
    gradients, (log_prob, slot_rows) = nnx.jit(step)(model, batch, (samples, batch.packing))
    check_executed(slot_rows, batch)
    home = np.asarray(model.layers.experts.home[...])
    actual = jax.device_get(nnx.to_pure_dict(gradients))
    experts = np.asarray(actual["layers"]["experts"]["experts"]).reshape(2, 16, -1)
    actual["layers"]["experts"]["experts"] = np.take_along_axis(experts, home[..., None], axis=1)
    return actual, np.where(MASK, batch.from_ranks(log_prob), 0)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("relibra_jax.routing.node_streams.CHUNK", 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "options"),
    [
        pytest.param(1, {"striped": False}, marks=pytest.mark.long),
        (1, {"striped": True, "pieces": 2}),
        pytest.param(2, {}, marks=pytest.mark.long),
    ],
    ids=["plain", "striped in pieces", "two groups, sharded dense"],
)
def test_split_samples_give_the_results_of_whole_ones(data, options):
    (gradients, log_prob), (desired, whole) = result("split", data, **options), result("padded")
    np.testing.assert_allclose(log_prob, whole, atol=2e-6)
    assert np.abs(whole).max() > 1
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(desired), jax.tree.leaves(gradients), strict=True
    ):
        largest = np.abs(leaf).max()
        assert largest > 0, path
        np.testing.assert_allclose(other, leaf, atol=1e-5 * largest, err_msg=str(path))


@pytest.mark.slow
def test_a_plan_of_split_samples_has_the_load_of_the_tokens_on_each_rank():
    _, batch, _ = prepared("split", striped=False)
    segments, positions = (np.asarray(leaf) for leaf in batch.packing)
    assert segments.shape == (MICRO_BATCHES, 8, 24)
    real = segments != EMPTY
    tokens = np.stack([segments[real], positions[real]], axis=1)
    np.testing.assert_array_equal(tokens[np.lexsort(tokens.T[::-1])], np.argwhere(MASK))
    # The samples of a micro-batch are on one node each, and the longest is on all of its ranks.
    nodes = np.broadcast_to(np.arange(16).reshape(2, 8, 1) // 4, segments.shape)
    assert all(len(np.unique(nodes[segments == sample])) == 1 for sample in range(SAMPLES))
    assert len(np.unique(np.argwhere(segments == 0)[:, 1])) == 4
    load = np.zeros((MICRO_BATCHES, 2, 8, 16), int)
    for micro_batch, rank, column in np.argwhere(real).tolist():
        place = micro_batch, rank, column
        for layer in range(2):
            load[micro_batch, layer, rank, IDS[segments[place], positions[place], layer]] += 1
    np.testing.assert_array_equal(batch.batch_plan.load, load.reshape(MICRO_BATCHES, 2, 2, 4, 16))


def test_sequences_are_whole_chunks():
    assert [chunk_length(length) for length in (5, 8, 24)] == [5, 8, 8]
    with pytest.raises(ValueError, match="split sequences of 12 positions must be a multiple of 8 positions"):
        chunk_length(12)


def test_streams_are_cut_into_chunks_for_the_ranks_in_turn():
    assignment = Assignment(np.array([[[[0, 1], [2, EMPTY]], [[EMPTY, 3], [EMPTY, EMPTY]]]]))
    lengths = np.array([30, 20, 44, 92])
    layout = lay_out_streams(assignment, lengths)
    assert layout.sample.shape[-2:] == (1, 48)
    assert layout.sample[0, :, :, 0].tolist() == [
        [[*[2] * 24, *[0] * 16, *[1] * 8], [*[2] * 20, *[0] * 14, *[1] * 12, EMPTY, EMPTY]],
        [[3] * 48, [*[3] * 44, *[EMPTY] * 4]],
    ]
    assert layout.position[0, 1, 1, 0].tolist()[:17] == [*range(8, 16), *range(24, 32), 40]
    assert lay_out_streams(assignment, 10 * lengths).sample.shape[-2:] == (1, 480)
    assert lay_out_streams(assignment, lengths // 20, align=4).sample.shape[-2:] == (1, 4)
    with pytest.raises(ValueError, match="aligned positions 3 must divide the 8 positions of a chunk"):
        lay_out_streams(assignment, lengths, align=3)


@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_entries_go_to_the_next_rank(by):
    mesh = expert_mesh(TOPOLOGY)
    parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY, split_sequences=True)
    streams = RNG.normal(size=(2, 64)).astype(np.float32)

    def cut(streams):
        return streams.reshape(2, 2, 4, 8).swapaxes(1, 2).reshape(8, 16)

    shift = jax.jit(functools.partial(shift_tokens, by=by, parallel=parallel))
    actual, pull = jax.vjp(shift, cut(streams))
    shifted = np.roll(streams, by, axis=1)
    shifted[:, 0 if by > 0 else -1] = 0
    np.testing.assert_array_equal(actual, cut(shifted))
    cotangent = np.roll(streams, -by, axis=1)
    cotangent[:, -1 if by > 0 else 0] = 0
    np.testing.assert_array_equal(pull(cut(streams))[0], cut(cotangent))


def imbalance(ranks):
    """Return the sum of maxima over ranks, relative to the sum of means, of ``ranks[M, ranks]``."""
    return ranks.max(1).sum() / ranks.mean(1).sum()


def counted(layout):
    """Return the imbalance of tokens, and of pairs of tokens that attend to each other, of ``[M, *ranks, T]``."""
    sample, position = (leaf.reshape(len(leaf), -1, leaf.shape[-1]) for leaf in layout)
    tokens = (sample != EMPTY).sum(2)
    pairs = np.where(sample != EMPTY, position + 1, 0).sum(2, dtype=float)
    return imbalance(tokens), imbalance(pairs)


def test_split_samples_even_out_ranks_at_uneven_lengths(monkeypatch):
    """1,024 log-normal lengths (median 4k, at most 32k) on 4 nodes of 8 ranks; a rank has about 8k tokens."""
    monkeypatch.setattr("relibra_jax.routing.node_streams.CHUNK", CHUNK)
    topology = Topology(num_nodes=4, ranks_per_node=8, num_experts=32, replica_slots=0)
    lengths = np.minimum(np.random.default_rng(0).lognormal(np.log(4096), 1.0, 1024), 32768).astype(int)
    micro_batches = round(lengths.sum() / 32 / 8192)
    whole = lay_out_sequences(pack_samples(lengths, topology, num_micro_batches=micro_batches), lengths)
    start = start_assignment(
        lengths, topology, num_micro_batches=micro_batches, price=dataclasses.replace(SPLIT, pair=1.0)
    )
    split = lay_out_streams(start, lengths)
    # All compiled sequences are as long as the longest, so few of their positions hold tokens.
    assert whole.sample.shape[-2:] == (1, 32768)
    assert (whole.sample != EMPTY).mean() < 0.3
    assert split.sample.shape[-2:] == (1, 8192)
    assert (split.sample != EMPTY).mean() > 0.95
    (tokens, pairs), (split_tokens, split_pairs) = (counted(layout) for layout in (whole, split))
    assert (tokens > 1.05, split_tokens < 1.03) == (True, True)
    assert (pairs > 1.15, split_pairs < 1.1) == (True, True)
    # The local ranks of a node are even, also without whole samples beside them.
    of_nodes = (leaf.reshape(-1, 8, leaf.shape[-1]) for leaf in split)
    assert counted(of_nodes)[1] < 1.07


def test_the_price_of_split_samples_is_even_over_a_node():
    lengths = jnp.array([8, 2, 2, 4])
    assignment = Assignment(np.array([[[[0, EMPTY], [1, 2]], [[3, EMPTY], [EMPTY, EMPTY]]]]))
    price = dataclasses.replace(SPLIT, token=1.0, pair=0.5)
    seconds, positions = attention_time(assignment, lengths, price)
    assert float(positions) == 6
    np.testing.assert_allclose(seconds, [[[6 + 18, 6 + 18], [6 + 4, 6 + 4]]])


@pytest.mark.long
def test_stages_of_split_samples_are_planned_for_nodes():
    """A recompute and two updates, with residents: nodes have equal tokens, and their ranks equal loads."""
    topology = dataclasses.replace(TOPOLOGY, resident_slots=1)
    model = dataclasses.replace(MODELS["gpt-oss-20b"], num_experts=16, top_k=2)
    price = CostModel(cluster=CLUSTERS["h100"], model=model, sequences="split").price(topology)
    planner, stages = relibra(), [Stage(1), Stage(2, range(12)), Stage(2, range(12, SAMPLES))]
    plans, _ = plan_batch(
        *(RoutingReplay(IDS, MASK), planner, planner.init(topology, 2, key=jax.random.key(0)), topology),
        stages=stages,
        cost=price,
        assign=assign_samples,
        key=jax.random.key(1),
        rounds=1,
    )
    for stage, plan in zip(stages, plans, strict=True):
        check_plan(plan.plan, plan.load, topology)
        sample = np.asarray(plan.assignment.sample)
        samples = stage.samples or range(SAMPLES)
        assert sorted(sample[sample != EMPTY].tolist()) == list(samples)
        tokens = np.append(LENGTHS, 0)[sample].sum((2, 3))
        # The longest sample has 90 tokens, which is more than an even share of some micro-batches.
        assert tokens.max() <= max(1.1 * tokens.mean(), 95)
        load = np.asarray(plan.load)
        assert (load.max(3) - load.min(3)).max() == 1


@pytest.mark.slow
def test_split_sequences_reject_counts_alone():
    model, _, balancer = prepared("split", striped=False)
    counts = count_batch(RoutingReplay(IDS, MASK), TOPOLOGY)
    with pytest.raises(ValueError, match="which of 4 ranks of a node holds a token of split sequences"):
        balancer.prepare(model, None, None, counts=counts)
    assert not balancer.live.split_sequences


@pytest.mark.slow
def test_live_samples_must_be_aligned_to_the_left():
    model, _, balancer = prepared("split", striped=False)
    mask = np.ones((8, 6), bool)
    mask[3, 1] = False
    with pytest.raises(ValueError, match=r"sample 3: token 2 is real, but token 1 before it is padding"):
        balancer.prepare(model, None, None, mask=mask)


def test_attention_of_split_sequences_rejects_tokens_without_samples():
    parallel = ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY, split_sequences=True)
    attention, x = Attention(CONFIG, rngs=nnx.Rngs(0)), jnp.zeros((8, 8, CONFIG.width))
    with pytest.raises(ValueError, match=r"need the sample of each token: pass PreparedBatch\.packing"):
        attention(x, jnp.zeros((8, 8), jnp.int32), None, None, parallel=parallel)


def test_runs_split_only_packed_samples():
    assert Train(split_samples=True).split_samples
    with pytest.raises(ValueError, match="split_samples=True needs pack_sequences=True"):
        Train(split_samples=True, pack_sequences=False)


def test_comparisons_reject_split_sequences():
    trace = read_trace("recorded")
    cost = CostModel(cluster=CLUSTERS["h100"], model=MODELS["gpt-oss-20b"], sequences="split")
    with pytest.raises(ValueError, match="sequences='split' cannot be compared here"):
        make_setting(
            trace, Ranks().topology(trace.num_experts), batching=Batching(micro_batches=2), cost=cost
        )


def test_split_sequences_pay_for_keys_and_values_inside_a_node():
    topology = Topology(num_nodes=1, ranks_per_node=4, num_experts=32, replica_slots=0)
    cost = CostModel(cluster=CLUSTERS["h100"], model=MODELS["gpt-oss-20b"])
    packed, split = (
        dataclasses.replace(cost, sequences=sequences).price(topology) for sequences in ("packed", "split")
    )
    cluster, passes = cost.cluster, 3
    seconds = passes * 3 * 2 * cost.model.cache_width / (cluster.fast_bandwidth * cluster.network_efficiency)
    assert float(split.token) - float(packed.token) == pytest.approx(seconds, rel=1e-6)
    assert (split.even_ranks, packed.even_ranks) == (True, False)
