"""A training run that starts from a checkpoint uses its tokenizer, can resume, and saves one of the same format."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from experiments.examples import tiny_checkpoint
from experiments.rl.configs import Train
from experiments.rl.metrics_log import read_metrics
from experiments.rl.policy import TINY
from experiments.rl.run_folder import saved_config
from experiments.rl.tokens import BYTES
from experiments.rl.train import run_train
from experiments.rl.trainer import Trainer, find_tokenizer
from relibra_jax import Topology
from relibra_jax.models import load_pretrained, pretrained_tensors
from relibra_jax.nnx import expert_mesh

pytestmark = pytest.mark.slow

SMALLEST = {"width": 16, "layers": 3, "heads": 2, "kv_heads": 1, "head_width": 8, "expert_width": 16}
SETTINGS = {
    "warmup_steps": 1,
    "steps": 1,
    "prompts": 8,
    "responses_per_prompt": 4,
    "prompt_tokens": 80,
    "response_tokens": 12,
    "evaluation_batches": 0,
    "anneal_steps": 20,
    "micro_batches": 2,
    "epochs": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a checkpoint of GLM-4.5's architecture: dense first layer, shared expert, biases, correction bias."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_checkpoint, "POLICIES", {"tiny": dataclasses.replace(TINY, **SMALLEST)})
        return tiny_checkpoint.make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "glm4_moe")


def tensors(folder):
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
    model = load_pretrained(folder, expert_mesh(topology), topology)
    return {name: np.asarray(value) for name, value in pretrained_tensors(model)}


@pytest.mark.long
@pytest.mark.parametrize("task", ["count", "spell_backward"])
def test_run_starts_from_a_checkpoint_and_saves_one(task, folder, tmp_path):
    if task == "spell_backward":
        pytest.importorskip("reasoning_gym", reason="the extra rl is not installed")
    config = Train(model=folder, task=task, **SETTINGS)
    trainer = Trainer(config, 0)
    prompt = trainer.prompts.tokenizer.encode_prompt("hello")
    assert trainer.prompts.tokenizer.decode_text(prompt) == "user\nhello\nassistant\n"
    run_train(dataclasses.replace(config, out=tmp_path / "run"), Console(quiet=True))
    [metrics] = [
        each
        for each in read_metrics(tmp_path / "run" / "seed-0" / "metrics.jsonl")
        if each["kind"] == "learn"
    ]
    assert metrics["balance/imbalance"] < metrics["balance/imbalance_static"]
    trained = tmp_path / "run" / "seed-0" / "model-2"
    assert (trained / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    before, after = tensors(folder), tensors(trained)
    assert before.keys() == after.keys()
    fixed = {name for name in before if (before[name] == after[name]).all()}
    assert fixed == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    # A resumed run uses the same checkpoint, and has nothing left to do.
    again = saved_config(tmp_path / "run")
    assert again.model == folder
    run_train(dataclasses.replace(again, resume=tmp_path / "run"), Console(quiet=True))


def test_train_rejects_settings_that_do_not_fit_the_checkpoint(folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"policy='small' and model=.* exclude each other: .* from a checkpoint"
    ):
        Train(model=folder, policy="small")
    with pytest.raises(ValueError, match=r"nowhere: there is no such folder"):
        Train(model=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"dtype 'float16' must be one of float32, bfloat16"):
        Train(dtype="float16")


def test_find_tokenizer_returns_bytes_only_for_models_of_bytes(folder, tmp_path):
    assert find_tokenizer(Train()) is BYTES
    fields = json.loads((folder / "config.json").read_text())
    for vocabulary, name in ((BYTES.size, "bytes"), (512, "tokens")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**fields, "vocab_size": vocabulary}))
    assert find_tokenizer(Train(model=tmp_path / "bytes")) is BYTES
    with pytest.raises(ValueError, match=r"tokens: no tokenizer.json"):
        find_tokenizer(Train(model=tmp_path / "tokens"))
