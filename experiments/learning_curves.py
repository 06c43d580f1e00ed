"""Learning curves: what a training run had used before each of its evaluations, and the mean over several runs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.rl.metrics import EVALUATE, LEARN


def mean_and_error(values: Float[np.ndarray, "runs *shape"]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the mean over runs, and its standard error: the deviation of a sample over the root of their number.

    Args:
        values: the values of every run.

    Returns:
        The mean, and its error. None in place of the error for a single run.

    >>> [float(number) for number in mean_and_error(np.array([0.5, 0.75]))]
    [0.625, 0.125]
    """
    mean = np.asarray(values.mean(0))
    return mean, np.asarray(values.std(0, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


class Curve(NamedTuple):
    """What a run had used before each of its evaluations, the first one after the warm-up, and its rewards."""

    tokens: list[int]
    """The tokens that rollouts, recomputes and updates had run."""
    decoding_steps: list[int]
    """The decoding steps of all rollouts."""
    reward: list[float]
    """The mean reward on the evaluation prompts."""
    slots_used_share: float | None
    """The share of samples times decoding steps in which a token was sampled, in the whole run. None without steps that
    learn."""
    explained_variance: float | None
    """The mean explained variance of the critic in the second half of the run. None without a critic."""


class MeanCurve(NamedTuple):
    """The mean of several curves."""

    positions: Float[np.ndarray, " P"]
    """The positions of the first curve, up to the end of the shortest."""
    mean: Float[np.ndarray, " P"]
    """The mean reward."""
    error: Float[np.ndarray, " P"] | None
    """Its standard error. None for a single curve."""


def read_curve(lines: Sequence[Mapping[str, Any]]) -> Curve:
    """Read the curve of a run from its metrics.

    Args:
        lines: the metrics of the run, one dictionary for each step.
    """
    tokens, steps, totals, rewards = 0, 0, [], []
    for line in lines:
        if line["kind"] == LEARN:
            tokens += line["batch/tokens_run"]
            steps += line["response/decoding_steps"]
        elif line["kind"] == EVALUATE:
            totals.append((tokens, steps))
            rewards.append(line["evaluation/reward"])
    learned = [line for line in lines if line["kind"] == LEARN]
    decoding = np.array([line["response/decoding_steps"] for line in learned])
    used = np.array([line["response/slots_used_share"] for line in learned])
    second_half = [line.get("critic/explained_variance") for line in learned[len(learned) // 2 :]]
    explained = [value for value in second_half if value is not None]
    return Curve(
        tokens=[total for total, _ in totals],
        decoding_steps=[total for _, total in totals],
        reward=rewards,
        slots_used_share=float((used * decoding).sum() / decoding.sum()) if learned else None,
        explained_variance=float(np.mean(explained)) if explained else None,
    )


def decoding_steps_to(curves: Sequence[Curve], reward: float) -> float | None:
    """Return the decoding steps until the mean reward over the runs first reaches a reward. None if it never does."""
    steps, rewards, _ = over_decoding_steps(curves)
    if rewards.max() < reward:
        return None
    first = int(np.argmax(rewards >= reward))
    if first == 0:
        return float(steps[0])
    return float(np.interp(reward, rewards[first - 1 : first + 1], steps[first - 1 : first + 1]))


def over_decoding_steps(curves: Sequence[Curve]) -> MeanCurve:
    """Average the curves of several runs over their decoding steps."""
    return mean_curve([curve.decoding_steps for curve in curves], [curve.reward for curve in curves])


def mean_curve(positions: Sequence[Sequence[int]], rewards: Sequence[Sequence[float]]) -> MeanCurve:
    """Average the curves of several runs, up to the end of the shortest.

    Args:
        positions: where each run was evaluated, rising.
        rewards: the rewards of each run's evaluations.

    Returns:
        The mean curve.
    """
    end = min(each[-1] for each in positions)
    places = np.append([float(place) for place in positions[0] if place < end], float(end))
    values = np.array([np.interp(places, *run) for run in zip(positions, rewards, strict=True)])
    return MeanCurve(places, *mean_and_error(values))
