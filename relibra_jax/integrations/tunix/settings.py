"""Checks that reject Tunix settings with which updates cannot be planned, before training starts.

Tunix generates and scores prompts in portions, passes each portion to the trainer when it is ready, and steps the
optimizer after ``mini_batch_size`` prompts. A plan needs all samples of an update, so one portion must contain them.
"""

import math
from typing import Any, NamedTuple


class BatchSizes(NamedTuple):
    """Tunix's batch sizes in prompts. Each prompt has ``num_generations`` samples."""

    mini_batch_size: int
    """The number of prompts of one optimizer update."""
    train_micro_batch_size: int
    """The number of prompts of one forward and backward pass."""
    rollout_micro_batch_size: int
    """The number of prompts in one call of the rollout."""
    compute_logps_micro_batch_size: int
    """The number of prompts in one computation of log-probabilities of another policy."""

    @property
    def num_micro_batches(self) -> int:
        """M, the number of forward and backward passes of one update."""
        return self.mini_batch_size // self.train_micro_batch_size


def batch_sizes(training_config: Any, full_batch_size: int) -> BatchSizes:
    """Return the batch sizes that Tunix 0.1.7 trains with, with defaults for those that are None.

    The defaults are those of Tunix's ``RLLearner.train``.

    Args:
        training_config: Tunix's ``RLTrainingConfig``, or another object with its four sizes.
        full_batch_size: the number of prompts in one batch of the data set.
    """
    mini = training_config.mini_batch_size or full_batch_size
    train = training_config.train_micro_batch_size or mini
    rollout = training_config.rollout_micro_batch_size or train
    return BatchSizes(mini, train, rollout, training_config.compute_logps_micro_batch_size or train)


def check_sizes(
    sizes: BatchSizes, *, num_generations: int, num_ranks: int, num_micro_batches: int, scores_policies: bool
) -> None:
    """Check that every update needs one plan, and that the samples of every call divide evenly over the ranks.

    Args:
        sizes: Tunix's batch sizes.
        num_generations: the number of samples of each prompt.
        num_ranks: the number of ranks of the expert-parallel group.
        num_micro_batches: the balancer's number of micro-batches.
        scores_policies: whether Tunix computes log-probabilities of another policy (because of ``beta`` or
            ``num_iterations``).

    Raises:
        ValueError: if one update would need several plans, if the number of micro-batches differs from the balancer's,
            or if the samples of a call do not divide evenly over the ranks.

    >>> check_sizes(BatchSizes(4, 2, 2, 2), num_generations=8, num_ranks=8, num_micro_batches=2, scores_policies=False)
    Traceback (most recent call last):
    ValueError: with rollout_micro_batch_size=2 and compute_logps_micro_batch_size=2, one update of \
mini_batch_size=4 prompts would need 2 plans: set both to 4
    """
    plans = _plans(sizes)
    if plans > 1:
        raise ValueError(
            f"with rollout_micro_batch_size={sizes.rollout_micro_batch_size} and compute_logps_micro_batch_size="
            f"{sizes.compute_logps_micro_batch_size}, one update of mini_batch_size={sizes.mini_batch_size} prompts"
            f" would need {plans} plans: set both to {sizes.mini_batch_size}"
        )
    if sizes.num_micro_batches != num_micro_batches:
        raise ValueError(
            f"the balancer has num_micro_batches={num_micro_batches}, but mini_batch_size={sizes.mini_batch_size} and"
            f" train_micro_batch_size={sizes.train_micro_batch_size} give {sizes.num_micro_batches}"
        )
    names = ["train_micro_batch_size", "rollout_micro_batch_size"]
    if scores_policies:
        names.append("compute_logps_micro_batch_size")
    for name in names:
        for prompts in _calls(getattr(sizes, name), sizes.mini_batch_size):
            check_samples(prompts * num_generations, num_ranks, f"{name}={getattr(sizes, name)} of")


def check_samples(samples: int, num_ranks: int, source: str) -> None:
    """Check that a number of samples divides evenly over the ranks.

    Args:
        samples: the number of samples.
        num_ranks: the number of ranks.
        source: the origin of the samples, the start of the error message.

    Raises:
        ValueError: if the number of samples is not a multiple of the number of ranks.
    """
    if samples % num_ranks:
        raise ValueError(f"{source} {samples} samples must be a multiple of the {num_ranks} ranks")


def _plans(sizes: BatchSizes) -> int:
    """Return the number of portions that Tunix makes of one update.

    Tunix collects micro-batches until their prompts are a multiple of both sizes.
    """
    portion = math.lcm(sizes.rollout_micro_batch_size, sizes.compute_logps_micro_batch_size)
    micro_batches = -(-portion // sizes.train_micro_batch_size)
    return -(-sizes.num_micro_batches // micro_batches)


def _calls(size: int, total: int) -> set[int]:
    """Return the distinct sizes of the calls into which Tunix splits ``total`` prompts."""
    return {min(size, total), total % size or min(size, total)}
