"""The order of batches: each is learned from before the next one is prepared, and none is run behind it."""

import functools
from collections.abc import Callable

from flax import nnx


class BatchOrder:
    """Which batch of a balancer is in force, and whether it was learned from."""

    def __init__(self) -> None:
        self.number = 0
        """How many batches have been in force."""
        self._updates_before: int | None = None

    def begin(self, optimizer: nnx.Optimizer | None) -> Callable[[], None]:
        """Put the next batch in force.

        Args:
            optimizer: what will learn from it; None if nothing will.

        Returns:
            What raises ValueError as soon as another batch is in force.
        """
        self.number += 1
        if optimizer is not None:
            self._updates_before = _updates(optimizer)
        return functools.partial(self._check_in_force, self.number)

    def discard(self) -> None:
        """Let another batch be prepared without an update."""
        self._updates_before = None

    def check_learned(self, optimizer: nnx.Optimizer | None) -> None:
        """Raise ValueError if the optimizer has made no update since the batch in force was prepared."""
        if optimizer is not None and self._updates_before == _updates(optimizer):
            raise ValueError(
                f"a second batch is prepared before the first was learned from: the optimizer is still at step"
                f" {self._updates_before}. A batch holds everything between two placements: prepare all samples of an"
                " update together, or call discard() to give the first one up"
            )

    def _check_in_force(self, number: int) -> None:
        if number != self.number:
            raise ValueError(
                f"this batch is number {number} of its balancer, which has moved the experts on for number"
                f" {self.number}: run all steps of a batch before the next one is prepared"
            )


def _updates(optimizer: nnx.Optimizer) -> int:
    return int(optimizer.step[...])
