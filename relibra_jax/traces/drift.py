"""Changes of experts' loads from one training step to the next, and how much of them chance explains.

The loads of two steps differ even if the weights do not, because each step has other prompts. So every number here is
computed between halves: two halves of one step differ by chance alone, and a half of one step and a half of the next,
which have as many samples, differ by chance and by what training changed. Halves keep the responses to a prompt
together, because these use similar experts.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from relibra_jax.traces.statistics import hot_experts

SPLITS: Final = 16
"""The number of random halvings over which changes are averaged."""


class Change(NamedTuple):
    """How different experts' loads are, NaN where a step has too few prompts to be halved."""

    distance: Float[np.ndarray, "S L"]
    """The total variation distance of the shares of the load: the share of token copies that went elsewhere."""
    churn: Float[np.ndarray, "S L"]
    """The share of the hottest eighth of the experts that is not among the hottest eighth of the other."""


class Drift(NamedTuple):
    """The changes from each of S steps to the next, for every layer."""

    between: Change
    """Changes between halves of a step and of the next one."""
    by_chance: Change
    """Changes between two halves of one step, the mean of the two steps."""


def measure_drift(
    load: Int[np.ndarray, "B L E"],
    step: Integer[np.ndarray, " B"],
    prompt: Integer[np.ndarray, " B"] | None = None,
) -> Drift:
    """Measure how experts' loads change from step to step, and how much they change by chance.

    Args:
        load: the token copies that every sample sends to every expert.
        step: the step of each sample. There must be at least two different ones; they are compared in ascending order.
        prompt: the number of each sample's prompt within its step. None if every sample has a prompt of its own.

    Returns:
        The changes between each step and the next.

    >>> load = np.array([[[4, 0]], [[4, 0]], [[3, 1]], [[3, 1]]])
    >>> drift = measure_drift(load, np.array([0, 0, 1, 1]))
    >>> drift.between.distance.tolist(), drift.by_chance.distance.tolist()
    ([[0.25]], [[0.0]])
    """
    rng, steps = np.random.default_rng(0), np.unique(step)
    prompt = np.arange(len(step)) if prompt is None else prompt
    between, by_chance = [], []
    for _ in range(SPLITS):
        halves = np.stack([_halve(load, step == each, prompt, rng) for each in steps])
        within = _change(halves[:, 0], halves[:, 1])
        pairs = [_change(halves[:-1, one], halves[1:, other]) for one in (0, 1) for other in (0, 1)]
        between.append(_mean(pairs))
        by_chance.append(
            _mean([Change(*(part[:-1] for part in within)), Change(*(part[1:] for part in within))])
        )
    return Drift(_mean(between), _mean(by_chance))


def _halve(
    load: Int[np.ndarray, "B L E"],
    chosen: Bool[np.ndarray, " B"],
    prompt: Integer[np.ndarray, " B"],
    rng: np.random.Generator,
) -> Int[np.ndarray, "2 L E"]:
    """Sum the loads of two random halves of a step's prompts, of which one is left out if their number is odd."""
    prompts, numbers = np.unique(prompt[chosen], return_inverse=True)
    half = len(prompts) // 2
    order = rng.permutation(len(prompts))
    first, second = np.isin(numbers, order[:half]), np.isin(numbers, order[half : 2 * half])
    return np.stack([load[chosen][first].sum(0), load[chosen][second].sum(0)])


def _change(one: Int[np.ndarray, "S L E"], other: Int[np.ndarray, "S L E"]) -> Change:
    empty = (one.sum(-1) == 0) | (other.sum(-1) == 0)
    shares = [load / np.maximum(load.sum(-1, keepdims=True), 1) for load in (one, other)]
    hot = [np.zeros(load.shape, bool) for load in (one, other)]
    for mask, load in zip(hot, (one, other), strict=True):
        np.put_along_axis(mask, hot_experts(load), True, axis=-1)
    churn = (hot[0] & ~hot[1]).sum(-1) / hot[0].sum(-1)
    distance = np.abs(shares[0] - shares[1]).sum(-1) / 2
    return Change(*(np.where(empty, np.nan, part) for part in (distance, churn)))


def _mean(changes: list[Change]) -> Change:
    return Change(*(np.mean(parts, axis=0) for parts in zip(*changes, strict=True)))
