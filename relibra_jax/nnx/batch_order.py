"""The order of a balancer's batches: an optimizer step separates two batches, and only the newest one may run."""

import functools
from collections.abc import Callable

from flax import nnx


class BatchOrder:
    """The number of a balancer's current batch, and whether the optimizer has made a step since it was prepared."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the current batch; 0 before the first one."""
        self._updates_before: int | None = None

    def begin(self, optimizer: nnx.Optimizer | None) -> Callable[[], None]:
        """Make the next batch the current one.

        Args:
            optimizer: the optimizer that makes the batch's updates. None if the model is not trained.

        Returns:
            A function that raises ValueError if this batch is no longer the current one.
        """
        self.number += 1
        if optimizer is not None:
            self._updates_before = _updates(optimizer)
        return functools.partial(self._check_in_force, self.number)

    def discard(self) -> None:
        """Allow the next batch to be prepared without an optimizer step."""
        self._updates_before = None

    def check_stepped(self, optimizer: nnx.Optimizer | None) -> None:
        """Raise ValueError if the optimizer has made no step since the current batch was prepared."""
        if optimizer is not None and self._updates_before == _updates(optimizer):
            raise ValueError(
                f"the optimizer has made no step since the previous batch was prepared (it is still at step"
                f" {self._updates_before}): prepare all samples of an update in one batch, or call Balancer.discard()"
                " to discard the previous batch"
            )

    def _check_in_force(self, number: int) -> None:
        if number != self.number:
            raise ValueError(
                f"this is batch {number} of its balancer, which has already moved the experts for batch {self.number}:"
                " run all steps of a batch before you prepare the next one"
            )


def _updates(optimizer: nnx.Optimizer) -> int:
    return int(optimizer.step[...])
