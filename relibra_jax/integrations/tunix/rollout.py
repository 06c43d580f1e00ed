"""Tunix's own sampler, and the routing of everything that it generates."""

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
    """Tunix's sampler. It drops the cache in which the model recorded its routing, so this keeps that part of it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.routes: list[np.ndarray] = []
        decode: Callable[..., Any] = self._compiled_decode_fn  # type: ignore[has-type]

        def keep(params: Any, state: Any) -> Any:
            state = decode(params, state)
            self.routes.append(np.asarray(state.cache[ROUTES][:, : state.token_buffer.shape[1]]))
            return state

        self._compiled_decode_fn = keep


class RecordingRollout(vanilla_rollout.VanillaRollout):
    """Tunix's rollout with its own sampler, recorded: give this class to ``ClusterConfig(rollout_engine=...)``.

    Args:
        rollout_actor: the model, a `BalancedQwen3`.
        tokenizer: Tunix's tokenizer.
        mesh: the rollout's mesh, the model's own.
        rollout_config: Tunix's ``RolloutConfig``.

    Raises:
        ValueError: if it is another model, or the mesh is not that of its experts.
    """

    def __init__(self, *, rollout_actor: Any, tokenizer: Any, mesh: jax.sharding.Mesh, rollout_config: Any):
        if not isinstance(rollout_actor, BalancedQwen3):
            raise ValueError(
                f"RecordingRollout records a BalancedQwen3, not a {type(rollout_actor).__name__}"
            )
        self._parallel = rollout_actor.layers[0].mlp.parallel
        if mesh != self._parallel.mesh:
            raise ValueError(f"rollout on {mesh}, the model's experts are on {self._parallel.mesh}")
        config = rollout_actor.config
        cache = base_rollout.CacheConfig(
            rollout_config.kv_cache_size, config.num_layers, config.num_kv_heads, config.head_dim
        )
        self._sampler = RecordingSampler(
            rollout_actor, tokenizer, sampler.CacheConfig(**dataclasses.asdict(cache))
        )

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Tunix's ``generate``, recorded.

        Raises:
            ValueError: if the prompts do not divide over the ranks.
        """
        check_samples(len(prompts), self._parallel.topology.num_ranks, "a rollout of")
        if isinstance(
            rollout_config.seed, jax.Array
        ):  # the sampler donates it, and the next call needs it again
            rollout_config = dataclasses.replace(rollout_config, seed=jnp.copy(rollout_config.seed))
        return super().generate(prompts, rollout_config, **kwargs)

    def take_routes(self) -> Int[np.ndarray, "B T L K"]:
        """The experts of all rows that were generated since they were last taken, in order; EMPTY where none.

        Raises:
            RuntimeError: if nothing was generated.
            ValueError: if rows are of different lengths.
        """
        routes, self._sampler.routes = self._sampler.routes, []
        if not routes:
            raise RuntimeError("no routes to take: nothing was generated since they were last taken")
        return np.concatenate(routes)
