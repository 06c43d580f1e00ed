"""Mixtures of tasks: the prompts of every batch are drawn from several tasks by their weights.

``numbers=2,copy=1`` draws each prompt with probability 2/3 from the task numbers and with 1/3 from copy. Every example
knows its task, which scores its responses and replies to them.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from experiments.rl.tasks import Example, Task, find_task


def find_tasks(text: str) -> Task:
    """Find a task by its name, or several tasks by their names and weights.

    Args:
        text: the name of a task, as for `experiments.rl.tasks.find_task`, or names with weights, as ``copy=2,add=1``.
            Names without a weight have the weight 1.

    Returns:
        The task, or the mixture of the tasks.

    Raises:
        ValueError: if a name is empty or given twice, a weight is not a positive number, or under the conditions of
            `experiments.rl.tasks.find_task`.

    >>> examples = find_tasks("copy=2,add=1").sample(0, 300)
    >>> sum(example.task == "copy" for example in examples)
    185
    """
    if not {",", "="} & set(text):
        return find_task(text)
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (each.strip() for each in part.partition("="))
        if not name:
            raise ValueError(
                f"task {text!r} must be written NAME=WEIGHT,NAME=WEIGHT, for example copy=2,add=1"
            )
        if name in weights:
            raise ValueError(f"task {text!r} has {name!r} twice")
        weights[name] = _weight(text, weight or "1")
    return mix_tasks(text, {name: (find_task(name), weight) for name, weight in weights.items()})


def mix_tasks(name: str, tasks: Mapping[str, tuple[Task, float]]) -> Task:
    """Mix tasks.

    Args:
        name: the name of the mixture.
        tasks: the tasks by their names, with their weights.

    Returns:
        The mixture. It replies to turns if one of the tasks does; examples of the others have one turn.
    """
    parts = {each: task for each, (task, _) in tasks.items()}
    weights = np.array([weight for _, weight in tasks.values()])

    def draw(seed: int, count: int, evaluation: bool = False) -> list[Example]:
        chosen = np.random.default_rng(seed).choice(len(parts), count, p=weights / weights.sum())
        streams: list[Iterator[Example]] = [
            iter(task.sample((seed, number), int((chosen == number).sum()), evaluation=evaluation))
            for number, task in enumerate(parts.values())
        ]
        names = list(parts)
        return [next(streams[number])._replace(task=names[number]) for number in chosen]

    def reply(turns: Sequence[str], example: Example) -> str | None:
        of_task = parts[example.task].reply
        return None if of_task is None else of_task(turns, example)

    has_own = any(task.draw_evaluation is not None for task in parts.values())
    return Task(
        name=name,
        draw=draw,
        score=lambda completion, example: parts[example.task].score(completion, example),
        reply=reply if any(task.reply is not None for task in parts.values()) else None,
        draw_evaluation=functools.partial(draw, evaluation=True) if has_own else None,
        parts=parts,
    )


def _weight(text: str, weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"task {text!r}: the weight {weight!r} must be a positive number")
    return value
