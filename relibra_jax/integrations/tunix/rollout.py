"""Tunix's rollout with its own sampler, extended to record the routing of all generated sequences."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from tunix.generate import sampler
from tunix.rl.rollout import base_rollout, vanilla_rollout

from relibra_jax.integrations.tunix.model import ROUTES, BalancedQwen3
from relibra_jax.integrations.tunix.settings import check_samples


class RecordingSampler(sampler.Sampler):
    """Tunix's sampler, which also keeps the routing that the model recorded in the KV cache.

    Tunix's own sampler discards the cache after decoding.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.routes: list[np.ndarray] = []
        decode: Callable[..., Any] = self._compiled_decode_fn  # type: ignore[has-type]

        def decode_and_record(params: Any, state: Any) -> Any:
            state = decode(params, state)
            self.routes.append(np.asarray(state.cache[ROUTES][:, : state.token_buffer.shape[1]]))
            return state

        self._compiled_decode_fn = decode_and_record


class RecordingRollout(vanilla_rollout.VanillaRollout):
    """Tunix's rollout with a sampler that records the routing; set ``ClusterConfig(rollout_engine=RecordingRollout)``.

    Args:
        rollout_actor: the model, a `BalancedQwen3`.
        tokenizer: Tunix's tokenizer.
        mesh: the mesh of the rollout, which must be the model's.
        rollout_config: Tunix's ``RolloutConfig``.

    Raises:
        ValueError: if the model is not a `BalancedQwen3`, or the mesh is not that of its experts.
    """

    def __init__(self, *, rollout_actor: Any, tokenizer: Any, mesh: jax.sharding.Mesh, rollout_config: Any):
        if not isinstance(rollout_actor, BalancedQwen3):
            raise ValueError(f"rollout_actor must be a BalancedQwen3, not a {type(rollout_actor).__name__}")
        self._parallel = rollout_actor.layers[0].mlp.parallel
        if mesh != self._parallel.mesh:
            raise ValueError(f"mesh={mesh} must be the mesh of the model's experts, {self._parallel.mesh}")
        config = rollout_actor.config
        cache = base_rollout.CacheConfig(
            rollout_config.kv_cache_size, config.num_layers, config.num_kv_heads, config.head_dim
        )
        self._sampler = RecordingSampler(
            rollout_actor, tokenizer, sampler.CacheConfig(**dataclasses.asdict(cache))
        )

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Run Tunix's ``generate``, and record the routing.

        Args:
            prompts: the prompts, whose number must be a multiple of the number of ranks.
            rollout_config: Tunix's ``RolloutConfig``.
            kwargs: additional arguments of Tunix's ``generate``.

        Raises:
            ValueError: if the prompts do not divide evenly over the ranks.
        """
        check_samples(len(prompts), self._parallel.topology.num_ranks, "a rollout of")
        if isinstance(rollout_config.seed, jax.Array):
            # The sampler donates the seed, but the next call needs it again.
            rollout_config = dataclasses.replace(rollout_config, seed=jnp.copy(rollout_config.seed))
        return super().generate(prompts, rollout_config, **kwargs)

    def take_routes(self) -> Int[np.ndarray, "B T L K"]:
        """Return and clear the recorded experts of all sequences generated since the last call.

        Returns:
            The experts of the sequences in the order of generation, with EMPTY where there is no token.

        Raises:
            RuntimeError: if no sequences have been generated since the last call.
            ValueError: if the sequences have different lengths.
        """
        routes, self._sampler.routes = self._sampler.routes, []
        if not routes:
            raise RuntimeError(
                "no recorded routes: no sequences have been generated since the last call of take_routes"
            )
        return np.concatenate(routes)
