"""Settings of Tunix under which a batch cannot be planned, refused before anything runs.

Tunix generates and scores prompts in portions of its own, hands each portion to the trainer as it is ready, and steps
the optimizer after ``mini_batch_size`` prompts. A plan needs all samples of an update, so a portion has to hold them.
"""

import math
from typing import Any, NamedTuple


class BatchSizes(NamedTuple):
    """Tunix's batch sizes, in prompts: each stands for ``num_generations`` samples."""

    mini_batch_size: int
    """Prompts of one optimizer update."""
    train_micro_batch_size: int
    """Prompts of one forward and backward pass."""
    rollout_micro_batch_size: int
    """Prompts that are generated at once."""
    compute_logps_micro_batch_size: int
    """Prompts whose log-probabilities of another policy are computed at once."""

    @property
    def num_micro_batches(self) -> int:
        """M, forward and backward passes of one update."""
        return self.mini_batch_size // self.train_micro_batch_size


def batch_sizes(training_config: Any, full_batch_size: int) -> BatchSizes:
    """The sizes that Tunix 0.1.7 trains with: ``RLLearner.train`` fills in those that are None.

    Args:
        training_config: Tunix's ``RLTrainingConfig``, or anything with its four sizes.
        full_batch_size: the prompts of one element of the data set.
    """
    mini = training_config.mini_batch_size or full_batch_size
    train = training_config.train_micro_batch_size or mini
    rollout = training_config.rollout_micro_batch_size or train
    return BatchSizes(mini, train, rollout, training_config.compute_logps_micro_batch_size or train)


def check_sizes(
    sizes: BatchSizes, *, num_generations: int, num_ranks: int, num_micro_batches: int, scores_policies: bool
) -> None:
    """Raise unless every update is planned once, and all that runs divides over the ranks.

    Args:
        sizes: Tunix's sizes.
        num_generations: samples of each prompt.
        num_ranks: ranks of the expert-parallel group.
        num_micro_batches: what the balancer was made with.
        scores_policies: whether log-probabilities of another policy are computed (``beta`` or ``num_iterations``).

    Raises:
        ValueError: if not, in one line with the settings and their numbers.

    >>> check_sizes(BatchSizes(4, 2, 2, 2), num_generations=8, num_ranks=8, num_micro_batches=2, scores_policies=False)
    Traceback (most recent call last):
    ValueError: rollout_micro_batch_size=2 and compute_logps_micro_batch_size=2 make 2 plans before one update of \
mini_batch_size=4 prompts: set both to 4
    """
    plans = _plans(sizes)
    if plans > 1:
        raise ValueError(
            f"rollout_micro_batch_size={sizes.rollout_micro_batch_size} and compute_logps_micro_batch_size="
            f"{sizes.compute_logps_micro_batch_size} make {plans} plans before one update of"
            f" mini_batch_size={sizes.mini_batch_size} prompts: set both to {sizes.mini_batch_size}"
        )
    if sizes.num_micro_batches != num_micro_batches:
        raise ValueError(
            f"the balancer has num_micro_batches={num_micro_batches}, mini_batch_size={sizes.mini_batch_size} and"
            f" train_micro_batch_size={sizes.train_micro_batch_size} make {sizes.num_micro_batches}"
        )
    names = ["train_micro_batch_size", "rollout_micro_batch_size"]
    if scores_policies:
        names.append("compute_logps_micro_batch_size")
    for name in names:
        for prompts in _calls(getattr(sizes, name), sizes.mini_batch_size):
            check_samples(prompts * num_generations, num_ranks, f"{name}={getattr(sizes, name)} of")


def check_samples(samples: int, num_ranks: int, what: str) -> None:
    """Raise unless so many samples divide over the ranks.

    Raises:
        ValueError: if they do not, with both numbers; ``what`` says where they come from.
    """
    if samples % num_ranks:
        raise ValueError(f"{what} {samples} samples must be a multiple of the {num_ranks} ranks")


def _plans(sizes: BatchSizes) -> int:
    """How many portions Tunix makes of one update: micro-batches are gathered until both sizes divide them."""
    portion = math.lcm(sizes.rollout_micro_batch_size, sizes.compute_logps_micro_batch_size)
    micro_batches = -(-portion // sizes.train_micro_batch_size)
    return -(-sizes.num_micro_batches // micro_batches)


def _calls(size: int, total: int) -> set[int]:
    """The sizes of the calls that ``total`` prompts are cut into."""
    return {min(size, total), total % size or min(size, total)}
