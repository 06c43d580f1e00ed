"""Attention inside samples against attention in NumPy, and the arrays of programs that use it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from experiments.rl.policy import TINY
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.models import LanguageModel, token_log_probs
from relibra_jax.models.attention import Attention
from relibra_jax.models.packed_attention import BLOCK, first_keys, packed_attention, split_attention
from relibra_jax.nnx import ExpertParallel, SequencePacking, expert_mesh

WIDTH, KV_HEADS = 6, 2
CONFIG = dataclasses.replace(
    TINY, width=16, layers=2, heads=2, kv_heads=1, head_width=8, expert_width=8, vocabulary=23
)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)


def segments_of(*lengths, length):
    """Return the segments of a sequence with samples of these lengths, negative for padding, which also ends it."""
    segments, start = np.full(length, EMPTY, np.int32), 0
    for index, each in enumerate(lengths):
        segments[start : start + max(each, 0)] = 30 - index
        start += abs(each)
    return segments


@functools.cache
def inputs(length, heads):
    rng = np.random.default_rng(0)
    shapes = [(3, length, count, WIDTH) for count in (heads, KV_HEADS, KV_HEADS, heads)]
    return [rng.normal(size=shape) for shape in shapes]


def segments_for(length):
    return np.stack(
        [
            segments_of(length, length=length),
            segments_of(9, -2, 2, 5, -1, 1, length=length),
            segments_of(length=length),
        ]
    )


def oracle(query, key, value, segments, cotangent):
    """Return the output and the gradients of ``(output * cotangent).sum()`` in float64."""
    groups = query.shape[2] // key.shape[2]
    keys, values = (np.repeat(array, groups, axis=2) for array in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, keys) / np.sqrt(WIDTH)
    visible = np.tril(np.ones(scores.shape[-2:], bool))
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None]) & (segments != EMPTY)[:, None]
        visible = visible & (same | np.eye(len(visible), dtype=bool))[:, None]
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bqhd,bkhd->bhqk", cotangent, values)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) / np.sqrt(WIDTH)
    of_keys = np.einsum("bhqk,bqhd->bkhd", of_scores, query)
    of_values = np.einsum("bhqk,bqhd->bkhd", weights, cotangent)
    of_key, of_value = (array.reshape(*key.shape[:3], groups, WIDTH).sum(3) for array in (of_keys, of_values))
    output = np.einsum("bhqk,bkhd->bqhd", weights, values)
    return output, np.einsum("bhqk,bkhd->bqhd", of_scores, keys), of_key, of_value


@functools.partial(jax.jit, static_argnames="block")
def with_gradients(query, key, value, segments, cotangent, *, block=8):
    output, pull = jax.vjp(
        lambda *arrays: packed_attention(*arrays, segments, block=block), query, key, value
    )
    return output, *pull(cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "heads"), [(24, 2), (29, 6), (5, 4)])
def test_packed_attention_equals_attention_over_all_pairs(length, heads, packed, dtype):
    query, key, value, cotangent = (jnp.asarray(array, dtype) for array in inputs(length, heads))
    segments = segments_for(max(length, 20))[:, :length] if packed else None
    actual = with_gradients(query, key, value, segments, cotangent)
    exact = (np.asarray(array, np.float64) for array in (query, key, value))
    desired = oracle(*exact, segments, np.asarray(cotangent, np.float64))
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
    for array, other in zip(actual, desired, strict=True):
        assert array.dtype == dtype
        largest = np.abs(other).max()
        np.testing.assert_allclose(np.asarray(array, np.float64), other, atol=tolerance * largest)


def test_samples_of_several_blocks_do_not_depend_on_what_is_beside_them():
    """Blocks of other samples are not read: what is NaN in one sample does not reach another."""
    length = 64
    query, key, value, cotangent = (np.asarray(array, np.float32) for array in inputs(length, 4))
    segments = np.stack([segments_of(16, 40, -8, length=length)] * 3)
    desired = with_gradients(query, key, value, segments, cotangent)
    dirty = [array.copy() for array in (query, key, value)]
    for array in dirty:
        array[:, :16] = array[:, 56:] = np.nan
    for array, other in zip(with_gradients(*dirty, segments, cotangent), desired, strict=True):
        np.testing.assert_array_equal(array[:, 16:56], other[:, 16:56])


def test_padding_gives_finite_values_and_gradients():
    query, key, value, cotangent = (np.asarray(array, np.float32) for array in inputs(29, 6))
    segments = np.full((3, 29), EMPTY, np.int32)
    output, *gradients = with_gradients(query, key, value, segments, cotangent)
    np.testing.assert_allclose(output, np.repeat(value, 3, axis=2), rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_first_keys_start_at_samples():
    np.testing.assert_array_equal(
        first_keys(segments_for(20)),
        [
            [0] * 20,
            [*[0] * 9, 9, 10, *[11] * 2, *[13] * 5, 18, 19],
            list(range(20)),
        ],
    )


@functools.cache
def parallel():
    return ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY)


@pytest.mark.parametrize("chunk", [8, 24])
def test_split_attention_equals_attention_over_the_streams_of_nodes(monkeypatch, chunk):
    """Two nodes have streams of 96 tokens, on four ranks each: the longest sample is on all of them."""
    monkeypatch.setattr("relibra_jax.routing.node_streams.CHUNK", chunk)
    rng, length, local = np.random.default_rng(0), 24, 4
    shapes = [(2, local * length, count, WIDTH) for count in (4, KV_HEADS, KV_HEADS, 4)]
    streams = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    segments = np.stack([segments_of(70, 17, 3, length=96), segments_of(31, 64, length=96)])

    def cut(stream):
        chunks = stream.reshape(2, -1, local, chunk, *stream.shape[2:])
        return chunks.swapaxes(1, 2).reshape(2 * local, length, *stream.shape[2:])

    @jax.jit
    def run(query, key, value, segments, cotangent):
        tokens = parallel().token_spec
        attend = jax.shard_map(split_attention, mesh=parallel().mesh, in_specs=tokens, out_specs=tokens)
        output, pull = jax.vjp(lambda *arrays: attend(*arrays, segments), query, key, value)
        return output, *pull(cotangent)

    *arrays, cotangent = map(cut, streams)
    actual = run(*arrays, cut(segments), cotangent)
    exact = [stream.astype(float) for stream in streams]
    for array, other in zip(actual, oracle(*exact[:3], segments, exact[3]), strict=True):
        np.testing.assert_allclose(array, cut(other), atol=2e-6 * np.abs(other).max())


def test_models_pass_the_implementation_of_attention_on():
    """Packed and split sequences both; on a CPU the kernels say that they cannot run."""
    attention = Attention(CONFIG, rngs=nnx.Rngs(0))
    x = jnp.zeros((8, BLOCK + 256, CONFIG.width))
    tokens = jnp.zeros(x.shape[:2], jnp.int32)
    for split in (False, True):
        other = dataclasses.replace(parallel(), attention_implementation="triton", split_sequences=split)
        with pytest.raises(ValueError, match="implementation='triton' cannot run: cpu"):
            nnx.eval_shape(lambda: attention(x, tokens, tokens, None, parallel=other))  # noqa: B023


@pytest.mark.parametrize("packed", [False, True])
def test_attention_in_blocks_on_many_ranks_equals_one_block(packed, monkeypatch):
    attention = Attention(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(16, 20, CONFIG.width)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 20, (16, 20)), jnp.int32)
    segments = np.concatenate([segments_for(20)] * 6)[:16] if packed else None

    def run():
        @nnx.jit
        def with_gradients(attention, x):
            def loss(attention, x):
                output, _ = attention(x, positions, segments, None, parallel=parallel())
                return (output**2).sum(), output

            return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(attention, x)

        return jax.tree.leaves(with_gradients(attention, x))

    desired = run()
    monkeypatch.setattr("relibra_jax.models.attention.BLOCK", 8)
    for leaf, other in zip(run(), desired, strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5 * np.abs(other).max())


def array_shapes(jaxpr):
    """Return the shapes of all arrays of a program, in loops and functions too."""
    shapes = {var.aval.shape for equation in jaxpr.eqns for var in equation.outvars}
    inner = [inner for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params)]
    return shapes.union(*map(array_shapes, inner))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_updates_have_no_array_over_pairs_of_tokens(packed):
    length = BLOCK + 8
    graph, state = nnx.split(nnx.eval_shape(lambda: LanguageModel(CONFIG, TOPOLOGY, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((8, length), jnp.int32)
    ids = jax.ShapeDtypeStruct((8, length, CONFIG.layers, CONFIG.top_k), jnp.uint8)
    packing = SequencePacking(tokens, tokens) if packed else None

    def loss(state, tokens, ids, packing):
        model = nnx.merge(graph, state)
        output = model(tokens, tokens >= 0, ids, parallel=parallel(), packing=packing)
        return token_log_probs(model, output.hidden, tokens, parallel=parallel(), packing=packing).sum()

    program = jax.make_jaxpr(jax.grad(loss, allow_int=True))(state, tokens, ids, packing)
    shapes = array_shapes(program.jaxpr)
    assert not [shape for shape in shapes if sum(size >= length for size in shape) > 1]
    assert any(shape[-2:] == (BLOCK, BLOCK) for shape in shapes)
