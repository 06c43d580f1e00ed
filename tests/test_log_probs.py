"""Log-probabilities in chunks equal those of whole logits, and no compiled program of a run holds whole logits."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.rl import generation
from experiments.rl.objective import Losses
from experiments.rl.policy import TINY, Agent
from experiments.rl.step import TrainingBatch, recompute, update
from relibra_jax.contract.types import Topology
from relibra_jax.models import make_model, token_log_probs, token_log_probs_and_entropies
from relibra_jax.nnx import ExpertParallel, SequencePacking, expert_mesh
from relibra_jax.nnx.prepared import PreparedBatch

# The vocabulary is prime, so that only arrays over the vocabulary have an axis of which it is a divisor.
CONFIG = dataclasses.replace(
    TINY, width=16, layers=2, heads=2, kv_heads=1, head_width=8, expert_width=8, vocabulary=1009
)
TOPOLOGY = Topology(num_nodes=1, ranks_per_node=2, num_experts=16, replica_slots=0)
SEQUENCES, LENGTH = 4, 29
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, CONFIG.vocabulary, (SEQUENCES, LENGTH)).astype(np.int32)
HIDDEN = RNG.normal(size=(SEQUENCES, LENGTH, CONFIG.width)).astype(np.float32)
STARTS = (np.arange(LENGTH) == 0) | (RNG.random(TOKENS.shape) < 0.2)
POSITIONS = np.arange(LENGTH) - np.maximum.accumulate(np.where(STARTS, np.arange(LENGTH), 0), axis=1)
PACKING = SequencePacking(np.cumsum(STARTS, axis=1, dtype=np.int32), POSITIONS.astype(np.int32))


@functools.cache
def parallel():
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[: TOPOLOGY.num_ranks])
    return ExpertParallel(mesh=mesh, topology=TOPOLOGY)


@functools.cache
def model(tied=False):
    config = dataclasses.replace(CONFIG, tied=tied)
    return make_model(config, TOPOLOGY, mesh=parallel().mesh, key=jax.random.key(0))


def whole_log_probs(model, hidden, tokens, *, temperature, packing):
    """Compute what `token_log_probs` does from the logits of all tokens."""
    log_probs = jax.nn.log_softmax(model.logits(hidden) / temperature)
    of_tokens = jnp.take_along_axis(log_probs, jnp.roll(tokens, -1, axis=1)[..., None], axis=-1)[..., 0]
    starts = np.arange(LENGTH)[None] == 0 if packing is None else packing.positions == 0
    return jnp.where(starts, 0, jnp.roll(of_tokens, 1, axis=1))


def with_gradients(log_probs, model, packing):
    """Compute log-probabilities, and gradients of a weighted sum by the model's parameters and the hidden states."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    weights = np.random.default_rng(1).normal(size=TOKENS.shape).astype(np.float32)

    def loss(params, hidden):
        of_tokens = log_probs(
            nnx.merge(graph, params, rest), hidden, TOKENS, temperature=0.7, packing=packing
        )
        return (weights * of_tokens).sum(), of_tokens

    (gradients, of_hidden), of_tokens = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, HIDDEN)
    return of_tokens, of_hidden, gradients


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("packing", [None, PACKING], ids=["unpacked", "packed"])
def test_token_log_probs_in_chunks_equal_those_of_whole_logits(monkeypatch, tied, packing):
    # A rank has the hidden states of 58 tokens: six chunks of ten tokens, and two of padding.
    monkeypatch.setattr("relibra_jax.models.log_probs.CHUNK", 11)
    in_chunks = functools.partial(token_log_probs, parallel=parallel())
    of_tokens, of_hidden, gradients = with_gradients(in_chunks, model(tied), packing)
    expected, expected_of_hidden, expected_gradients = with_gradients(whole_log_probs, model(tied), packing)
    np.testing.assert_allclose(of_tokens, expected, rtol=1e-6)
    assert not of_tokens[:, 0].any()
    np.testing.assert_allclose(of_hidden, expected_of_hidden, atol=1e-6 * np.abs(expected_of_hidden).max())
    name = "embedding" if tied else "head"
    gradient, expected = gradients[name][...], expected_gradients[name][...]
    assert gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(expected).max())


def test_entropies_and_their_gradients_equal_those_of_naive_loops_in_float64(monkeypatch):
    """Hidden states are scaled so that some distributions are nearly even and some have one likely token."""
    monkeypatch.setattr("relibra_jax.models.log_probs.CHUNK", 11)
    temperature, weights = 0.7, np.random.default_rng(1).normal(size=TOKENS.shape)
    hidden = (HIDDEN * np.logspace(-2, 3, LENGTH)[None, :, None]).astype(np.float32)
    graph, params, rest = nnx.split(model(), nnx.Param, ...)

    def bonus(params, hidden):
        log_probs, entropies = token_log_probs_and_entropies(
            nnx.merge(graph, params, rest),
            *(hidden, TOKENS),
            parallel=parallel(),
            temperature=temperature,
            packing=PACKING,
        )
        return (weights.astype(np.float32) * entropies).sum(), (log_probs, entropies)

    run = jax.jit(jax.grad(bonus, argnums=(0, 1), has_aux=True))
    (gradients, of_hidden), (log_probs, entropies) = run(params, hidden)
    alone = token_log_probs(
        model(), hidden, TOKENS, parallel=parallel(), temperature=temperature, packing=PACKING
    )
    np.testing.assert_allclose(log_probs, alone, rtol=1e-6)
    head = np.asarray(model().head[...], np.float64)
    expected, expected_of_hidden, of_head = (
        np.zeros(each) for each in (TOKENS.shape, hidden.shape, head.shape)
    )
    for i, t in zip(*np.nonzero(POSITIONS), strict=True):
        row = hidden[i, t - 1].astype(np.float64)
        logits = row @ head / temperature
        log_p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        entropy = -(np.exp(log_p) * log_p).sum()
        expected[i, t] = entropy
        slope = -weights[i, t] * np.exp(log_p) * (log_p + entropy) / temperature
        expected_of_hidden[i, t - 1] = head @ slope
        of_head += np.outer(row, slope)
    assert expected.max() > 6.9
    assert expected[POSITIONS > 0].min() < 0.01
    np.testing.assert_allclose(entropies, expected, rtol=1e-4, atol=1e-5)
    for actual, desired in ((of_hidden, expected_of_hidden), (gradients["head"][...], of_head)):
        np.testing.assert_allclose(actual, desired, atol=1e-5 * np.abs(desired).max())


def test_token_log_probs_of_single_tokens_are_0():
    log_probs = token_log_probs(model(), HIDDEN[:, :1], TOKENS[:, :1], parallel=parallel())
    np.testing.assert_array_equal(log_probs, np.zeros((SEQUENCES, 1), np.float32))


def lower(program):
    """Lower one of the programs of a run that use the model."""
    agent = Agent(model())
    if program in ("prefill", "decode"):
        prompts = generation.PaddedPrompts(jnp.asarray(TOKENS), jnp.full(SEQUENCES, LENGTH, jnp.int32))
        arguments = (agent.policy, prompts, jnp.int32(0))
        options = {"parallel": parallel(), "max_new_tokens": 5, "copies": 1}
        if program == "prefill":
            return generation.prefill.lower(*arguments, **options)
        return generation.decode.lower(
            agent.policy,
            generation.prefill(*arguments, **options)[1],
            keys=jax.random.split(jax.random.key(0), SEQUENCES),
            lengths=prompts.lengths,
            ends=jnp.array([3]),
            sampling=(jnp.float32(0.7), jnp.float32(0.9), jnp.ones(CONFIG.vocabulary, bool)),
            until=jnp.int32(5),
            parallel=parallel(),
        )
    batch, numbers = PreparedBatch(None, parallel()), np.ones((1, *TOKENS.shape), np.float32)
    samples = TrainingBatch(TOKENS[None], numbers > 0, None, numbers, numbers, -numbers)
    if program == "recompute":
        return recompute.lower(agent, batch, samples, temperature=0.7)
    optimizer = nnx.Optimizer(agent, optax.adamw(1e-3), wrt=nnx.Param)
    batch_load = np.zeros((CONFIG.layers, CONFIG.num_experts), np.int32)
    losses = Losses(entropy=0.1) if program == "update" else None
    return update.lower(agent, optimizer, batch, samples, batch_load, losses=losses)


def rows_over_vocabulary(hlo):
    """Return the numbers of rows of all arrays in a program that have the vocabulary's size along an axis."""
    shapes = {
        tuple(map(int, sizes.split(","))) for sizes in re.findall(r"\b[a-z]+[0-9]+\w*\[([0-9,]+)\]", hlo)
    }
    vocabulary = CONFIG.vocabulary
    return {
        math.prod(shape) // vocabulary
        for shape in shapes
        if any(size and size % vocabulary == 0 for size in shape)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "most"),
    [
        ("prefill", 16),
        ("decode", 16),
        ("recompute", 20),
        pytest.param("warm-up", 20, marks=pytest.mark.long),
        ("update", 20),
    ],
)
def test_programs_of_a_run_hold_no_whole_logits(monkeypatch, program, most):
    """Their largest arrays over the vocabulary are the embedding, of width 16, and the logits of a chunk of 20 tokens.

    A rank has 58 tokens.
    """
    monkeypatch.setattr("relibra_jax.models.log_probs.CHUNK", 20)
    assert max(rows_over_vocabulary(lower(program).compile().as_text())) == most
