"""Write the fixtures in tests/golden/hf: tiny random checkpoints, saved by `transformers`, with logits.

    python tests/make_hf_checkpoints.py tests/golden/hf    # with torch 2.13 (CPU), transformers 5.23, safetensors 0.8

That of GPT-OSS is from transformers 5.24, whose rotary positions are YaRN's and whose experts reach the clamp of 7.
Weights are larger than at birth, and norms and biases not trivial, so that every one of them shows in the logits.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
SPARSE = {"num_experts": 16, "moe_intermediate_size": 8, "intermediate_size": 24}
DENSE = {"mlp_only_layers": [0], "attention_bias": True, "tie_word_embeddings": True}
GLM = {
    "n_routed_experts": 16,
    "moe_intermediate_size": 8,
    "intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "n_group": 2,
    "topk_group": 1,
}
OLMOE = {"num_experts": 16, "intermediate_size": 8, "num_key_value_heads": 4, "head_dim": 4}
GPT_OSS = {"num_local_experts": 16, "intermediate_size": 12, "sliding_window": 4}
CHECKPOINTS = {
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **SPARSE, "norm_topk_prob": True, "rope_theta": 1e6}, {}),
    "qwen3_moe_dense": ("Qwen3Moe", {**SIZES, **SPARSE, **DENSE}, {}),
    "qwen3_moe_fused": (
        "Qwen3Moe",
        {**SIZES, **SPARSE, "norm_topk_prob": True},
        {"save_original_format": False},
    ),
    "qwen3_moe_bfloat16": (
        "Qwen3Moe",
        {**SIZES, **SPARSE, "norm_topk_prob": True},
        {"max_shard_size": 12_000},
    ),
    "glm4_moe": ("Glm4Moe", {**SIZES, **GLM}, {"max_shard_size": 30_000}),
    "olmoe": ("Olmoe", {**SIZES, **OLMOE, "eos_token_id": None, "pad_token_id": None}, {}),
    "gpt_oss": ("GptOss", {**SIZES, **GPT_OSS}, {}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 16, "intermediate_size": 8}, {}),
}


def make(folder: Path, name: str) -> None:
    """Write one checkpoint and ``logits.npz``, which has tokens and their float32 logits."""
    kind, fields, options = CHECKPOINTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(torch.float32)
    with torch.no_grad():
        for parameter_name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in parameter_name:
                continue
            if "norm" in parameter_name:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif parameter_name.endswith("sinks"):
                value.copy_(torch.randn_like(value))
            elif parameter_name.endswith("gate_up_proj_bias"):  # wide enough to be clamped at 7
                value.copy_(6 * torch.randn_like(value))
            elif parameter_name.endswith("bias"):
                value.copy_(0.3 * torch.randn_like(value))
            else:
                value.mul_(4 if "expert" not in parameter_name else 12)
    if name.endswith("bfloat16"):
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder / name, **options)
    tokens = torch.randint(0, config.vocab_size, (8, 11))
    model = type(model).from_pretrained(folder / name, dtype=torch.float32)
    logits = model(tokens, use_cache=False).logits
    np.savez(
        folder / name / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.detach().numpy()
    )


if __name__ == "__main__":
    for each in CHECKPOINTS:
        make(Path(sys.argv[1]), each)
