"""Loading and saving of `transformers` checkpoints: equal logits and bits, and each device reads only its own experts.

tests/make_hf_checkpoints.py writes the fixtures.
"""

import dataclasses
import functools
import json
import shutil
from collections import Counter
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from support.plans import random_planner

from relibra_jax import RoutingReplay, Topology
from relibra_jax.models import load_pretrained, pretrained_tensors, save_pretrained
from relibra_jax.models.load_checks import rank_bytes
from relibra_jax.models.tensor_files import TensorFiles
from relibra_jax.nnx import Balancer, ExpertParallel, expert_mesh, get_homes, reorder_experts

FOLDER = Path(__file__).parent / "golden" / "hf"
CHECKPOINTS = [
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen3_moe",
    "qwen3_moe_bfloat16",
    "qwen3_moe_dense",
    "qwen3_moe_fused",
]
LAYERS = {"glm4_moe": 2, "qwen3_moe_dense": 2}
"""The number of layers with experts, for checkpoints that do not have 3."""
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)


@functools.cache
def mesh():
    return expert_mesh(TOPOLOGY)


def some_homes(name, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(16) for _ in range(LAYERS.get(name, 3))]).astype(np.int32)


def read_all(folder):
    files = TensorFiles(folder)
    return {name: files.read(name) for name in files.shapes()}


@functools.cache
def separate(name):
    """Return the tensors of a fixture, with a separate tensor for each expert, unless they are always fused."""
    tensors = read_all(FOLDER / name)
    if name == "gpt_oss":
        return tensors
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "experts.down_proj"))]:
        fused, prefix = tensors.pop(key), key.rpartition(".")[0]
        for expert, value in enumerate(fused):
            names = ["down_proj"] if key.endswith("down_proj") else ["gate_proj", "up_proj"]
            for matrix, part in zip(names, np.split(value, len(names)), strict=True):
                tensors[f"{prefix}.{expert}.{matrix}.weight"] = part
    return tensors


def assert_same_bits(tensors, expected):
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert tensors[key].dtype == value.dtype, key
        assert tensors[key].tobytes() == np.ascontiguousarray(value).tobytes(), key


def marks_of(name):
    """Return the marks of a checkpoint whose logits are computed: every one takes some seconds to compile."""
    return {"qwen3_moe": pytest.mark.slow}.get(name, pytest.mark.long)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CHECKPOINTS])
def test_load_pretrained_gives_logits_of_transformers_live_and_replayed(name):
    with np.load(FOLDER / name / "logits.npz") as reference:
        tokens, logits = reference["tokens"], reference["logits"]
    mask = np.ones(tokens.shape, bool)
    model = load_pretrained(FOLDER / name, mesh(), TOPOLOGY)
    balancer = Balancer(
        random_planner(),
        ExpertParallel(mesh=mesh(), topology=TOPOLOGY),
        num_layers=LAYERS.get(name, 3),
        num_micro_batches=1,
        key=jax.random.key(0),
        cost="balance",
    )
    live = nnx.jit(lambda model: model(tokens, mask, parallel=balancer.live))(model)
    np.testing.assert_allclose(model.logits(live.hidden), logits, atol=1e-5)

    batch = balancer.prepare(model, None, RoutingReplay(np.asarray(live.expert_ids), mask))
    assert (get_homes(model) != np.arange(16)).any()
    assert (batch.batch_plan.plan.slot_expert[..., TOPOLOGY.held_slots :] >= 0).any(), "no replicas"
    sequences = batch.to_ranks((tokens, mask, live.expert_ids, logits))

    @nnx.jit
    def replay(model, batch, sequences):
        tokens, mask, expert_ids, _ = jax.tree.map(lambda leaf: leaf[0], sequences)
        output = model(tokens, mask, expert_ids, batch.micro_batch(0), parallel=batch.parallel)
        return model.logits(output.hidden)

    np.testing.assert_allclose(replay(model, batch, sequences), sequences[3][0], atol=1e-5)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_save_pretrained_preserves_all_bits_after_a_load_and_reorder(name, tmp_path):
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    model = load_pretrained(FOLDER / name, mesh(), TOPOLOGY, home=some_homes(name), param_dtype=dtype)
    reorder_experts(model, None, some_homes(name, 1), mesh=mesh(), topology=TOPOLOGY)
    save_pretrained(model, tmp_path / "saved", source=FOLDER / name)
    assert_same_bits(read_all(tmp_path / "saved"), separate(name))
    # A checkpoint with a generated config.json and in shards restores the same model.
    save_pretrained(model, tmp_path / "again", shard_bytes=20_000)
    assert len(list((tmp_path / "again").glob("model-*-of-*.safetensors"))) > 2
    again = load_pretrained(tmp_path / "again", mesh(), TOPOLOGY, home=some_homes(name, 1), param_dtype=dtype)
    assert again.config == model.config
    for leaf, other in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, again)), strict=True):
        assert leaf.sharding == other.sharding
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


def test_pretrained_tensors_come_one_by_one_in_logical_order():
    model = load_pretrained(FOLDER / "qwen3_moe", mesh(), TOPOLOGY, home=some_homes("qwen3_moe"))
    expected, tensors = separate("qwen3_moe"), {}
    for name, value in pretrained_tensors(model, dtype="bfloat16"):
        assert len(value.sharding.device_set) == 1
        assert value.shape == expected[name].shape
        tensors[name] = np.asarray(value)
    assert_same_bits(tensors, {name: value.astype(ml_dtypes.bfloat16) for name, value in expected.items()})


def test_pretrained_tensors_keep_correction_biases_in_float32():
    model = load_pretrained(FOLDER / "glm4_moe", mesh(), TOPOLOGY, param_dtype="bfloat16")
    dtypes = {name: value.dtype for name, value in pretrained_tensors(model, dtype="float16")}
    biases = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]
    assert [dtypes.pop(name).name for name in biases] == ["float32", "float32"]
    assert {dtype.name for dtype in dtypes.values()} == {"float16"}


def test_pretrained_tensors_keep_the_sign_of_a_negative_zero(tmp_path):
    tensors = read_all(FOLDER / "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
    tensors[name] = np.full_like(tensors[name], -0.0)
    shutil.copy(FOLDER / "mixtral" / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_pretrained(tmp_path, mesh(), TOPOLOGY, home=some_homes("mixtral"))
    assert np.signbit(dict(pretrained_tensors(model))[name]).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_fused", "glm4_moe"])
def test_load_pretrained_reads_only_the_own_experts_of_each_device(name, monkeypatch):
    reads, read = Counter(), TensorFiles.read

    def count(files, tensor, rows=()):
        value = read(files, tensor, rows)
        if ".experts." in tensor:
            assert value.size == 8 * 16, "more than one matrix of one expert"
            reads[tensor, str(rows)] += 1
        return value

    monkeypatch.setattr(TensorFiles, "read", count)
    load_pretrained(FOLDER / name, mesh(), TOPOLOGY, home=some_homes(name))
    # Every matrix is read once, for its owner. If another device read it too, it would be read twice.
    assert len(reads) == LAYERS.get(name, 3) * 16 * 3
    assert set(reads.values()) == {1}


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FOLDER / "qwen3_moe", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def with_tensors(folder, change):
    tensors = read_all(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def with_fields(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def assert_rejected(folder, match, **options):
    with pytest.raises(ValueError, match=match) as error:
        load_pretrained(folder, mesh(), TOPOLOGY, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.layers.1.mlp.experts.5.up_proj.weight", np.nan), ("lm_head.weight", np.inf)],
)
def test_load_pretrained_names_a_tensor_that_is_not_finite(folder, name, value):
    def change(tensors):
        tensors[name] = np.array(tensors[name])
        tensors[name][1, 2] = value

    with_tensors(folder, change)
    assert_rejected(folder, rf"^tensor {name}: a value is not finite in float32$")


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/tmp/model.safetensors", "a/../model.safetensors"]
)
def test_load_pretrained_reads_no_shard_outside_the_folder(folder, place):
    tensors = read_all(folder)
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_rejected(folder, rf"the shard '{place}' must be a file of this folder")


def test_load_pretrained_takes_any_name_of_a_tensor(folder):
    with_tensors(folder, lambda tensors: tensors.update({"x{y}.0.w": np.zeros(1), "x{y}.1.w": np.zeros(1)}))
    assert_rejected(folder, r"unexpected: x\{y\}\.\{0\.\.1\}\.w \(2\)")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_load_pretrained_survives_json_of_many_levels(folder, file):
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / file).write_text('{"a": ' * 100_000)
    assert_rejected(folder, file)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": {"a": 1}}},
        {"rope_parameters": {"rope_type": ["default"]}},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": float("nan")},
    ],
)
def test_load_pretrained_names_a_field_of_the_wrong_kind(folder, fields):
    with_fields(folder, **fields)
    assert_rejected(folder, next(iter(fields)))


def test_load_pretrained_names_all_tensors_that_do_not_match_in_one_error(folder):
    def change(tensors):
        for expert in range(16):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.qkv_proj.weight"] = np.zeros((64, 16), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].copy()
        tensors["model.layers.2.input_layernorm.weight"] = np.ones(17, np.float32)

    with_tensors(folder, change)
    message = assert_rejected(
        folder, "a qwen3_moe model with separate experts, but these tensors do not match"
    )
    assert "missing: model.layers.1.mlp.experts.{0..15}.up_proj.weight (16), model.norm.weight;" in message
    assert "unexpected: model.layers.0.self_attn.qkv_proj.weight;" in message
    assert "of shape [17] instead of [16]: model.layers.2.input_layernorm.weight" in message
    assert "of shape [60, 16] instead of [61, 16]: lm_head.weight" in message


def test_load_pretrained_rejects_a_mix_of_fused_and_separate_experts(folder):
    with_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.mlp.experts.gate_up_proj": np.zeros(3)})
    )
    message = assert_rejected(folder, "a qwen3_moe model with fused experts")
    assert (
        "missing: model.layers.{0..2}.mlp.experts.down_proj (3), model.layers.{1..2}.mlp.experts.gate_up_proj"
        in message
    )
    assert "unexpected: model.layers.{0..2}.mlp.experts.{0..15}.down_proj.weight (48)" in message


def test_load_pretrained_names_unsupported_fields_with_their_values(folder):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    with_fields(folder, hidden_act="gelu", rope_scaling=yarn, mlp_only_layers=[1], partial_rotary_factor=0.5)
    message = assert_rejected(folder, "config.json: qwen3_moe is supported, but not with")
    assert "hidden_act='gelu' (must be 'silu')" in message
    assert "rope_scaling={'rope_type': 'yarn', 'factor': 4.0} (must be without scaling)" in message
    assert "partial_rotary_factor=0.5 (must be 1.0)" in message
    assert "mlp_only_layers=[1] (must be the first layers" in message


@pytest.mark.parametrize(
    "field",
    [
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}},
        {"num_attention_heads": 0},
        {"num_attention_heads": "4"},
        {"hidden_size": 16.0},
        {"norm_topk_prob": "yes"},
        {"rms_norm_eps": "a"},
        {"mlp_only_layers": 5},
        {"model_type": ["qwen3_moe"]},
    ],
)
def test_load_pretrained_names_a_field_of_the_wrong_type_with_its_value(folder, field):
    with_fields(folder, **field)
    [(name, value)] = field.items()
    assert f"{name}={value!r}" in assert_rejected(folder, "config.json")


def test_load_pretrained_rejects_integer_tensors(folder):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with_tensors(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    assert f"of dtype I8 instead of F32, BF16, F16: {name}" in assert_rejected(folder, "a qwen3_moe model")


def test_load_pretrained_needs_a_tied_head_that_equals_the_embedding(tmp_path):
    shutil.copytree(FOLDER / "qwen3_moe_dense", tmp_path / "tied")

    def with_head(factor):
        def change(tensors):
            tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]

        with_tensors(tmp_path / "tied", change)

    with_head(1)
    load_pretrained(tmp_path / "tied", mesh(), TOPOLOGY)
    with_head(2)
    assert_rejected(tmp_path / "tied", "not equal although tie_word_embeddings is true: lm_head.weight and")


def test_load_pretrained_and_save_pretrained_take_float_dtypes_alone(folder, tmp_path):
    model = load_pretrained(folder, mesh(), TOPOLOGY, dtype=jax.numpy.bfloat16)
    assert model.config.dtype == "bfloat16"
    assert_rejected(
        folder, r"param_dtype='int8' must be one of float32, bfloat16, float16", param_dtype="int8"
    )
    with pytest.raises(ValueError, match=r"dtype='int32' must be one of float32, bfloat16, float16"):
        save_pretrained(model, tmp_path / "saved", dtype="int32")
    assert not (tmp_path / "saved").exists()


def test_save_pretrained_writes_files_that_all_users_can_read(folder, tmp_path):
    save_pretrained(load_pretrained(folder, mesh(), TOPOLOGY), tmp_path / "saved")
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "saved").iterdir()} == {"0o644"}


@pytest.mark.slow
def test_load_pretrained_gives_bfloat16_logits_close_to_float32():
    with np.load(FOLDER / "glm4_moe" / "logits.npz") as arrays:
        reference = dict(arrays)
    model = load_pretrained(FOLDER / "glm4_moe", mesh(), TOPOLOGY, dtype="bfloat16")
    live = ExpertParallel(mesh=mesh(), topology=dataclasses.replace(TOPOLOGY, replica_slots=0))
    mask = np.ones(reference["tokens"].shape, bool)
    hidden = nnx.jit(lambda model: model(reference["tokens"], mask, parallel=live).hidden)(model)
    logits = model.logits(hidden)
    # A token may choose another expert if two are nearly equal, so the mean error is checked and not the largest.
    assert 0 < np.abs(logits - reference["logits"]).mean() < 0.03 * np.abs(reference["logits"]).mean()


def test_load_pretrained_rejects_invalid_configs(folder, tmp_path):
    assert_rejected(tmp_path / "nowhere", "nowhere/config.json: there is no such file")
    with_fields(folder, model_type="llama")
    assert_rejected(folder, "model_type='llama' must be one of qwen3_moe, glm4_moe, olmoe, mixtral")
    with_fields(folder, model_type="qwen3_moe", num_local_experts=8)
    assert_rejected(folder, "the config has 8 experts, but the topology has 16")
    with_fields(folder, num_local_experts=16, hidden_size=None)
    assert_rejected(folder, "qwen3_moe: the field 'hidden_size' is missing")
    (folder / "config.json").write_text("{")
    assert_rejected(folder, "config.json: not valid JSON")
    (folder / "config.json").write_text("[]")
    assert_rejected(folder, "expected a JSON object, found list")


def test_load_pretrained_rejects_damaged_files_and_missing_shards(folder, tmp_path):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    assert_rejected(folder, r"model.safetensors: not a safetensors file")
    (folder / "model.safetensors").unlink()
    assert_rejected(folder, "there is neither model.safetensors nor model.safetensors.index.json")
    shutil.copytree(FOLDER / "glm4_moe", tmp_path / "sharded")
    (tmp_path / "sharded" / "model-00002-of-00004.safetensors").unlink()
    assert_rejected(tmp_path / "sharded", "1 of 4 shards are missing: model-00002-of-00004.safetensors")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": 3}}')
    assert_rejected(tmp_path / "sharded", "not an index of tensors")
    index.write_text('{"weight_map": {"a": "model-00001-of-00004.safetensors"}}')
    assert_rejected(tmp_path / "sharded", "the index names tensors that no shard has: a")
    index.write_text("{}")
    assert_rejected(tmp_path / "sharded", "not an index of tensors")


def test_load_pretrained_detects_insufficient_memory_before_reading(folder, monkeypatch):
    monkeypatch.setattr("relibra_jax.models.load_checks.memory_of_a_device", lambda mesh: 2**30)
    (folder / "model.safetensors").unlink()
    with_fields(folder, hidden_size=2048, head_dim=128, moe_intermediate_size=16384, num_hidden_layers=8)
    # 8 layers x 2 experts x 3 matrices of 2048 x 16384 in float32 are 6 GiB a rank.
    message = assert_rejected(
        folder, r"a rank's parameters take 6\.\d\d GiB \(6\.00 GiB are its parts of sharded ones"
    )
    assert "a device has only 1.00 GiB; use more ranks, a smaller param_dtype" in message


def test_load_pretrained_checks_homes():
    homes = some_homes("glm4_moe")
    assert_rejected(
        FOLDER / "qwen3_moe", "home has 2 layers, but the model has 3 layers with experts", home=homes
    )
    assert_rejected(
        FOLDER / "qwen3_moe", "home slot 0: owned by 16 experts", home=np.zeros((3, 16), np.int32)
    )


def test_load_pretrained_ignores_tensors_that_transformers_ignores(tmp_path, caplog):
    shutil.copytree(FOLDER / "glm4_moe", tmp_path / "glm")
    extra = {f"model.layers.3.{name}.weight": np.zeros(3, np.float32) for name in ("eh_proj", "enorm")}
    save_file(
        {**extra, "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)},
        tmp_path / "glm" / "extra.safetensors",
    )
    path = tmp_path / "glm" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.3.enorm.weight"] = "extra.safetensors"
    path.write_text(json.dumps(index))
    with caplog.at_level("WARNING", "relibra_jax"):
        model = load_pretrained(tmp_path / "glm", mesh(), TOPOLOGY)
    assert "model.layers.3.eh_proj.weight, model.layers.3.enorm.weight" in caplog.text
    save_pretrained(model, tmp_path / "saved", source=tmp_path / "glm")
    assert_same_bits(read_all(tmp_path / "saved"), separate("glm4_moe"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_save_pretrained_copies_tokenizer_and_config_files(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    model = load_pretrained(folder, mesh(), TOPOLOGY)
    save_pretrained(model, tmp_path / "saved", source=folder)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    with pytest.raises(ValueError, match="saved already exists"):
        save_pretrained(model, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"a checkpoint with .*tied=True.*, but the model has .*tied=False"):
        save_pretrained(model, tmp_path / "other", source=FOLDER / "qwen3_moe_dense")
    assert not (tmp_path / "other").exists()


def test_save_pretrained_makes_a_folder_only_when_it_is_complete(folder, tmp_path, monkeypatch):
    model = load_pretrained(folder, mesh(), TOPOLOGY)

    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr("relibra_jax.models.tensor_files.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    monkeypatch.undo()
    save_pretrained(model, tmp_path / "saved")
    assert_same_bits(read_all(tmp_path / "saved"), separate("qwen3_moe"))


def test_rank_bytes_equals_the_bytes_on_a_device():
    model = load_pretrained(FOLDER / "glm4_moe", mesh(), TOPOLOGY, param_dtype="bfloat16")
    state = nnx.state(model)
    own, replicated = rank_bytes(state, jax.tree.map(lambda leaf: leaf.sharding, state))
    device_bytes = [leaf.addressable_shards[3].data.nbytes for leaf in jax.tree.leaves(nnx.state(model))]
    assert own + replicated == sum(device_bytes)
    assert own == 2 * 2 * 3 * 16 * 8 * 2  # layers, home slots, matrices, D, F, bytes


@pytest.mark.parametrize("shard_dense", [False, True])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_checkpoints_load_onto_sharded_parameters(fsdp, shard_dense):
    """The tensors that a sharded model exports are those of the file, and a rank holds only parts of them."""
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=TOPOLOGY.num_experts, replica_slots=0)
    axes = {"fsdp": fsdp} if fsdp > 1 else {}
    sharded_mesh = expert_mesh(topology, devices=jax.devices()[: 4 * fsdp], **axes)
    options = {"fsdp_axis": "fsdp" if axes else None, "shard_dense": shard_dense}
    model = load_pretrained(FOLDER / "glm4_moe", sharded_mesh, topology, **options)
    desired = separate("glm4_moe")
    for name, value in pretrained_tensors(model):
        np.testing.assert_array_equal(value, desired[name], err_msg=name)
    for path, leaf in jax.tree.leaves_with_path(nnx.state(model, nnx.Param)):
        part = leaf.addressable_shards[0].data.size / leaf.size
        name = jax.tree_util.keystr(path)
        if "'experts']['experts'" in name:
            assert part == 1 / (4 * fsdp), name
        elif "bias" in name or "norm" in name or not shard_dense:
            assert part == 1, name
        else:
            assert part < 1, name
