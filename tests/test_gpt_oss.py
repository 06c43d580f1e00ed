"""GPT-OSS against loops in NumPy: its forward pass, generation, gradients of its experts' biases, and MXFP4.

`tests/test_pretrained.py` compares it with `transformers`.
"""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from support.dense import assert_close
from support.layer import run_layer
from support.plans import load_of, random_plan

from experiments.published import PUBLISHED
from relibra_jax.contract.types import EMPTY, Topology, layer_plans
from relibra_jax.execution.expert_mlp import GeneralMlp, expert_columns
from relibra_jax.execution.gating import GATINGS
from relibra_jax.models import ModelConfig, load_pretrained, make_model, save_pretrained
from relibra_jax.models.hf_config import config_fields, model_config
from relibra_jax.models.mxfp4 import decode_mxfp4
from relibra_jax.models.packed_attention import packed_attention, split_attention
from relibra_jax.models.rotary import Yarn
from relibra_jax.models.tensor_files import TensorFiles
from relibra_jax.nnx import ExpertParallel, MoELayer, expert_mesh, get_homes, set_homes

GATING = dataclasses.replace(GATINGS["gpt-oss"], top_k=2)
CONFIG = ModelConfig(
    width=8,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=8,
    num_experts=8,
    gating=GATING,
    expert_width=12,
    vocabulary=23,
    activation="clamped_swiglu",
    expert_biases=True,
    qk_norm=None,
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    windows=(3, 0, 3),
    yarn=Yarn(factor=4.0, first_context=40, fast_turns=2.0, slow_turns=0.5, whole=False),
    rope_theta=100.0,
    norm_epsilon=1e-5,
    architecture="gpt_oss",
)
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
PARALLEL = ExpertParallel(
    mesh=expert_mesh(TOPOLOGY, devices=jax.devices()[:4]), topology=TOPOLOGY, path="flat"
)
SAMPLES, LENGTH = 4, 9
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, CONFIG.vocabulary, (SAMPLES, LENGTH)).astype(np.int32)


@functools.cache
def policy():
    """Return a model whose biases, sinks and scales all show in its logits, with experts at any homes."""
    model = make_model(CONFIG, TOPOLOGY, mesh=PARALLEL.mesh, key=jax.random.key(0))
    set_homes(model, np.stack([RNG.permutation(8) for _ in range(CONFIG.layers)]).astype(np.int32))
    scales = {"bias": 0.3, "sinks": 1.0, "router_bias": 0.3, "experts": 1.5, "scale": 1.0}

    def draw(path, leaf):
        if (scale := scales.get(path[-2].key)) is None or leaf.dtype != jnp.float32:
            return leaf
        return jax.device_put(scale * RNG.normal(size=leaf.shape).astype(np.float32), leaf.sharding)

    nnx.update(model, jax.tree.map_with_path(draw, nnx.state(model, nnx.Param)))
    return model


def rotate(x, position):
    """Rotate one head of 8 elements by YaRN's rates, with a factor of 4 and a first context of 40."""
    pairs = x[:4] + 1j * x[4:]
    for i in range(4):
        turns = 40 * 100 ** (-i / 4) / (2 * math.pi)
        edges = [4 * math.log(40 / (2 * math.pi * limit)) / math.log(100) for limit in (2.0, 0.5)]
        slow = min(max((i - max(edges[0], 0)) / (edges[1] - max(edges[0], 0)), 0), 1)
        assert (slow == 1) == (turns <= 0.5)
        rate = 100 ** (-i / 4) * (slow / 4 + 1 - slow)
        pairs[i] *= np.exp(1j * position * rate) * (0.1 * math.log(4) + 1)
    return np.concatenate([pairs.real, pairs.imag])


def oracle(model, tokens):
    """Compute logits ``[T, V]`` of one sample in float64 loops, and whether a gate and an up value were clamped."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model)))
    clamped = np.zeros(2, bool)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale["scale"]

    x = params["embedding"][tokens]
    for layer, window in enumerate((3, 10**6, 3)):
        of_layer = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        attention, moe = of_layer["attention"], of_layer["experts"]
        normalised = norm(x, of_layer["attention_norm"])
        x = x + attention["out"]["bias"]
        for head in range(4):
            query, key, value = (
                normalised @ attention[name]["kernel"][:, index] + attention[name]["bias"][index]
                for name, index in (("query", head), ("key", head // 2), ("value", head // 2))
            )
            for t in range(len(tokens)):
                seen = range(max(0, t - window + 1), t + 1)
                scores = [rotate(query[t], t) @ rotate(key[s], s) / math.sqrt(8) for s in seen]
                weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(attention["sinks"][head]))
                x[t] += weights @ value[seen] @ attention["out"]["kernel"][head]
        normalised = norm(x, of_layer["experts_norm"])
        experts = moe["experts"].reshape(8, 3, 8, 14)
        for t, row in enumerate(normalised):
            scores = row @ moe["router"] + moe["router_bias"]
            best = np.argsort(-scores)[:2]
            for expert in best:
                gate, up, down = experts[int(moe["home"][expert])]
                gate_value = row @ gate[:, :12] + gate[:, 12:].ravel()[:12]
                up_value = row @ up[:, :12] + up[:, 12:].ravel()[:12]
                clamped |= [(gate_value > 7).any(), (np.abs(up_value) > 7).any()]
                gate_value, up_value = np.minimum(gate_value, 7), np.clip(up_value, -7, 7)
                hidden = gate_value / (1 + np.exp(-1.702 * gate_value)) * (up_value + 1)
                share = np.exp(scores[expert]) / np.exp(scores[best]).sum()
                x[t] += share * (down[:, :12] @ hidden + down[:, 12:].ravel()[:8])
    return norm(x, params["norm"]) @ params["head"], clamped


@functools.cache
def expected():
    logits, clamped = zip(*(oracle(policy(), tokens) for tokens in TOKENS), strict=True)
    assert np.any(clamped, axis=0).all()
    return np.stack(logits)


def test_whole_sequences_equal_loops():
    run = nnx.jit(
        lambda model: model.logits(model(TOKENS, np.ones_like(TOKENS, bool), parallel=PARALLEL).hidden)
    )
    np.testing.assert_allclose(run(policy()), expected(), atol=1e-4 * np.abs(expected()).max())


def test_generation_from_a_cache_equals_whole_sequences():
    """Samples get up to 3 tokens at a time, so that columns have gaps."""

    @nnx.jit
    def extend(model, tokens, mask, cache):
        output, cache = model.extend(tokens, mask, cache, parallel=PARALLEL)
        return model.logits(output.hidden), cache

    done, cache = np.zeros(SAMPLES, int), policy().empty_cache(SAMPLES, 21, PARALLEL)
    logits = np.zeros_like(expected())
    for counts in ([3, 2, 1, 0], [3, 3, 3, 3], [1, 2, 3, 3], [2, 2, 2, 3]):
        at = np.minimum(done[:, None] + np.arange(3), LENGTH - 1)
        mask = np.arange(3) < np.array(counts)[:, None]
        new, cache = extend(policy(), np.take_along_axis(TOKENS, at, 1), mask, cache)
        for sample, token in np.argwhere(mask):
            logits[sample, done[sample] + token] = new[sample, token]
        done += counts
    assert done.tolist() == [LENGTH] * SAMPLES
    np.testing.assert_allclose(logits, expected(), atol=1e-4 * np.abs(expected()).max())


def test_sinks_and_windows_in_packed_and_split_sequences_equal_single_samples(monkeypatch):
    """The samples of a node, of 11, 8 and 3 tokens, follow one another in a stream; its two ranks have chunks of it."""
    monkeypatch.setattr("relibra_jax.routing.node_streams.CHUNK", 4)
    lengths, length, heads, window = (11, 8, 3), 12, 4, jnp.int32(5)
    segments = np.append(np.repeat([2, 0, 1], lengths), [EMPTY, EMPTY]).astype(np.int32)
    streams = [RNG.normal(size=(24, count, 8)).astype(np.float32) for count in (heads, 2, 2, heads)]
    sinks = RNG.normal(size=heads).astype(np.float32)
    tokens, whole = PARALLEL.token_spec, PartitionSpec()
    specs = (*(tokens,) * 4, whole, whole)
    split = jax.shard_map(split_attention, mesh=PARALLEL.mesh, in_specs=specs, out_specs=tokens)

    def cut(stream):
        chunks = np.stack([stream] * 2).reshape(2, 3, 2, 4, *stream.shape[1:])
        return chunks.swapaxes(1, 2).reshape(4, length, *stream.shape[1:])

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, *arrays):
        *arrays, segments, cotangent = arrays
        output, pull = jax.vjp(
            lambda query, key, value, sinks: attend(query, key, value, segments, sinks, window),
            *arrays,
            sinks,
        )
        return output, *pull(cotangent)

    query, key, value, cotangent = streams
    ends = np.cumsum(lengths)
    singles = [
        run(
            packed_attention,
            *(array[None, end - count : end] for array in (query, key, value)),
            None,
            cotangent[None, end - count : end],
        )
        for end, count in zip(ends, lengths, strict=True)
    ]
    joined = [np.concatenate([single[part][0] for single in singles]) for part in range(4)]
    of_sinks = sum(single[4] for single in singles)
    cotangent[ends[-1] :] = 0
    packed = run(packed_attention, *(array[None] for array in (query, key, value, segments, cotangent)))
    in_chunks = run(split, *map(cut, (query, key, value, segments, cotangent)))
    for part, other in enumerate(joined):
        np.testing.assert_allclose(packed[part][0, : ends[-1]], other, atol=1e-5)
        both = np.pad(np.asarray(packed[part][0]), [(0, 0)] * 3)
        np.testing.assert_allclose(in_chunks[part], cut(both), atol=1e-5)
    np.testing.assert_allclose(packed[4], of_sinks, atol=1e-5)
    np.testing.assert_allclose(in_chunks[4], 2 * of_sinks, atol=2e-5)


@pytest.mark.parametrize("path", ["flat", pytest.param("hierarchical", marks=pytest.mark.long)])
def test_biases_of_replicas_and_residents_have_the_gradients_of_one_device(path):
    """Biases are in the last two columns of ``[3, 8, 14]``."""
    topology = dataclasses.replace(TOPOLOGY, replica_slots=1, resident_slots=1)
    parallel = dataclasses.replace(PARALLEL, topology=topology, path=path)
    ids = RNG.permuted(np.tile(np.arange(8) ** 2 // 8, (16, 5, 1)), axis=-1)[..., :2]
    ids[..., 1] = np.where(ids[..., 1] == ids[..., 0], 7, ids[..., 1])
    load = load_of(ids.reshape(4, -1, 2), topology)[None, None]
    plan = layer_plans(random_plan(np.random.default_rng(1), load, topology, fill=1), load).layer(0).layer(0)
    assert (np.asarray(plan.quota)[..., 2:] > 0).any((0, 1)).all(), "copies of both kinds compute tokens"
    x, gates, cotangent = (RNG.normal(size=(16, 5, size)).astype(np.float32) for size in (8, 2, 8))
    experts = RNG.normal(size=(8, 3, 8, expert_columns(8, 12, biases=True))).astype(np.float32)
    mlp = GeneralMlp(activation="clamped_swiglu", expert_width=12, biases=True)

    def placed(experts, gates, x):
        at_home = experts[jnp.argsort(plan.home)].reshape(2, 2, 2, *experts.shape[1:])
        return run_layer(x, ids, gates, at_home, plan, parallel, expert_mlp=mlp)

    def dense(experts, gates, x):
        gate, up, down = jnp.moveaxis(experts[ids], -3, 0)
        gate, up = (
            jnp.einsum("btd,btkdf->btkf", x, part[..., :12]) + part[..., 12:].reshape(16, 5, 2, -1)[..., :12]
            for part in (gate, up)
        )
        hidden = (
            jnp.minimum(gate, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(gate, 7)) * (jnp.clip(up, -7, 7) + 1)
        )
        out = jnp.einsum("btkf,btkdf->btkd", hidden, down[..., :12])
        return ((out + down[..., 12:].reshape(16, 5, 2, -1)[..., :8]) * gates[..., None]).sum(-2)

    def with_gradients(layer, *operands):
        output, pull = jax.vjp(layer, *operands)
        return output, pull(cotangent)

    actual, one_device = (
        jax.jit(functools.partial(with_gradients, layer))(experts, gates, x) for layer in (placed, dense)
    )
    assert_close(actual, one_device, tolerance=1e-5)
    of_biases = np.asarray(actual[1][0])[..., 12:]
    assert np.abs(of_biases).max() > 0.1
    assert not of_biases.reshape(8, 3, -1)[:, :2, 12:].any(), "what fills the columns has no gradient"
    assert not of_biases.reshape(8, 3, -1)[:, 2, 8:].any()


def test_mxfp4_equals_a_loop():
    codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    blocks = RNG.integers(0, 256, (2, 5, 16)).astype(np.uint8)
    blocks[0, 0] = np.arange(16) * 17
    scales = np.array([[0, 1, 127, 128, 253], [254, 255, 2, 100, 60]], np.uint8)
    values = np.zeros((2, 5, 32))
    for row, block, byte in np.ndindex(2, 5, 16):
        for half in (0, 1):
            code = int(blocks[row, block, byte]) >> 4 * half & 15
            factor = math.nan if scales[row, block] == 255 else 2.0 ** (int(scales[row, block]) - 127)
            values[row, block, 2 * byte + half] = math.copysign(codes[code % 8], 7.5 - code) * factor
    with np.errstate(over="ignore"):
        desired = values.reshape(2, -1).astype(np.float32)
    actual = decode_mxfp4(blocks, scales)
    np.testing.assert_array_equal(actual, desired)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(desired))


SMALL = dataclasses.replace(CONFIG, width=32, expert_width=64, num_experts=4, layers=2, windows=(3, 0))
ONE = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)


@pytest.fixture
def checkpoints(tmp_path):
    """Write a checkpoint with experts in bfloat16, and the same one in MXFP4."""
    mesh = expert_mesh(ONE, devices=jax.devices()[:2])
    model = make_model(SMALL, ONE, mesh=mesh, key=jax.random.key(1))
    save_pretrained(model, tmp_path / "plain", dtype="bfloat16")
    files = TensorFiles(tmp_path / "plain")
    tensors = {name: np.array(files.read(name)) for name in files.shapes()}
    encoded = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors[name].shape
        blocks = RNG.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = RNG.integers(118, 124, blocks.shape[:-1]).astype(np.uint8)
        tensors[name] = decode_mxfp4(blocks, scales).swapaxes(1, 2).astype(ml_dtypes.bfloat16).copy()
        del encoded[name]
        encoded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "mxfp4").mkdir()
    fields = json.loads((tmp_path / "plain" / "config.json").read_text())
    del fields["torch_dtype"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(fields))
    save_file(encoded, tmp_path / "mxfp4" / "model.safetensors")
    return mesh, tmp_path, tensors, encoded


def test_mxfp4_checkpoints_load_as_plain_ones_and_are_saved_as_bfloat16(checkpoints):
    mesh, folder, tensors, _ = checkpoints
    home = np.array([[2, 0, 3, 1], [1, 3, 0, 2]], np.int32)
    plain, decoded = (
        load_pretrained(folder / name, mesh, ONE, home=home, param_dtype="bfloat16")
        for name in ("plain", "mxfp4")
    )
    assert decoded.config == dataclasses.replace(SMALL, param_dtype="bfloat16")
    for one, other in zip(*(jax.tree.leaves(nnx.state(model)) for model in (plain, decoded)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    np.testing.assert_array_equal(get_homes(decoded), home)
    save_pretrained(decoded, folder / "saved", source=folder / "mxfp4")
    fields = json.loads((folder / "saved" / "config.json").read_text())
    assert "quantization_config" not in fields
    assert fields["torch_dtype"] == "bfloat16"
    files = TensorFiles(folder / "saved")
    assert files.shapes().keys() == tensors.keys()
    for name, value in tensors.items():
        assert files.read(name).dtype == value.dtype
        np.testing.assert_array_equal(files.read(name).view(np.uint16), value.view(np.uint16), err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: scales[:, 1:], r"down_proj_scales does not have one scale for 32 numbers"),
        (lambda scales: scales.astype(np.int8), r"down_proj_scales is of dtype I8 instead of U8"),
        (lambda scales: np.full_like(scales, 255), r"down_proj: a value is not finite in float32"),
        (lambda scales: np.full_like(scales, 254), r"down_proj: a value is not finite in float32"),
    ],
)
def test_scales_that_do_not_fit_are_rejected(checkpoints, change, message):
    mesh, folder, _, encoded = checkpoints
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**encoded, name: change(encoded[name]).copy()}, folder / "mxfp4" / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder / "mxfp4", mesh, ONE)
    assert "\n" not in str(error.value)


FIELDS = {**PUBLISHED["GPT-OSS-20B"], "quantization_config": {"quant_method": "mxfp4"}}


def test_defaults_of_a_config_are_those_of_the_published_models():
    config = model_config(FIELDS)
    assert config.windows == (128, 0) * 12
    assert config.yarn == Yarn(factor=32.0, first_context=4096, whole=False)
    assert config.head_width == 64
    assert config.rope_theta == 150_000
    assert model_config(config_fields(config)) == config
    plain = dataclasses.replace(config, windows=(), yarn=None)
    assert model_config(config_fields(plain)) == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": ["full_attention"]},
            r"layer_types=\['full_attention'\] must name sliding_attention or",
        ),
        ({"layer_types": 5}, r"layer_types=5 must name"),
        ({"swiglu_limit": 10.0}, r"swiglu_limit=10.0 \(must be 7.0\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=.*fp8.*\(must be mxfp4\)"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 1.0}}, r"without scaling or by YaRN"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            r"'original_max_position_embeddings' is missing",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, r"without scaling or by YaRN"),
    ],
)
def test_unsupported_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        model_config({**FIELDS, **fields})


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"windows=\(3,\) must have one number for each of 3 layers"):
        dataclasses.replace(CONFIG, windows=(3,))
    with pytest.raises(ValueError, match="activation='gelu' must be one of swiglu, clamped_swiglu"):
        MoELayer(TOPOLOGY, 8, 12, GATING, activation="gelu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="architecture qwen3_moe cannot represent"):
        config_fields(dataclasses.replace(CONFIG, architecture="qwen3_moe"))
