"""The policy in another dtype of the computation, such as that of an engine that samples in lower precision.

Engines often compute in lower precision than training. The log-probabilities under which they sample, and the experts
that they choose, then differ a little from those of the trained policy. A run on its own devices can do the same.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from relibra_jax.models import LanguageModel, ModelConfig


def in_dtype(model: LanguageModel, dtype: str) -> LanguageModel:
    """Make a model of the same parameters that computes in another dtype.

    The model has the arrays that ``model`` has now: make another one after an update. What `ModelConfig.dtype` keeps in
    float32, such as router logits, stays in float32.

    Args:
        model: the model.
        dtype: the dtype of the computation, such as bfloat16. Parameters are cast to it where they are used.
    """
    model = nnx.merge(*nnx.split(model))
    modules: list[Any] = [module for _, module in nnx.iter_modules(model)]
    for module in modules:
        if hasattr(module, "dtype"):
            module.dtype = jnp.dtype(dtype)
        if isinstance(config := getattr(module, "config", None), ModelConfig):
            module.config = dataclasses.replace(config, dtype=dtype)
    return model
