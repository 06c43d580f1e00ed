"""The search for homes beside a rollout that still runs, from the counts of responses that have ended.

The search takes cores of the host, and generation the devices; on a CPU both are the same cores. It begins at a look at
which enough responses have ended. That follows from what is sampled and not from a clock, so that all processes begin
alike, and a resumed run plans as it would have planned.
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from experiments.rl.configs import Train
from experiments.rl.generation import Responses, Watch
from experiments.rl.planner_settings import TUNABLE
from experiments.rl.processes import on_every_host
from experiments.rl.stages import stage_options
from experiments.rl.state import State
from experiments.rl.step_clock import StepClock
from relibra_jax.replay import sample_load
from relibra_jax.types import RoutingReplay


class PlanAhead:
    """Watches one rollout, and searches homes for its batch once.

    Args:
        state: the state of the run, whose balancer searches.
        config: the settings of the run.
        beside: where the search runs.
        clock: the clock of the step, whose phase ``count`` is what counting delays generation.
    """

    def __init__(self, state: State, config: Train, beside: Executor, clock: StepClock):
        self._state, self._config, self._beside, self._clock = state, config, beside, clock
        self._search: Future[float] | None = None

    @property
    def watch(self) -> Watch | None:
        """For `experiments.rl.generation.generate`; None where there is nothing to search ahead."""
        config = self._config
        # Prompts that may still be replaced are nothing to plan for.
        if config.planner not in TUNABLE or config.plan_ahead == 1 or config.algorithm_entry.mixed_groups:
            return None
        return Watch(config.watch_every, self._look)

    def wait(self) -> float | None:
        """Wait for the search; its seconds, None if it never began."""
        return None if self._search is None else self._search.result()

    def _look(self, ended: Bool[np.ndarray, " B"], so_far: Callable[[], Responses]) -> bool:
        if ended.mean() < self._config.plan_ahead:
            return True
        with self._clock("count"):
            counts = count_ended(so_far(), num_experts=self._config.topology.num_experts)
            load, tokens = on_every_host(counts, self._state.balancer.mesh)
        self._search = self._beside.submit(self._plan, load, tokens, ended)
        return False

    def _plan(self, load: np.ndarray, tokens: np.ndarray, ended: np.ndarray) -> float:
        start = time.perf_counter()
        self._state.balancer.plan_ahead(load, tokens, ended, **stage_options(self._config))
        return time.perf_counter() - start


@functools.partial(jax.jit, static_argnames="num_experts")
def count_ended(
    responses: Responses, *, num_experts: int
) -> tuple[Int[jax.Array, "B L E"], Int[jax.Array, " B"]]:
    """The token copies of every sample for every expert, and its tokens; 0 for samples that go on."""
    replay = RoutingReplay(responses.expert_ids, responses.mask & jnp.asarray(responses.ended)[:, None])
    load, tokens = sample_load(replay, num_experts=num_experts), replay.mask.sum(1, dtype=jnp.int32)
    return jnp.asarray(load), jnp.asarray(tokens)
