"""A tiny random checkpoint with a tokenizer and a chat template, to try a training run on:

    python -m experiments.examples.tiny_checkpoint out/tiny
    python -m experiments.run learn --model out/tiny --task chain_sum --prompt-tokens 96 --response-tokens 8

A real checkpoint has the same files, and ``--model`` takes it in the same way.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tyro.conf import Positional

from experiments.rl.policy import POLICIES
from relibra_jax import Topology
from relibra_jax.models import make_model, save_pretrained
from relibra_jax.models.hf_architectures import ARCHITECTURES
from relibra_jax.models.hf_config import config_fields, model_config
from relibra_jax.nnx import expert_mesh
from relibra_jax.support.bad_input import exit_status

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = [
    f"State the final answer to {a} + {b} - {a} = in words or letters" for a in range(100) for b in range(10)
]


def make_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer of 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def make_checkpoint(
    folder: Positional[Path],
    architecture: str = "qwen3_moe",
    seed: int = 0,
    head_width: int = 16,
    policy: str = "tiny",
) -> Path:
    """Write a tiny checkpoint with random weights, a tokenizer and a chat template.

    Args:
        folder: the folder to create.
        architecture: the architecture of the model: qwen3_moe, glm4_moe, olmoe, mixtral or gpt_oss.
        seed: the seed of the weights.
        head_width: the width of a head. Some engines have attention for widths of 64 or 128 alone.
        policy: the policy that has the other sizes, as ``--policy`` of a run names it.

    Returns:
        The folder.

    Raises:
        ValueError: if the folder exists already, or the architecture or policy is unknown.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} must be one of {', '.join(ARCHITECTURES)}")
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} must be one of {', '.join(POLICIES)}")
    tokenizer = make_tokenizer()
    sizes = dataclasses.replace(
        POLICIES[policy], vocabulary=tokenizer.get_vocab_size(), head_width=head_width
    )
    fields = {**config_fields(sizes), "model_type": architecture}
    if architecture == "glm4_moe":
        fields |= {"n_routed_experts": sizes.num_experts, "intermediate_size": 96, "attention_bias": True}
    elif architecture in ("mixtral", "gpt_oss"):
        fields |= {"num_local_experts": sizes.num_experts, "attention_bias": architecture == "gpt_oss"}
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=sizes.num_experts, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:1])
    model = make_model(model_config(fields), topology, mesh=mesh, key=jax.random.key(seed))
    save_pretrained(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


if __name__ == "__main__":
    make = functools.partial(tyro.cli, make_checkpoint, prog="python -m experiments.examples.tiny_checkpoint")
    sys.exit(exit_status(lambda: print(make())))
