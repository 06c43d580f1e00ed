"""Servers with a run of several processes: each process asks for its own samples, and keeps their routes.

The tokens, masks and log-probabilities of all samples go to every process, as those that the run's own devices sample
do. If one process cannot go on, all of them end.
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Int

from experiments.engines.protocol import EngineError, Generation
from experiments.rl.processes import process_count, texts_of_all
from relibra_jax.execution.plan_agreement import add_up, fail_together, gather_rows


def own_part(samples: int) -> Int[np.ndarray, " b"]:
    """Return the numbers of the samples for which this process asks: processes have equal, successive parts."""
    return np.array_split(np.arange(samples), process_count())[jax.process_index()]


def together[T](part: Callable[[], T]) -> T:
    """Return what this process's part of some work returns. All processes call it.

    Raises:
        Exception: the error of this process's part.
        EngineError: if the part of another process failed.
    """
    with fail_together("sampling with servers", EngineError):
        return part()


def share_generation(part: Callable[[], Generation], samples: int) -> Generation:
    """Wait for this process's part of a generation, and return the generation of all processes. All call it.

    Args:
        part: a function that waits for the samples of `own_part`, and returns them.
        samples: B, the number of samples of the batch.

    Returns:
        The generation, with the routes of this process's samples.

    Raises:
        EngineError: if the part of another process failed. This process raises the error of its own part.
    """
    if process_count() == 1:
        return part()
    generation, own = together(part), own_part(samples)
    responses = generation.responses

    rest = responses._replace(expert_ids=responses.ended)._asdict()
    rest.pop("own")
    arrays = (rest, generation.version, generation.dropped, generation.filled)
    whole, version, dropped, filled = gather_rows(arrays, own, samples)
    return Generation(
        type(responses)(**{**whole, "expert_ids": responses.expert_ids}, own=own),
        version,
        dropped,
        filled,
        int(add_up(np.int32(generation.retried))),
        texts_of_all(generation.failures),
    )
