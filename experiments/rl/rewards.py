"""Rewards of responses, scored sample by sample. If the reward function fails, only that sample is left out."""

import math
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.rl.processes import from_first
from experiments.rl.tasks import Example, Task
from experiments.rl.tokens import BYTES, Tokenizer
from relibra_jax.contract.types import Array

SOLVED: Final = 1.0
"""The reward from which on a response counts as solving its prompt."""


class Rewards(NamedTuple):
    """The rewards of a batch."""

    reward: Float[np.ndarray, " B"]
    """The reward of each sample, 0 for samples without a reward."""
    scored: Bool[np.ndarray, " B"]
    """True for samples with a reward. False if the reward function failed or the response is unfinished."""
    failures: list[str]
    """A text for each failure, with the sample, its prompt, its response and the error."""


def unscored(samples: int) -> Rewards:
    """Return the rewards of samples that have not been scored."""
    return Rewards(np.zeros(samples, np.float32), np.zeros(samples, bool), [])


def share_rewards(rewards: Rewards) -> Rewards:
    """Send the rewards of the first process to all others. The texts of failures stay on the first process."""
    reward, scored = from_first((rewards.reward, rewards.scored))
    return Rewards(np.asarray(reward), np.asarray(scored), rewards.failures)


def mean_or_none(rewards: Float[np.ndarray, " samples"]) -> float | None:
    """Return the mean, or None if there are no rewards."""
    return float(rewards.mean()) if rewards.size else None


def measure_solved(rewards: Rewards, responses_per_prompt: int) -> dict[str, float | None]:
    """Measure the shares of prompts that all and that none of their responses solve.

    Args:
        rewards: the rewards of successive responses to each prompt. Those without a reward do not count.
        responses_per_prompt: the number of responses to each prompt.

    >>> rewards = Rewards(np.array([1, 1, 0, 1, 0, 0.5], np.float32), np.ones(6, bool), [])
    >>> list(measure_solved(rewards, 2).values())
    [0.3333333333333333, 0.3333333333333333]
    """
    reward = rewards.reward.reshape(-1, responses_per_prompt)
    scored = rewards.scored.reshape(reward.shape)
    solved, known = reward >= SOLVED, scored.any(1)
    return {
        "reward/solved_by_all": mean_or_none((solved | ~scored).all(1)[known].astype(np.float64)),
        "reward/solved_by_none": mean_or_none((~solved | ~scored).all(1)[known].astype(np.float64)),
    }


def score_responses(
    task: Task,
    examples: list[Example],
    tokens: Int[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    tokenizer: Tokenizer = BYTES,
    *,
    finished: Bool[Array, " B"] | None = None,
) -> Rewards:
    """Score every sample that has finished.

    Args:
        task: the task with the reward function. Its exceptions are caught and reported in ``failures``.
        examples: the example that each sample responds to.
        tokens: the prompt and the response of each sample.
        response_mask: True on sampled tokens.
        tokenizer: the tokenizer that decodes the sampled tokens. The task scores their last turn.
        finished: False for unfinished responses, which get no reward yet. None if all have finished.

    Returns:
        The rewards, and the failures of the reward function.

    >>> from experiments.rl.tasks import TASKS
    >>> tokens = np.array([[257, 52, 258], [257, 53, 258]])
    >>> examples, response_mask = [Example("2+2=", "4")] * 2, np.array([[False, True, True]] * 2)
    >>> score_responses(TASKS["add"], examples, tokens, response_mask).reward.tolist()
    [1.0, 0.0]
    """
    scored = np.ones(len(examples), bool) if finished is None else np.array(finished)
    reward, failures = np.zeros(len(examples), np.float32), []
    for sample in np.flatnonzero(scored):
        example, sampled = examples[sample], np.asarray(tokens[sample])[response_mask[sample]]
        completion = tokenizer.decode_turns(sampled.tolist())[-1]
        try:
            value = float(task.score(completion, example))
            if not math.isfinite(value):
                raise ValueError(f"a reward must be finite, not {value}")
            reward[sample] = value
        except Exception as error:  # the user's reward function may raise anything
            scored[sample] = False
            failures.append(f"sample {sample}: prompt {example.prompt!r}, response {completion!r}: {error!r}")
    return Rewards(reward, scored, failures)
