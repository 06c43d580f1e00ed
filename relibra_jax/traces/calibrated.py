"""Synthetic routing as uneven as recorded routing, for model sizes of which there is no recording.

In every layer, a token uses the top-k experts by the sum of

    popularity of the expert        distributed as a negative Gumbel variable: few experts are hot, more are hardly used
  + topic of the sample             normal; samples of one domain share a part of it
  + factors of the token            the product of a normal vector of the token and one of the expert, of few
                                    dimensions: tokens use experts with similar vectors together
  + Gumbel noise                    so that each token draws its own experts (the Gumbel top-k trick)

There is no drift inside a sample, no order of the samples, and no correlation between layers. A `Calibration` gives the
size of each part, and `relibra_jax.traces.calibrate` fits it. Synthetic routing of arbitrary unevenness overstates that
of real routing, up to 2.35 times (DODOCO, arXiv 2605.20982); therefore this one is compared with a recording if one is
available. A calibration holds for one number of experts and one top-k. For larger models the parts are fitted so that
three statistics stay as recorded: the spread of experts' loads, its growth as micro-batches shrink, and how often
tokens use two experts together. That larger models route like this is an assumption, which no recording here supports.
With more experts on each rank, the same spread makes ranks less uneven.
"""

import dataclasses
import math
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.limits import check_integer, check_memory, check_seed
from relibra_jax.traces.trace import Trace, make_trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The parameters of synthetic routing, in units of the noise of a token's logits."""

    source: str
    """The recording to which the parameters were fitted."""
    popularity: float
    """The standard deviation of experts' popularity, which all samples share."""
    topic: float
    """The standard deviation of the term that a sample's topic adds to each expert."""
    domain_share: float
    """The share of the topics' variance that samples of one domain have in common, 0 to 1."""
    domains: int
    """The number of domains, all equally common."""
    factors: float
    """The standard deviation of the term that a token's factors add to each expert."""
    dimensions: int
    """The number of factors. With fewer factors, tokens use the same experts together more often."""
    lengths: tuple[int, ...]
    """Quantiles of the number of tokens of a sample, in even steps from the shortest to the longest."""


GPT_OSS_20B: Final = Calibration(
    source="352 rollouts of GPT-OSS-20B, 24 layers of 32 experts, top-4",
    popularity=3.173,
    topic=5.163,
    domain_share=0.496,
    domains=101,
    factors=10.10,
    dimensions=2,
    lengths=(32, 66, 90, 125, 170, 287, 475, 511, 511, 511, 511),
)
"""The calibration of GPT-OSS-20B with 32 experts and top-4. `relibra_jax.traces.calibrate.calibrate` fitted it to
generations recorded in the data set GPT-OSS-MoE-ExpertFingerprinting (Apache-2.0); a test compares it with them if the
recording is available."""


class Synthetic(NamedTuple):
    """Synthetic routing for one model size."""

    calibration: Calibration
    """The calibration, fitted for this size."""
    num_experts: int
    """E, the number of logical experts of a layer."""
    top_k: int
    """K, the number of experts of a token."""


def _scaled(
    num_experts: int, *, popularity: float, topic: float, factors: float, dimensions: int
) -> Synthetic:
    calibration = dataclasses.replace(
        GPT_OSS_20B,
        source=f"{GPT_OSS_20B.source}, and scaled to {num_experts} experts, top-8, by assumption",
        popularity=popularity,
        topic=topic,
        factors=factors,
        dimensions=dimensions,
    )
    return Synthetic(calibration, num_experts, 8)


SYNTHETIC: Final = {
    "synthetic-32": Synthetic(GPT_OSS_20B, 32, 4),
    "synthetic-128": _scaled(128, popularity=1.766, topic=2.949, factors=6.163, dimensions=6),
    "synthetic-256": _scaled(256, popularity=1.082, topic=1.722, factors=4.071, dimensions=12),
}
"""Synthetic routing of GPT-OSS-20B, and of models with more experts and the same statistics: the spread of an expert's
load, its growth as micro-batches shrink and the lift of pairs are within a tenth of the recorded ones (`calibrate` with
``num_experts`` and ``top_k``). With more experts there are more factors, because otherwise the experts would differ
mainly in the length of their vectors."""


def draw_trace(
    calibration: Calibration,
    *,
    samples: int = 1024,
    num_experts: int = 32,
    top_k: int = 4,
    layers: int = 8,
    seed: int = 0,
) -> Trace:
    """Draw a synthetic trace.

    Args:
        calibration: the parameters of the routing, fitted for this number of experts and this top-k.
        samples: B, the number of samples.
        num_experts: E, the number of logical experts of a layer.
        top_k: K, the number of experts of a token.
        layers: L, the number of MoE layers, which are drawn independently.
        seed: the seed of everything that is drawn.

    Returns:
        The trace. Its note says that it is synthetic, and to which recording it was calibrated.

    Raises:
        ValueError: if a number is out of range, or if the trace does not fit into the memory of this machine.

    >>> trace = draw_trace(GPT_OSS_20B, samples=4, layers=2)
    >>> trace.name, trace.synthetic, trace.replay.expert_ids.shape[2:]
    ('synthetic-32', True, (2, 4))
    """
    for name, value in (("samples", samples), ("layers", layers), ("top_k", top_k)):
        check_integer(name, value, least=1)
    check_integer("num_experts", num_experts, least=top_k)
    check_seed("seed", seed)
    rng = np.random.default_rng(seed)
    steps = np.linspace(0, 1, len(calibration.lengths))
    lengths = np.interp(rng.random(samples), steps, calibration.lengths).round().astype(int)
    longest, dtype = int(lengths.max()), id_dtype(num_experts)
    # The padded ids, the logits of samples and domains, and four arrays of logits of one sample at a time.
    needed = samples * longest * layers * top_k * dtype.itemsize
    needed += 4 * layers * num_experts * (samples + calibration.domains + 4 * longest)
    sizes = f"{samples} samples x {longest} tokens x {layers} layers of {num_experts} experts"
    check_memory(f"drawing {sizes}", needed)

    domain, taste = _sample_logits(calibration, samples, (layers, num_experts), rng)
    vectors = rng.standard_normal((layers, calibration.dimensions, num_experts), dtype=np.float32)
    vectors *= calibration.factors / math.sqrt(calibration.dimensions)
    expert_ids = np.zeros((samples, longest, layers, top_k), dtype)
    for sample, length in enumerate(lengths):
        expert_ids[sample, :length] = draw_routes(taste[sample], vectors, length, top_k, rng)
    note = f"synthetic, seed {seed}, calibrated on {calibration.source}"
    return make_trace(
        RoutingReplay(expert_ids, np.arange(longest) < lengths[:, None]),
        num_experts,
        f"synthetic-{num_experts}",
        note,
        category=np.array([f"domain {index:03}" for index in domain]),
        synthetic=True,
    )


def draw_routes(
    logits: Float[np.ndarray, "L E"],
    vectors: Float[np.ndarray, "L D E"],
    length: int | np.integer,
    top_k: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, "T L K"]:
    """Draw the experts of the tokens of one sample.

    Args:
        logits: what all tokens of the sample have in common, in units of the noise.
        vectors: the vectors of the experts, whose products with the normal vectors of tokens are added.
        length: T, the number of tokens.
        top_k: K, the number of experts of a token.
        rng: the random generator; its state advances, by the same number of draws for all logits and vectors.
    """
    layers, dimensions, num_experts = vectors.shape
    token = rng.standard_normal((layers, length, dimensions), dtype=np.float32)
    # The smallest Exp(1) / e^x is distributed as the largest x + Gumbel noise. The logarithm of 0 would warn.
    noise = rng.standard_exponential((layers, length, num_experts), dtype=np.float32)
    keys = np.log(np.maximum(noise, np.finfo(np.float32).tiny, out=noise), out=noise)
    keys -= token @ vectors
    keys -= logits[:, None]
    return np.argpartition(keys, top_k - 1, axis=-1)[..., :top_k].swapaxes(0, 1)


def _sample_logits(
    calibration: Calibration, samples: int, shape: tuple[int, int], rng: np.random.Generator
) -> tuple[Int[np.ndarray, " B"], Float[np.ndarray, "B L E"]]:
    """Draw the domain of every sample, and its logits before factors and noise."""
    share = calibration.topic * np.sqrt([calibration.domain_share, 1 - calibration.domain_share])
    domain = rng.integers(calibration.domains, size=samples)
    of_domain = rng.standard_normal((calibration.domains, *shape), dtype=np.float32) * np.float32(share[0])
    taste = rng.standard_normal((samples, *shape), dtype=np.float32) * np.float32(share[1])
    taste += of_domain[domain]
    taste += calibration.popularity * rng.permuted(
        np.tile(popularity_quantiles(shape[1]), (shape[0], 1)), axis=-1
    )
    return domain, taste


def popularity_quantiles(num_experts: int) -> Float[np.ndarray, " E"]:
    """Return quantiles of a negative Gumbel variable of mean 0 and variance 1; layers permute them over the experts."""
    quantiles = np.log(-np.log1p(-(np.arange(num_experts) + 0.5) / num_experts))
    return (quantiles + np.euler_gamma) * math.sqrt(6) / math.pi
