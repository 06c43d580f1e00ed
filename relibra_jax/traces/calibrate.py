"""Fit of synthetic routing to recorded routing: three parameters by simulation, the others by counting.

Popularity, topics and factors each have one statistic that depends on them most: the spread of experts' loads over the
whole trace, its growth as micro-batches shrink, and how often tokens use experts together. Each round draws a trace
with the current parameters, with the same random numbers, and scales each parameter by the error of its statistic (the
method of simulated moments). All three statistics describe experts, not ranks, so that they can be kept for other
numbers of experts.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from relibra_jax.traces.calibrated import Calibration, draw_trace
from relibra_jax.traces.statistics import (
    contiguous_imbalance,
    count_load,
    hot_expert_churn,
    hottest_expert,
    load_spread,
    micro_batch_load,
    neighbour_correlation,
    pair_lift,
)
from relibra_jax.traces.trace import Trace

RANKS: Final = 8
"""The number of ranks for which imbalance is computed."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 32)
"""The numbers of micro-batches for which imbalance is computed."""
NEIGHBOURS: Final = 16
"""The number of micro-batches for statistics of neighbouring micro-batches."""
NUMBERINGS: Final = 16
"""The number of random numberings of experts over which imbalance is averaged, because a model's own is one of many."""
STEP: Final = 0.7
"""The exponent of a statistic's error by which a round scales a parameter."""


class Likeness(NamedTuple):
    """Statistics in which synthetic routing should match recorded routing; means over layers.

    Samples are in random order, because recordings are often sorted by the source of their prompts.
    """

    imbalance: Float[np.ndarray, " 5"]
    """The imbalance of 8 ranks with randomly numbered experts, for 1, 2, 4, 8 and 32 micro-batches of the trace."""
    hottest: float
    """The load of the hottest expert / the mean."""
    spread: Float[np.ndarray, " 5"]
    """The standard deviation of experts' loads / their mean, for the same numbers of micro-batches."""
    lift: float
    """The mean lift of the pairs of experts that tokens use."""
    churn: float
    """The share of hot experts that were not hot in the micro-batch before, for 16 micro-batches."""
    correlation: float
    """The correlation of experts' loads in neighbouring micro-batches, for 16 micro-batches."""


def measure_likeness(trace: Trace, *, seed: int = 0) -> Likeness:
    """Compute the statistics by which a calibration is fitted and judged.

    Args:
        trace: a trace of at least 32 samples with tokens, a top-k of 2 or more, and experts that divide over 8 ranks.
        seed: the seed of the order of samples and of the numberings of experts.

    Raises:
        ValueError: if the trace does not meet these requirements.
    """
    experts, top_k = trace.num_experts, trace.replay.expert_ids.shape[-1]
    samples = int(trace.replay.mask.any(1).sum())
    if samples < max(MICRO_BATCHES) or top_k < 2 or experts % RANKS:
        raise ValueError(
            f"{trace.name} has {samples} samples with tokens, and top-{top_k} of {experts} experts; a calibration needs"
            f" {max(MICRO_BATCHES)} samples, top-2, and experts that divide over {RANKS} ranks"
        )
    rng = np.random.default_rng(seed)
    load = rng.permutation(count_load(trace.replay, experts))
    whole = load.sum(0)
    layers = np.arange(len(whole))[:, None]
    numberings = [
        rng.permuted(np.tile(np.arange(experts), (len(whole), 1)), axis=-1) for _ in range(NUMBERINGS)
    ]
    parts = [micro_batch_load(load, number) for number in MICRO_BATCHES]
    imbalance = [
        np.mean([contiguous_imbalance(part[:, layers, order], RANKS) for order in numberings])
        for part in parts
    ]
    shifting = micro_batch_load(load, NEIGHBOURS)
    return Likeness(
        np.array(imbalance),
        float(hottest_expert(whole).mean()),
        np.array([load_spread(part).mean() for part in parts]),
        float(pair_lift(trace.replay, experts).mean.mean()),
        hot_expert_churn(shifting),
        neighbour_correlation(shifting),
    )


def calibrate(
    trace: Trace,
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
    dimensions: int = 2,
    rounds: int = 12,
    seed: int = 0,
) -> Calibration:
    """Fit a calibration to recorded routing.

    Args:
        trace: the recorded routing, which must meet the requirements of `measure_likeness`. Its domains determine the
            part of the topics that samples of one domain share.
        num_experts: the number of experts of the traces to draw. None for that of ``trace``. If it differs, the spread
            of an expert's load, its growth and the lift of pairs are assumed to stay the same.
        top_k: the number of experts of a token of the traces to draw. None for that of ``trace``.
        layers: the number of layers of the traces that are drawn for comparison. None for that of ``trace``.
        dimensions: the number of factors of a token.
        rounds: the number of rounds; each draws a trace and compares it.
        seed: the seed of the drawn traces and of their statistics.

    Returns:
        The calibration for traces with this number of experts and this top-k.

    Raises:
        ValueError: if `measure_likeness` rejects the trace, or `draw_trace` the sizes.
    """
    target = _moments(measure_likeness(trace, seed=seed))
    samples, _, recorded_layers, recorded_k = trace.replay.expert_ids.shape
    sizes = {
        "num_experts": trace.num_experts if num_experts is None else num_experts,
        "top_k": recorded_k if top_k is None else top_k,
        "layers": recorded_layers if layers is None else layers,
    }
    share, domains = _domain_share(count_load(trace.replay, trace.num_experts), trace.domain)
    lengths = np.quantile(trace.replay.mask.sum(1), np.linspace(0, 1, 11))
    parts = np.array([4.0, 6.0, 12.0])  # near those of GPT-OSS-20B

    def calibration() -> Calibration:
        popularity, topic, factors = map(float, parts)
        return Calibration(
            source=f"{trace.name}: {samples} samples, {recorded_layers} layers of"
            f" {trace.num_experts} experts, top-{recorded_k}",
            popularity=popularity,
            topic=topic,
            domain_share=share,
            domains=domains,
            factors=factors,
            dimensions=dimensions,
            lengths=tuple(map(int, lengths)),
        )

    for _ in range(rounds):
        drawn = draw_trace(calibration(), samples=samples, seed=seed, **sizes)
        off = target / _moments(measure_likeness(drawn, seed=seed))
        parts = parts * np.clip(off, 0.25, 4) ** STEP
    return calibration()


def _moments(likeness: Likeness) -> Float[np.ndarray, " 3"]:
    """Return the statistics that popularity, topics and factors determine; noise could make them slightly negative."""
    whole, *_, shrunk = likeness.spread
    return np.maximum([whole, shrunk - whole, likeness.lift - 1], 1e-3)


def _domain_share(load: Int[np.ndarray, "B L E"], domain: Int[np.ndarray, " B"]) -> tuple[float, int]:
    """Return the share of the variance between samples that is common to a domain, and the number of domains.

    The variance that is due to the finite number of tokens of a sample is subtracted, as if experts were drawn
    independently. The number of domains is the number of equally large ones that would give two samples the same
    probability of a common domain.
    """
    has_tokens = load.any((1, 2))
    load, domain = load[has_tokens].astype(float), domain[has_tokens]
    copies = load.sum(-1, keepdims=True)
    shares = load / copies
    deviation = shares - load.sum(0) / copies.sum(0)
    sizes = np.bincount(domain)
    sizes = sizes[sizes > 0]
    pairs = (sizes * (sizes - 1)).sum()
    if len(sizes) < 2 or not pairs:
        return 0.0, len(sizes)
    alone = (deviation**2).sum()
    together = sum((deviation[domain == index].sum(0) ** 2).sum() for index in np.unique(domain)) - alone
    counting = (shares * (1 - shares) / copies).sum()
    share = together / pairs / (max(alone - counting, 1e-9) / len(load))
    return float(np.clip(share, 0, 1)), round(len(load) ** 2 / (sizes**2).sum())
