"""Generator of synthetic routing replay that resembles reinforcement learning.

For every token and layer, the generator takes the top-k experts of the sum of

    log popularity of the expert      Zipf over the experts, in a different order in every layer
  + preference of the domain          samples of one domain come in runs, like the prompts of a batch
  + preference of the sample          random for every sample
  + current heat                      high for a few experts, which change gradually with the position of the sample
  + Gumbel noise                      random for every token (the Gumbel top-k trick)

The hottest experts therefore change between micro-batches, and planners that use past loads cannot predict them.
"""

import numpy as np

from relibra_jax.contract.types import RoutingReplay
from relibra_jax.traces.trace import Trace, make_trace


def synthetic_trace(
    *,
    samples: int = 256,
    mean_tokens: int = 160,
    layers: int = 8,
    num_experts: int = 32,
    top_k: int = 4,
    domains: int = 4,
    skew: float = 0.5,
    seed: int = 0,
) -> Trace:
    """Generate a trace.

    Args:
        samples: B, the number of samples.
        mean_tokens: the mean length of a sample in tokens; lengths are log-normal and at most three times this number.
        layers: the number of MoE layers L.
        num_experts: the number of logical experts E of a layer.
        top_k: the number of experts K of a token.
        domains: the number of prompt domains; runs of one domain have eight samples on average.
        skew: the Zipf exponent of the experts' popularity, which all samples share.
        seed: the seed of all random numbers.

    Returns:
        The trace, whose note names the generator.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean_tokens) - 0.125, 0.5, samples), 8, 3 * mean_tokens).astype(
        int
    )
    steps = np.cumsum(rng.random(samples) < 1 / 8)
    domain = rng.integers(domains, size=samples)[steps]

    popularity = -skew * np.log(np.arange(1, num_experts + 1))
    base = rng.permuted(np.tile(popularity, (layers, 1)), axis=-1)
    domain_preference = rng.normal(0, 0.7, (domains, layers, num_experts))
    sample_preference = rng.normal(0, 0.5, (samples, layers, num_experts))
    phase = rng.random((layers, num_experts))
    position = np.arange(samples)[:, None, None] / 24
    heat = 1.2 * np.exp(6 * (np.cos(2 * np.pi * (position + phase)) - 1))
    logits = (base + domain_preference[domain] + sample_preference + heat).astype(np.float32)

    mask = np.arange(lengths.max()) < lengths[:, None]
    expert_ids = np.zeros((*mask.shape, layers, top_k), np.uint8 if num_experts <= 256 else np.uint16)
    for sample, length in enumerate(lengths):
        noise = rng.gumbel(size=(length, layers, num_experts)).astype(np.float32)
        best = np.argpartition(-(logits[sample] + noise), top_k - 1, axis=-1)[..., :top_k]
        expert_ids[sample, :length] = best
    return make_trace(
        RoutingReplay(expert_ids, mask),
        num_experts,
        "synthetic",
        f"synthetic_trace(skew={skew}, seed={seed})",
        synthetic=True,
    )
