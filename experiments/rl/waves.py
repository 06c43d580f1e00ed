"""Generation in waves: a bounded number of samples at a time, so that the cache of keys and values fits the devices.

Waves run one after the other, with the same compiled programs. A wave ends when all of its samples have ended. Its
responses are then copied to the host, and the next wave uses the memory of its cache. Every sample has its own random
key, so the size of waves changes responses only by rounding.

Samples of the next wave do not take the places of samples that have ended: that is the work of a rollout engine.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Key

from experiments.rl.counts import count_on_ranks, join_counts
from experiments.rl.generation import Responses, Watch, generate
from experiments.rl.responses import choose_samples, join_responses, to_hosts
from relibra_jax import Batch
from relibra_jax.contract.types import Array
from relibra_jax.execution.parallel import ExpertParallel, check_tokens
from relibra_jax.models import LanguageModel


def generate_in_waves(
    policy: LanguageModel,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    keys: Key[jax.Array, " B"],
    *,
    parallel: ExpertParallel,
    wave_samples: int | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Responses:
    """Sample a response to every prompt, for at most ``wave_samples`` samples at a time.

    Args:
        policy: the policy, on the mesh of ``parallel``.
        prompts: the prompts, as for `experiments.rl.generation.generate`.
        lengths: the number of tokens in each prompt.
        keys: a typed random key for each sample.
        parallel: the mesh and options of live routing.
        wave_samples: the number of samples in a wave, a multiple of the number of ranks. None makes one wave.
        watch: a callback to call during decoding, and between two waves. It sees all samples of the batch.
        options: the other options of `experiments.rl.generation.generate`.

    Returns:
        The responses in the order of the prompts, on the hosts (`experiments.rl.responses`).

    Raises:
        ValueError: before anything is compiled, if a wave does not divide evenly over the ranks, or under the
            conditions of `experiments.rl.generation.generate`.
    """
    check_tokens("prompts", prompts, parallel)
    samples = len(prompts)
    if wave_samples is None or wave_samples >= samples:
        responses = generate(policy, prompts, lengths, keys, parallel=parallel, watch=watch, **options)
        return to_hosts(responses, parallel.mesh)
    check_wave(wave_samples, parallel.num_ranks)
    batch = _Batch(samples, watch, parallel)
    for first in range(0, samples, wave_samples):
        # The last wave is filled up with sequences without a sample, so that all waves have the same shapes.
        rows = np.arange(first, first + wave_samples)
        sample = np.minimum(rows, samples - 1)
        wave = (
            np.asarray(prompts)[sample],
            np.where(rows < samples, np.asarray(lengths)[sample], 0),
            keys[sample],
        )
        batch.add(generate(policy, *wave, parallel=parallel, watch=batch.wave_watch, **options))
    return batch.responses


def check_wave(wave_samples: int, ranks: int) -> None:
    """Raise ValueError, with the nearest values that do, unless a wave divides evenly over the ranks."""
    below = wave_samples // ranks * ranks
    if wave_samples != below or not below:
        nearest = f"{below} and {below + ranks}" if below else f"{ranks}"
        raise ValueError(
            f"wave_samples={wave_samples} must divide evenly over {ranks} ranks; nearest: {nearest}"
        )


class _Batch:
    """The waves of a batch that have finished, and the watch over the whole batch.

    Args:
        samples: B, the number of samples in the batch.
        watch: the watch over the batch. None for no watch.
        parallel: the mesh over whose ranks samples are sharded.
    """

    def __init__(self, samples: int, watch: Watch | None, parallel: ExpertParallel):
        self._samples, self._watch, self._parallel = samples, watch, parallel
        self._waves: list[Responses] = []
        self._counts: list[Batch] = []

    @property
    def wave_watch(self) -> Watch | None:
        """The watch over the next wave. None if the watch over the batch has asked for no more calls."""
        return None if self._watch is None else Watch(self._watch.every, self._look)

    @property
    def responses(self) -> Responses:
        """The responses of all finished waves, on the hosts."""
        return choose_samples(join_responses(self._waves), np.arange(self._samples))

    def add(self, wave: Responses) -> None:
        """Copy a finished wave to the hosts, and call the watch unless it was the last one."""
        self._waves.append(to_hosts(wave, self._parallel.mesh))
        if self._watch is not None and sum(len(wave.ended) for wave in self._waves) < self._samples:
            # Responses of finished waves are complete, also those that no end token has ended.
            complete = np.asarray(self._waves[-1].mask).any(1)
            self._counts.append(count_on_ranks(wave.replay, complete, self._parallel))
            self._look(np.zeros(0, bool), None)

    def _look(self, ended: Bool[np.ndarray, " b"], counts: Callable[[], Batch] | None) -> bool:
        """Call the watch over the batch.

        Args:
            ended: True for samples of the running wave that have ended.
            counts: the counts of the running wave. None between two waves.
        """
        assert self._watch is not None
        flags = np.zeros(self._samples, bool)
        so_far = np.concatenate([*(wave.mask.any(1) for wave in self._waves), ended])[: self._samples]
        flags[: len(so_far)] = so_far

        def count() -> Batch:
            return join_counts([*self._counts, *([] if counts is None else [counts()])], self._samples)

        again = self._watch.look(flags, count)
        if not again:
            self._watch = None
        return again
