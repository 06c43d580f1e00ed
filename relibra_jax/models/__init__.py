"""Mixture-of-experts language models in Flax, and their checkpoints in Hugging Face's format.

    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=128, replica_slots=2)
    model = load_pretrained("Qwen3-30B-A3B", mesh, topology)
    ...  # train; the balancer may move experts to other homes
    save_pretrained(model, "trained")  # writes Hugging Face's names in logical expert order

The supported architectures are Qwen3-MoE, GLM-4.5, OLMoE, Mixtral and GPT-OSS (`relibra_jax.models.hf_config`).
"""

from relibra_jax.models.cache import Cache
from relibra_jax.models.config import ModelConfig
from relibra_jax.models.export import pretrained_tensors
from relibra_jax.models.language_model import LanguageModel, ModelOutput, make_model
from relibra_jax.models.load import load_pretrained
from relibra_jax.models.log_probs import token_log_probs, token_log_probs_and_entropies
from relibra_jax.models.rotary import Yarn
from relibra_jax.models.save import save_pretrained

__all__ = [
    "Cache",
    "LanguageModel",
    "ModelConfig",
    "ModelOutput",
    "Yarn",
    "load_pretrained",
    "make_model",
    "pretrained_tensors",
    "save_pretrained",
    "token_log_probs",
    "token_log_probs_and_entropies",
]
