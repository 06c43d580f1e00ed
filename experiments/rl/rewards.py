"""Rewards of responses, scored sample by sample. If the reward function fails, only that sample is left out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.rl.metrics import SHOWN_FAILURES
from experiments.rl.processes import from_first
from experiments.rl.reward_pool import PoolSettings, RewardPool
from experiments.rl.reward_worker import call_reward
from experiments.rl.tasks import Example, Task
from experiments.rl.tokens import BYTES, Tokenizer
from relibra_jax.contract.types import Array


class Failure(NamedTuple):
    """A sample without a reward, because its reward function failed."""

    kind: str
    """One of `experiments.rl.reward_worker.FAILURE_KINDS`."""
    text: str
    """The sample, its prompt, its response and the error."""


class Rewards(NamedTuple):
    """The rewards of a batch."""

    reward: Float[np.ndarray, " B"]
    """The reward of each sample, 0 for samples without a reward."""
    scored: Bool[np.ndarray, " B"]
    """True for samples with a reward. False if the reward function failed or the response is unfinished."""
    failures: list[Failure]
    """The failures."""


def describe_failures(failures: Sequence[Failure]) -> list[str]:
    """Return the texts of at most `SHOWN_FAILURES` failures: the first of each kind, then others.

    >>> describe_failures([Failure("raised", f"sample {n}") for n in range(9)] + [Failure("timed_out", "sample 9")])
    ['sample 0', 'sample 9', 'sample 1', 'sample 2']
    """
    by_kind: dict[str, list[str]] = {}
    for failure in failures:
        by_kind.setdefault(failure.kind, []).append(failure.text)
    first = [texts[0] for texts in by_kind.values()]
    others = [text for texts in by_kind.values() for text in texts[1:]]
    return (first + others)[:SHOWN_FAILURES]


def unscored(samples: int) -> Rewards:
    """Return the rewards of samples that have not been scored."""
    return Rewards(np.zeros(samples, np.float32), np.zeros(samples, bool), [])


def share_rewards(rewards: Rewards) -> Rewards:
    """Send the rewards of the first process to all others. Failures stay on the first process."""
    reward, scored = from_first((rewards.reward, rewards.scored))
    return Rewards(np.asarray(reward), np.asarray(scored), rewards.failures)


def mean_or_none(rewards: Float[np.ndarray, " samples"]) -> float | None:
    """Return the mean, or None if there are no rewards."""
    return float(rewards.mean()) if rewards.size else None


def measure_solved(rewards: Rewards, responses_per_prompt: int, correct: float) -> dict[str, float | None]:
    """Measure the shares of prompts that all and that none of their responses solve.

    Args:
        rewards: the rewards of successive responses to each prompt. Those without a reward do not count.
        responses_per_prompt: the number of responses to each prompt.
        correct: the reward from which a response counts as correct.

    >>> rewards = Rewards(np.array([1, 1, 0, 1, 0, 0.5], np.float32), np.ones(6, bool), [])
    >>> list(measure_solved(rewards, 2, 1.0).values())
    [0.3333333333333333, 0.3333333333333333]
    """
    reward = rewards.reward.reshape(-1, responses_per_prompt)
    scored = rewards.scored.reshape(reward.shape)
    solved, known = reward >= correct, scored.any(1)
    return {
        "reward/solved_by_all": mean_or_none((solved | ~scored).all(1)[known].astype(np.float64)),
        "reward/solved_by_none": mean_or_none((~solved | ~scored).all(1)[known].astype(np.float64)),
    }


def mean_by_task(
    task: Task,
    examples: Sequence[Example],
    rewards: Float[np.ndarray, " samples"],
    scored: Bool[np.ndarray, " samples"],
) -> list[float | None]:
    """Return the mean reward of the scored samples of each task of a mixture, in the order of the tasks.

    Args:
        task: the mixture, or a task, whose list has one element.
        examples: the example of every sample.
        rewards: the rewards.
        scored: True for samples with a reward.
    """
    names = np.array([example.task for example in examples])
    of_task = [names == name if task.parts else np.ones(len(rewards), bool) for name in task.all_parts]
    return [mean_or_none(rewards[scored & rows]) for rows in of_task]


def score_responses(
    task: Task,
    examples: list[Example],
    tokens: Int[Array, "B T"],
    response_mask: Bool[Array, "B T"],
    tokenizer: Tokenizer = BYTES,
    *,
    finished: Bool[Array, " B"] | None = None,
    pool: RewardPool | None = None,
) -> Rewards:
    """Score every sample that has finished.

    Args:
        task: the task with the reward function. Its exceptions are caught and reported in ``failures``.
        examples: the example that each sample responds to.
        tokens: the prompt and the response of each sample.
        response_mask: True on sampled tokens.
        tokenizer: the tokenizer that decodes the sampled tokens. The task scores their last turn.
        finished: False for unfinished responses, which get no reward yet. None if all have finished.
        pool: the processes that score for tasks with a ``function``. None scores in this process.

    Returns:
        The rewards, and the failures of the reward function.

    >>> from experiments.rl.tasks import TASKS
    >>> tokens = np.array([[257, 52, 258], [257, 53, 258]])
    >>> examples, response_mask = [Example("2+2=", "4")] * 2, np.array([[False, True, True]] * 2)
    >>> score_responses(TASKS["add"], examples, tokens, response_mask).reward.tolist()
    [1.0, 0.0]
    """
    scored = np.ones(len(examples), bool) if finished is None else np.array(finished)
    completions = {
        sample: tokenizer.decode_turns(np.asarray(tokens[sample])[response_mask[sample]].tolist())[-1]
        for sample in np.flatnonzero(scored).tolist()
    }
    calls, answers = {}, {}
    for sample, completion in completions.items():
        part = task.parts[examples[sample].task] if task.parts else task
        if pool is None or part.function is None:
            answers[sample] = call_reward(part.score, completion, examples[sample])
        else:
            of_task = part.function.of_task
            example: Any = examples[sample] if of_task else examples[sample].entry
            calls[sample] = (part.function, (completion, example))
    if pool is not None:
        answers |= dict(zip(calls, pool.call(list(calls.values())), strict=True))
    reward, failures = np.zeros(len(examples), np.float32), []
    for sample, completion in completions.items():
        kind, value = answers[sample]
        if kind is None:
            reward[sample] = value
        else:
            scored[sample] = False
            text = f"sample {sample}: prompt {examples[sample].prompt!r}, response {completion!r}: {value}"
            failures.append(Failure(kind, text))
    return Rewards(reward, scored, failures)


def start_pool(task: Task, settings: PoolSettings) -> RewardPool | None:
    """Start the processes for the reward functions of a task. None if they all run in the run's own process."""
    functions = [part.function for part in task.all_parts.values() if part.function is not None]
    return RewardPool(functions, settings) if functions else None
