"""Rewards of responses, scored sample by sample: a reward function that fails costs its sample, not the run."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.rl.tasks import Example, Task
from experiments.rl.tokens import BYTES, Tokenizer
from relibra_jax.types import Array


class Rewards(NamedTuple):
    """What the samples of a batch are worth."""

    reward: Float[np.ndarray, " B"]
    """The reward of each sample, 0 where there is none."""
    scored: Bool[np.ndarray, " B"]
    """False where the reward function failed, and for responses that go on."""
    failures: list[str]
    """For each failure: the sample, its prompt and response, and the error."""


def unscored(samples: int) -> Rewards:
    """The rewards of samples that have not been scored."""
    return Rewards(np.zeros(samples, np.float32), np.zeros(samples, bool), [])


def score_responses(
    task: Task,
    examples: list[Example],
    tokens: Int[Array, "B T"],
    response: Bool[Array, "B T"],
    tokenizer: Tokenizer = BYTES,
    *,
    finished: Bool[Array, " B"] | None = None,
) -> Rewards:
    """Score every sample that has finished.

    Args:
        task: the task whose reward function is called; whatever it raises is caught.
        examples: the example that each sample responds to.
        tokens: prompt and response of each sample.
        response: True on sampled tokens.
        tokenizer: the tokenizer that makes text of sampled tokens.
        finished: False for responses that go on, which get no reward yet; None if all have finished.

    Returns:
        See `Rewards`.

    >>> from experiments.rl.tasks import TASKS
    >>> tokens = np.array([[257, 52, 258], [257, 53, 258]])
    >>> examples, response = [Example("2+2=", "4")] * 2, np.array([[False, True, True]] * 2)
    >>> score_responses(TASKS["add"], examples, tokens, response).reward.tolist()
    [1.0, 0.0]
    """
    scored = np.ones(len(examples), bool) if finished is None else np.array(finished)
    reward, failures = np.zeros(len(examples), np.float32), []
    for sample in np.flatnonzero(scored):
        example, sampled = examples[sample], np.asarray(tokens[sample])[response[sample]]
        completion = tokenizer.decode(sampled.tolist())
        try:
            value = float(task.score(completion, example))
            if not math.isfinite(value):
                raise ValueError(f"a reward of {value}")
            reward[sample] = value
        except Exception as error:  # it is the user's code
            scored[sample] = False
            failures.append(f"sample {sample}: prompt {example.prompt!r}, response {completion!r}: {error!r}")
    return Rewards(reward, scored, failures)
