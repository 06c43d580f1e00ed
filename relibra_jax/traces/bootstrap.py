"""Batches as large as training's from a trace that is smaller: whole samples, drawn again and again.

A bootstrap draws with replacement, so a batch may be larger than the trace, and several differ from each other as
much as the trace's samples do (Efron, 1979). Samples are drawn whole, because experts of neighbouring tokens go
together, and inside each domain, so that the shares of domains are not left to chance.
"""

import numpy as np
from jaxtyping import Int

from relibra_jax.limits import check_integer, check_memory, check_seed
from relibra_jax.traces.trace import Trace
from relibra_jax.types import RoutingReplay


def bootstrap(trace: Trace, samples: int, *, seed: int) -> Trace:
    """Draw a trace of any length from another.

    Args:
        trace: the trace to draw from.
        samples: the number of samples to draw, whole and with replacement.
        seed: the seed of what is drawn.

    Returns:
        A trace of so many samples, in the order in which ``trace`` has them; its note says that they were drawn.

    Raises:
        ValueError: if ``samples`` is less than 1, the trace has no sample, `check_seed` refuses the seed, or the drawn
            samples do not fit this machine's memory.

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
    )


def bootstrap_samples(
    domain: Int[np.ndarray, " B"], samples: int, rng: np.random.Generator
) -> Int[np.ndarray, " S"]:
    """Draw samples with replacement, from each domain as many as its share asks for.

    Shares are rounded by the largest remainder: every domain gets the whole part of what it is due, and the samples
    that are left go to the largest fractions, one each.

    Args:
        domain: the domain of each sample there is, an index.
        samples: the number S of samples to draw.
        rng: the source of randomness, consumed.

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
    """Raise unless batches can be drawn from a trace, and fit this machine's memory while the load of one is counted.

    Args:
        trace: the trace to draw from.
        samples: the samples of one batch.
        batches: the number of batches that are held at once.

    Raises:
        ValueError: if a number is less than 1, the trace has no sample, or memory is too small.
    """
    check_integer("samples", samples, least=1)
    check_integer("batches", batches, least=1)
    ids = trace.replay.expert_ids
    there, tokens, layers, top_k = ids.shape
    if not there:
        raise ValueError(f"{trace.name} has no samples to draw from")
    padded = samples * tokens * (1 + layers * top_k * ids.dtype.itemsize)
    # Ids are counted as int32, into int32.
    counting = 4 * samples * layers * (tokens * top_k + trace.num_experts)
    sizes = f"{samples} samples x {tokens} tokens x {layers} layers x top-{top_k}"
    check_memory(f"{trace.name}: drawing {batches} batches of {sizes}", batches * padded + counting)
