"""Synthetic routing of several RL steps with long responses, for models of which there is no recording of training.

No public recording of RL training of a model with 128 experts was found, so this one is synthesised from what is
published. Samples are drawn as in `relibra_jax.traces.calibrated`, which is as uneven as a recording of a model with
fewer experts, and every step has prompts of its own. There are three further assumptions:

- *Drift.* On Qwen3-30B-A3B, about 10% of the experts that a response uses change after one update (GSPO,
  arXiv 2507.18071, section 5.3). Here a step is one update, after which a tenth of the choices differ for the same
  tokens with the same noise. All of the drift is in what tokens have in common, and moves load. In a real model a part
  is near ties of single tokens, which move none, so this drift of loads is an upper bound.
- *Lengths* are log-normal with a median of 4,096 tokens, a standard deviation of the logarithm of 0.8, and at most
  16,384 tokens.
- *Independence.* Given their prompt, tokens are drawn independently.

Two numbers that are published of Qwen3-30B-A3B (docs of github.com/john-sharratt/candle, 21 prompts of at most 256
tokens) were not used and are compared: 8, 64 and 256 tokens of different samples use 44, 104 and 118 of a layer's
experts there, and 47, 110 and 124 here; successive tokens share 47% of their experts there, and 17% here. So loads are
about as uneven, but tokens change experts faster. Rewards are not drawn.
"""

import math
from typing import Final

import numpy as np
from jaxtyping import Float

from relibra_jax.contract.recording import UNKNOWN, Recording
from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.limits import check_integer, check_memory, check_not_negative, check_seed
from relibra_jax.traces.calibrated import Calibration, Synthetic, draw_routes, popularity_quantiles
from relibra_jax.traces.trace import Trace, make_trace

MEDIAN_LENGTH: Final = 4096
"""The median number of tokens of a sample."""
SPREAD_OF_LENGTHS: Final = 0.8
"""The standard deviation of the logarithm of the number of tokens."""
LONGEST: Final = 16384
"""The largest number of tokens of a sample."""
TURN: Final = 0.12
"""The angle, in radians, by which one update turns the normal vectors behind popularity, topics of domains and factors.
At this angle a tenth of the choices of ``synthetic-128`` change (`changed_choices`)."""


def draw_steps(
    size: Synthetic,
    *,
    steps: int = 4,
    prompts: int = 16,
    responses_per_prompt: int = 2,
    layers: int = 2,
    turn: float = TURN,
    seed: int = 0,
) -> Trace:
    """Draw the routing of several RL steps, with drift between them.

    Args:
        size: the size of the model and the calibration of its routing, from `relibra_jax.traces.calibrated.SYNTHETIC`.
        steps: the number of steps, each of which is one update.
        prompts: the number of prompts of a step. Each has a topic and a domain of its own.
        responses_per_prompt: the number of samples of each prompt, which share its topic.
        layers: L, the number of MoE layers, which are drawn independently.
        turn: the angle of `TURN`. 0 for no drift.
        seed: the seed of everything that is drawn.

    Returns:
        The trace, whose recording has steps, prompts, versions and provenance. Its note says that it is synthetic.

    Raises:
        ValueError: if a number is out of range, or if the trace does not fit into the memory of this machine.

    >>> from relibra_jax.traces.calibrated import SYNTHETIC
    >>> trace = draw_steps(SYNTHETIC["synthetic-32"], steps=2, prompts=1, responses_per_prompt=2, layers=1)
    >>> trace.recording.step.tolist(), trace.recording.prompt.tolist()
    ([0, 0, 1, 1], [0, 0, 0, 0])
    """
    counts = {
        "steps": steps,
        "prompts": prompts,
        "responses_per_prompt": responses_per_prompt,
        "layers": layers,
    }
    for name, value in counts.items():
        check_integer(name, value, least=1)
    check_not_negative("turn", turn)
    check_seed("seed", seed)
    calibration, experts, top_k = size
    rng = np.random.default_rng(seed)
    per_step, samples = prompts * responses_per_prompt, steps * prompts * responses_per_prompt
    lengths = MEDIAN_LENGTH * np.exp(SPREAD_OF_LENGTHS * rng.standard_normal(samples))
    lengths = np.clip(lengths.round().astype(int), 1, LONGEST)
    longest, dtype = int(lengths.max()), id_dtype(experts)
    sizes = f"{samples} samples x {longest} tokens x {layers} layers of {experts} experts"
    check_memory(
        f"drawing {sizes}",
        samples * longest * layers * top_k * dtype.itemsize + 16 * layers * experts * longest,
    )

    ids = np.zeros((samples, longest, layers, top_k), dtype)
    vectors = _draw_vectors(calibration, layers, experts, rng)
    domain = rng.integers(calibration.domains, size=steps * prompts).repeat(responses_per_prompt)
    for sample in range(samples):
        if sample and sample % per_step == 0:
            vectors = _turn(vectors, turn, rng)
        if sample % responses_per_prompt == 0:
            own = rng.standard_normal((layers, experts), dtype=np.float32)
        logits, factors = _logits(calibration, vectors, int(domain[sample]), own)
        ids[sample, : lengths[sample]] = draw_routes(logits, factors, lengths[sample], top_k, rng)
    mask = np.arange(longest) < lengths[:, None]
    step = np.arange(samples) // per_step
    recording = Recording(
        step=step,
        prompt=np.arange(samples) % per_step // responses_per_prompt,
        versions=np.where(mask, step[:, None], UNKNOWN),
        provenance={
            "synthesised by": "relibra_jax.traces.drawn_steps.draw_steps: no model was run",
            "unevenness": f"as of {calibration.source}",
            "drift": f"{turn:g} rad an update; {TURN:g} rad change a tenth of the choices, as arXiv 2507.18071 reports",
            "lengths": f"log-normal, median {MEDIAN_LENGTH}, sigma {SPREAD_OF_LENGTHS:g}, cut at {LONGEST}: assumed",
            "seed": seed,
        },
    )
    return make_trace(
        RoutingReplay(ids, mask),
        experts,
        f"synthetic-{experts}-steps",
        f"synthetic, seed {seed}, calibrated on {calibration.source}, with drift between steps by assumption",
        category=np.array([f"domain {index:03}" for index in domain]),
        synthetic=True,
        recording=recording,
    )


def changed_choices(
    size: Synthetic, turn: float, *, layers: int = 2, tokens: int = 1024, seed: int = 0
) -> float:
    """Return the share of the experts of the same tokens that change in an update that turns by an angle.

    >>> from relibra_jax.traces.calibrated import SYNTHETIC
    >>> changed_choices(SYNTHETIC["synthetic-32"], 0.0, tokens=16)
    0.0
    """
    calibration, experts, top_k = size
    rng = np.random.default_rng(seed)
    before = _draw_vectors(calibration, layers, experts, rng)
    after = _turn(before, turn, rng)
    changed = []
    for domain in range(8):
        own = rng.standard_normal((layers, experts), dtype=np.float32)
        used = []
        for vectors in (before, after):
            logits, factors = _logits(calibration, vectors, domain, own)
            routes = draw_routes(logits, factors, tokens // 8, top_k, np.random.default_rng((seed, domain)))
            used.append(np.zeros((*routes.shape[:2], experts), bool))
            np.put_along_axis(used[-1], routes, True, axis=-1)
        changed.append((used[1] & ~used[0]).sum() / used[1].sum())
    return float(np.mean(changed))


def _draw_vectors(
    calibration: Calibration, layers: int, experts: int, rng: np.random.Generator
) -> Float[np.ndarray, "V L E"]:
    """Draw the normal vectors that training turns: one of popularity, one of each domain, one of each factor."""
    count = 1 + calibration.domains + calibration.dimensions
    return rng.standard_normal((count, layers, experts), dtype=np.float32)


def _turn(
    vectors: Float[np.ndarray, "V L E"], angle: float, rng: np.random.Generator
) -> Float[np.ndarray, "V L E"]:
    """Turn normal vectors by an angle in a random direction, which keeps their distribution."""
    random = rng.standard_normal(vectors.shape, dtype=np.float32)
    return np.float32(np.cos(angle)) * vectors + np.float32(np.sin(angle)) * random


def _logits(
    calibration: Calibration,
    vectors: Float[np.ndarray, "V L E"],
    domain: int,
    own: Float[np.ndarray, "L E"],
) -> tuple[Float[np.ndarray, "L E"], Float[np.ndarray, "L D E"]]:
    """Return what all tokens of a prompt's samples have in common, and the experts' vectors of factors."""
    share = calibration.domain_share
    topic = math.sqrt(share) * vectors[1 + domain] + math.sqrt(1 - share) * own
    # The experts have the quantiles of popularity in the order of the first vector.
    rank = vectors[0].argsort(-1).argsort(-1)
    popularity = popularity_quantiles(own.shape[-1]).astype(np.float32)[rank]
    factors = vectors[1 + calibration.domains :].swapaxes(0, 1)
    scale = np.float32(calibration.factors / math.sqrt(calibration.dimensions))
    return calibration.popularity * popularity + calibration.topic * topic, scale * factors
