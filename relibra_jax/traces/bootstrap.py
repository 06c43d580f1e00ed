"""Bootstrap of traces: large batches of whole samples, drawn with replacement from a smaller trace.

A bootstrap draws with replacement, so a batch may be larger than the trace, and several batches differ from each other
as much as the samples of the trace do (Efron, 1979). Samples are drawn whole, because the experts of neighbouring
tokens are correlated. They are drawn per domain, so that the shares of the domains do not vary by chance.
"""

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.recording import Recording
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.limits import check_integer, check_memory, check_seed
from relibra_jax.traces.trace import Trace


def bootstrap(trace: Trace, samples: int, *, seed: int) -> Trace:
    """Draw a trace with any number of samples from another trace.

    Args:
        trace: the trace to draw from.
        samples: the number of samples to draw, whole and with replacement.
        seed: the seed of the random draw.

    Returns:
        A trace of that many samples, in the order of ``trace``. Its note says that the samples were drawn.

    Raises:
        ValueError: if ``samples`` is less than 1, if the trace has no samples, if `check_seed` rejects the seed, or if
            the drawn samples do not fit into the memory of this machine.

    >>> replay = RoutingReplay(np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1), np.ones((3, 1), bool))
    >>> trace = Trace(replay, 4, "small", "", np.array([0, 0, 1]), ("maths", "code"), False)
    >>> bootstrap(trace, 6, seed=0).domain.tolist()
    [0, 0, 0, 0, 1, 1]
    """
    check_seed("seed", seed)
    check_drawn(trace, samples, batches=1)
    drawn = bootstrap_samples(trace.domain, samples, np.random.default_rng(seed))
    note = f"{samples} samples drawn with replacement from {len(trace.domain)}, seed {seed}"
    return trace._replace(
        replay=RoutingReplay(trace.replay.expert_ids[drawn], trace.replay.mask[drawn]),
        note="; ".join(filter(None, (trace.note, note))),
        domain=trace.domain[drawn],
        token_ids=None if trace.token_ids is None else trace.token_ids[drawn],
        recording=Recording(provenance=trace.recording.provenance),  # drawn batches mix the steps
    )


def bootstrap_samples(
    domain: Int[np.ndarray, " B"], samples: int, rng: np.random.Generator
) -> Int[np.ndarray, " S"]:
    """Draw samples with replacement, from each domain in proportion to its size.

    The numbers per domain are rounded by the largest-remainder method: every domain gets the integer part of its share,
    and the domains with the largest fractions get one more sample each.

    Args:
        domain: the domain index of each existing sample.
        samples: S, the number of samples to draw.
        rng: the random generator; its state advances.

    Returns:
        The indices of the drawn samples, ascending.
    """
    sizes = np.bincount(domain)
    due = samples * sizes
    counts = due // len(domain)
    largest = np.argsort(-(due % len(domain)), kind="stable")
    counts[largest[: samples - counts.sum()]] += 1
    drawn = [
        rng.choice(np.flatnonzero(domain == index), count) for index, count in enumerate(counts) if count
    ]
    return np.sort(np.concatenate(drawn))


def check_drawn(trace: Trace, samples: int, *, batches: int) -> None:
    """Raise ValueError unless batches can be drawn from a trace and fit into memory, with the count of one load.

    Args:
        trace: the trace to draw from.
        samples: the number of samples of one batch.
        batches: the number of batches that are in memory at the same time.

    Raises:
        ValueError: if a number is less than 1, if the trace has no samples, or if the memory is too small.
    """
    check_integer("samples", samples, least=1)
    check_integer("batches", batches, least=1)
    ids = trace.replay.expert_ids
    available, tokens, layers, top_k = ids.shape
    if not available:
        raise ValueError(f"{trace.name} has no samples to draw from")
    padded = samples * tokens * (1 + layers * top_k * ids.dtype.itemsize)
    # Counting casts the ids to int32, and the counts are int32.
    counting = 4 * samples * layers * (tokens * top_k + trace.num_experts)
    sizes = f"{samples} samples x {tokens} tokens x {layers} layers x top-{top_k}"
    check_memory(f"{trace.name}: drawing {batches} batches of {sizes}", batches * padded + counting)
