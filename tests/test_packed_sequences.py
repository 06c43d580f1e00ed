"""Tests that packed sequences compute the same as padded ones: log-probabilities, gradients and rows of slots.

The layers of packed sequences are striped as well, those of padded ones are not.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from support.plans import random_planner

from experiments.rl.configs import Train
from experiments.rl.losses import Clip
from experiments.rl.policy import TINY
from experiments.rl.trainer import Trainer
from relibra_jax import RoutingReplay, Topology
from relibra_jax.contract.types import EMPTY
from relibra_jax.models import make_model, token_log_probs
from relibra_jax.nnx import Balancer, ExpertParallel, accumulate_gradients, check_executed, expert_mesh

CONFIG = dataclasses.replace(
    TINY, width=16, layers=2, heads=2, kv_heads=1, head_width=8, expert_width=8, vocabulary=23
)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)
SAMPLES, LENGTH, MICRO_BATCHES = 96, 20, 2
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, LENGTH + 1, SAMPLES)
MASK = np.arange(LENGTH) < LENGTHS[:, None]
TOKENS = np.where(MASK, RNG.integers(0, 23, (SAMPLES, LENGTH)), 0).astype(np.int32)
IDS = np.argsort(RNG.random((SAMPLES, LENGTH, 2, 16)) * RNG.random(16))[..., :2].astype(np.uint8)
WEIGHT = np.where(MASK & (np.arange(LENGTH) > 0), RNG.random((SAMPLES, LENGTH)), 0).astype(np.float32)
LEAST_FILL = 16 / 17
"""The least share of packed positions that hold tokens: lengths are rounded up by at most a sixteenth."""
OF_SAMPLE = RNG.normal(size=SAMPLES).astype(np.float32)


@functools.cache
def mesh():
    return expert_mesh(TOPOLOGY)


@functools.cache
def prepared(pack_sequences, pieces=1):
    model = make_model(CONFIG, TOPOLOGY, mesh=mesh(), key=jax.random.key(0))
    options = {"num_layers": 2, "num_micro_batches": MICRO_BATCHES, "key": jax.random.key(1)}
    parallel = ExpertParallel(
        mesh=mesh(), topology=TOPOLOGY, check_rows=True, striped=pack_sequences, pieces=pieces
    )
    sequences = "packed" if pack_sequences else "padded"
    balancer = Balancer(random_planner(), parallel, sequences=sequences, **options)
    return model, balancer.prepare(model, None, RoutingReplay(IDS, MASK)), balancer


def step(model, batch, sequences):
    def loss_of(model, sequences, layers):
        (tokens, mask, ids, weight, of_sample), packing = sequences
        output = model(tokens, mask, ids, layers, parallel=batch.parallel, packing=packing)
        log_prob = token_log_probs(model, output.hidden, tokens, parallel=batch.parallel, packing=packing)
        scale = of_sample[:, None] if packing is None else of_sample
        return (weight * scale * log_prob).sum(), (log_prob, output.slot_rows)

    return accumulate_gradients(model, loss_of, batch, sequences)


@functools.cache
def result(pack_sequences, pieces=1):
    model, batch, _ = prepared(pack_sequences, pieces)
    sequences = batch.to_ranks((TOKENS, MASK, IDS, WEIGHT, OF_SAMPLE))
    gradients, (log_prob, slot_rows) = nnx.jit(step)(model, batch, (sequences, batch.packing))
    check_executed(slot_rows, batch)
    home = np.asarray(model.layers.experts.home[...])
    actual = nnx.to_pure_dict(gradients)
    experts = np.asarray(actual["layers"]["experts"]["experts"]).reshape(2, 16, -1)
    actual["layers"]["experts"]["experts"] = np.take_along_axis(experts, home[..., None], axis=1)
    return jax.device_get(actual), batch.from_ranks(log_prob)


@pytest.mark.slow
def test_packed_sequences_give_the_results_of_padded_sequences():
    (gradients, log_prob), (desired, unpacked) = result(True), result(False)
    np.testing.assert_allclose(np.where(MASK, log_prob, 0), np.where(MASK, unpacked, 0), atol=2e-6)
    assert not log_prob[:, 0].any()
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(desired), jax.tree.leaves(gradients), strict=True
    ):
        largest = np.abs(leaf).max()
        assert largest > 0, path
        np.testing.assert_allclose(other, leaf, atol=1e-5 * largest, err_msg=str(path))


@pytest.mark.long
def test_layers_in_pieces_give_the_results_of_whole_ones():
    """Samples begin at multiples of two positions of every rank of a node, and buffers are counted for halves."""
    (gradients, log_prob), (desired, whole) = result(True, 2), result(True)
    np.testing.assert_allclose(np.where(MASK, log_prob, 0), np.where(MASK, whole, 0), atol=2e-6)
    for leaf, other in zip(jax.tree.leaves(desired), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(other, leaf, atol=1e-5 * np.abs(leaf).max())
    whole, halves = (prepared(True, pieces)[1].parallel.capacities for pieces in (1, 2))
    assert halves.rows < 0.8 * whole.rows


@pytest.mark.slow
def test_packed_sequences_have_little_padding_and_every_token():
    _, batch, _ = prepared(True)
    segments, positions = (np.asarray(leaf) for leaf in batch.packing)
    most_aligned = SAMPLES * (TOPOLOGY.ranks_per_node - 1)
    assert (segments != EMPTY).sum() + most_aligned >= LEAST_FILL * segments.size
    actual = {
        (int(a), int(b)) for a, b in zip(segments.ravel(), positions.ravel(), strict=True) if a != EMPTY
    }
    assert actual == {(int(a), int(b)) for a, b in np.argwhere(MASK)}
    _, unpacked, _ = prepared(False)
    assert unpacked.packing is None
    assert (unpacked.parallel.num_sequences or 0) * LENGTH * MICRO_BATCHES >= 1.35 * segments.size


@pytest.mark.slow
def test_live_passes_pack_sequences_too():
    """Live routing in packed sequences gives the log-probabilities of padded ones, with little padding."""

    @nnx.jit
    def run(model, batch, tokens, mask, packing):
        output = model(tokens, mask, parallel=batch.parallel, packing=packing)
        return token_log_probs(model, output.hidden, tokens, parallel=batch.parallel, packing=packing)

    log_probs, positions = [], []
    for pack_sequences in (True, False):
        model, _, balancer = prepared(pack_sequences)
        batch = balancer.prepare(model, None, None, mask=MASK)
        tokens, mask = batch.to_ranks((TOKENS, MASK))
        packing = batch.packing
        parts = [
            run(model, batch, *jax.tree.map(lambda leaf, part=part: leaf[part], (tokens, mask, packing)))
            for part in range(MICRO_BATCHES)
        ]
        log_probs.append(np.where(MASK, batch.from_ranks(np.stack(parts)), 0))
        positions.append(tokens.size)
    np.testing.assert_allclose(*log_probs, atol=2e-6)
    assert MASK.sum() >= LEAST_FILL * positions[0]
    assert positions[1] == MASK.size


@pytest.mark.slow
def test_packed_sequences_reject_samples_not_aligned_left():
    model, _, balancer = prepared(True)
    mask = MASK.copy()
    mask[3, :3] = (True, False, True)
    with pytest.raises(
        ValueError,
        match=r"sample 3: token 2 is real, but token 1 before it is padding; samples must be aligned",
    ):
        balancer.prepare(model, None, RoutingReplay(IDS, mask))


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "split", "replay", "loss"),
    [
        ("grpo", False, True, "gspo"),
        ("grpo", True, True, "gspo"),
        ("ppo", True, True, "clip"),
        ("grpo", True, False, "cispo"),
    ],
)
def test_training_in_packed_sequences_learns_the_same(monkeypatch, algorithm, split, replay, loss):
    """With answers of uneven length, packed sequences give the same responses, and the same step from them."""
    monkeypatch.setattr(
        "experiments.rl.configs.POLICIES", {"tiny": dataclasses.replace(CONFIG, vocabulary=259)}
    )
    settings = {
        "task": "reverse",
        "prompts": 16,
        "responses_per_prompt": 8,
        "response_tokens": 16,
        "epochs": 1,
    }
    metrics = {}
    for pack_sequences in (False, True):
        config = Train(
            **settings,
            algorithm=algorithm,
            loss=loss,
            clip=Clip(low=3e-4, high=4e-4) if loss == "gspo" else Clip(),
            micro_batches=2,
            anneal_steps=20,
            pack_sequences=pack_sequences,
            split_samples=split and pack_sequences,
            replay=replay,
        )
        trainer = Trainer(config, 0)
        if algorithm == "ppo":  # a new critic gives all tokens the same value
            weight = trainer.state.critic.weight
            weight[...] = jax.random.normal(jax.random.key(1), weight.shape)
        metrics[pack_sequences] = trainer.learn() | trainer.warm_up()
    packed, unpacked = metrics[True], metrics[False]
    assert packed["response/tokens"] == unpacked["response/tokens"]
    assert packed["policy/loss"] == pytest.approx(unpacked["policy/loss"], abs=1e-5)
    assert packed["policy/gradient_norm"] == pytest.approx(unpacked["policy/gradient_norm"], rel=1e-4)
    if algorithm == "ppo":
        assert packed["critic/loss"] == pytest.approx(unpacked["critic/loss"], rel=1e-4)
        assert packed["critic/explained_variance"] == pytest.approx(
            unpacked["critic/explained_variance"], rel=1e-4
        )
    # A supervised update routes live.
    assert packed["warmup/loss"] == pytest.approx(unpacked["warmup/loss"], rel=1e-4)
    assert packed["batch/fill"] >= 0.95
    assert unpacked["batch/fill"] < 0.9
