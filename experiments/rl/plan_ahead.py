"""Planning ahead: a search for homes while the rollout still runs, from the counts of responses that have ended.

If generation runs in waves, the search starts when enough responses of the whole batch have ended. Responses of
finished waves count as ended, and those of waves that have not started as unfinished.

The search uses the cores of the host, and generation the devices; on a CPU both use the same cores. The search starts
at the first check at which enough responses have ended. This depends on the sampled tokens and not on a clock. So all
processes start the search at the same token, and a resumed run makes the same plans as one that was never stopped.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np
from jaxtyping import Bool

from experiments.rl.configs import Train
from experiments.rl.generation import Watch
from experiments.rl.planner_settings import TUNABLE
from experiments.rl.processes import process_count
from experiments.rl.stages import stage_options
from experiments.rl.state import State
from experiments.rl.step_clock import StepClock
from relibra_jax import Batch


class PlanAhead:
    """A watch over one rollout that starts one search for homes.

    Args:
        state: the state of the run, whose balancer searches.
        config: the settings of the run.
        executor: the executor that runs the search.
        clock: the clock of the step. Its phase ``count`` gets the time by which counting delays generation.
    """

    def __init__(self, state: State, config: Train, executor: Executor, clock: StepClock):
        self._state, self._config, self._executor, self._clock = state, config, executor, clock
        self._search: Future[float] | None = None

    @property
    def watch(self) -> Watch | None:
        """The watch to pass to `experiments.rl.generation.generate`. None if the run does not plan ahead."""
        config = self._config
        # DAPO may still replace the prompts, so the batch is not known yet. With servers, responses end at other
        # moments in each process, and all must search from the same counts.
        unknown = config.algorithm_entry.dynamic_sampling or (config.engine and process_count() > 1)
        if config.planner not in TUNABLE or config.plan_ahead == 1 or unknown:
            return None
        return Watch(config.watch_every, self._start_search)

    def wait(self) -> float | None:
        """Wait for the search, and return its duration in seconds. None if no search has started."""
        return None if self._search is None else self._search.result()

    def _start_search(self, ended: Bool[np.ndarray, " B"], counts: Callable[[], Batch]) -> bool:
        if self._search is not None:  # a step may sample several windows
            return False
        if ended.mean() < self._config.plan_ahead:
            return True
        with self._clock("count"):
            batch = counts()
        self._search = self._executor.submit(self._plan, batch, ended)
        return False

    def _plan(self, batch: Batch, ended: np.ndarray) -> float:
        start = time.perf_counter()
        self._state.balancer.plan_ahead(batch, ended, **stage_options(self._config))
        return time.perf_counter() - start
