"""Batches that servers sample while the run learns from earlier ones.

With a staleness of K, the batch of step t begins once the engine has the weights of step t - K, and never earlier. New
weights interrupt it, and it carries on under them. So no token is more than K updates older than the step that learns
from it.

One batch is sampled after the other, in the order of the steps that learn from them. So servers are never busy with a
later batch while the run waits for an earlier one, and have less to do at the end of each.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from experiments.engines.protocol import Generation


class BatchesAhead:
    """The batches of a step and of the steps after it.

    Args:
        staleness: K, the number of later batches that are sampled while the run learns from one.
        steps: the number of steps of the run, after which no batch is needed.
        prepare: a function that returns, for a step, the function that samples its batch in another thread.
    """

    def __init__(self, staleness: int, steps: int, prepare: Callable[[int], Callable[[], Generation]]):
        self._staleness, self._steps, self._prepare = staleness, steps, prepare
        self._executor = ThreadPoolExecutor(1)
        self._batches: deque[Future[Generation]] = deque()

    def take(self, step: int) -> Generation:
        """Begin the batches up to K steps after this one, and return that of this step, when it is there.

        Args:
            step: the step. The engine has its weights.
        """
        for later in range(step + len(self._batches), min(step + self._staleness + 1, self._steps)):
            self._batches.append(self._executor.submit(self._prepare(later)))
        return self._batches.popleft().result()

    def forget(self) -> None:
        """Begin no further batch."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> None:
        """Wait for the batch that is sampled."""
        self._executor.shutdown()
