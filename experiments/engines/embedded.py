"""The engine in the run's own process: it samples on the devices that train, with the weights that are there."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Int, Key

from experiments.engines.protocol import UNSAMPLED, Generation, Sampling, Sent
from experiments.float8.hot_ranks import HotRanks, in_float8
from experiments.rl.compute_dtype import in_dtype
from experiments.rl.generation import Watch
from experiments.rl.waves import generate_in_waves
from relibra_jax.contract.types import Array
from relibra_jax.execution import ExpertParallel
from relibra_jax.models import LanguageModel


class EmbeddedEngine:
    """The engine in the run's own process.

    Args:
        policy: a function that returns the run's policy on the devices.
        parallel: the mesh and options of live routing.
        wave_samples: the largest number of samples that are generated at the same time. None for all.
        float8: the rule for which ranks compute their experts in float8. None for no rank.
        dtype: the dtype of the computation. None for that of the policy.
    """

    def __init__(
        self,
        policy: Callable[[], LanguageModel],
        parallel: ExpertParallel,
        *,
        wave_samples: int | None,
        float8: HotRanks | None,
        dtype: str | None = None,
    ):
        self._policy, self._parallel = policy, parallel
        self._wave_samples, self._float8, self._dtype = wave_samples, float8, dtype
        self._version = 0

    def sync(self, _: LanguageModel, version: int) -> Sent:
        """Note the version. The weights are those of the run."""
        self._version = version
        return Sent()

    def generate(
        self,
        prompts: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        keys: Key[jax.Array, " B"],
        sampling: Sampling,
        *,
        responses_per_prompt: int = 1,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample a response to every prompt, in waves; see `experiments.rl.waves.generate_in_waves`."""
        policy = self._policy()
        policy = policy if self._dtype is None else in_dtype(policy, self._dtype)
        responses = generate_in_waves(
            policy if self._float8 is None else in_float8(policy, self._float8),
            prompts,
            lengths,
            keys,
            parallel=self._parallel,
            wave_samples=self._wave_samples,
            responses_per_prompt=responses_per_prompt,
            watch=watch,
            **sampling._asdict(),
        )
        version = np.where(responses.response_mask, self._version, UNSAMPLED)
        zeros = np.zeros(len(prompts), np.int32)
        return Generation(responses, version, dropped=zeros > 0, filled=zeros)

    def close(self) -> None:
        """Do nothing: the devices belong to the run."""
