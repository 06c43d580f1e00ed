"""Fit synthetic routing to recorded routing: three sizes by simulation, the rest by counting.

Popularity, topics and factors each have one measure that answers to them most: the spread of experts' loads over the
whole trace, its growth as micro-batches shrink, and how often experts go together. A round draws a trace with the sizes
so far, with the same random numbers, and scales each size by how far its measure is off (the method of simulated
moments). All three measures are of an expert, not of a rank, so that they can be kept for other numbers of experts.
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
"""The ranks whose imbalance is measured."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 32)
"""The numbers of micro-batches for which it is measured."""
NEIGHBOURS: Final = 16
"""The number of micro-batches whose neighbours are compared."""
NUMBERINGS: Final = 16
"""The numberings of experts over which imbalance is averaged: that of a model is one of very many."""
STEP: Final = 0.7
"""The power of a measure's error by which a round scales a size."""


class Likeness(NamedTuple):
    """What synthetic routing has to share with recorded routing; means over layers.

    Samples are taken in a drawn order, because recordings are often sorted by where their prompts came from.
    """

    imbalance: Float[np.ndarray, " 5"]
    """Imbalance of 8 ranks, the experts numbered at random, in 1, 2, 4, 8 and 32 micro-batches of the whole trace."""
    hottest: float
    """The hottest expert's load over the mean."""
    spread: Float[np.ndarray, " 5"]
    """The standard deviation of experts' loads over their mean, in as many micro-batches."""
    lift: float
    """The mean lift of the pairs of experts that tokens use."""
    churn: float
    """The share of hot experts that are new from one of 16 micro-batches to the next."""
    correlation: float
    """The correlation of loads with those of the next of 16 micro-batches."""


def measure_likeness(trace: Trace, *, seed: int = 0) -> Likeness:
    """Measure what calibration is judged by.

    Args:
        trace: routing of at least 32 samples that have tokens, top-k of 2 or more, experts that divide over 8 ranks.
        seed: the seed of the samples' order and of the experts' numbering.

    Raises:
        ValueError: if the trace is not so.
    """
    experts, top_k = trace.num_experts, trace.replay.expert_ids.shape[-1]
    samples = int(trace.replay.mask.any(1).sum())
    if samples < max(MICRO_BATCHES) or top_k < 2 or experts % RANKS:
        raise ValueError(
            f"{trace.name} has {samples} samples with tokens of top-{top_k} of {experts} experts; to be measured it"
            f" needs {max(MICRO_BATCHES)} samples, top-2, and experts that divide over {RANKS} ranks"
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
        trace: the recorded routing, as `measure_likeness` takes it; its domains tell what part of topics is shared.
        num_experts: the number of experts for which traces shall be drawn. For another than the recorded one, the
            spread of an expert's load, its growth and the lift of pairs stay what they are: an assumption.
        top_k: the experts of a token of such traces.
        layers: the layers of the traces that are drawn for comparison. None for any of the three is the trace's.
        dimensions: the number of factors of a token.
        rounds: how often a trace is drawn and compared.
        seed: the seed of what is drawn and of what is measured.

    Returns:
        The calibration, for traces of so many experts and this top-k.

    Raises:
        ValueError: if `measure_likeness` refuses the trace, or `draw_trace` the sizes.
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
    """What popularity, topics and factors each answer for; noise may leave a little below nothing."""
    whole, *_, shrunk = likeness.spread
    return np.maximum([whole, shrunk - whole, likeness.lift - 1], 1e-3)


def _domain_share(load: Int[np.ndarray, "B L E"], domain: Int[np.ndarray, " B"]) -> tuple[float, int]:
    """How much two samples of one domain have in common, of how much one sample differs from all; and how many domains.

    What samples differ by because they have few tokens is left out, as if experts were drawn independently. Domains
    count by their sizes: as many equal ones as leave two samples as likely in the same one.
    """
    there = load.any((1, 2))
    load, domain = load[there].astype(float), domain[there]
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
