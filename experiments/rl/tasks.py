"""Tasks whose answers a few lines of code can check, so that rewards need neither a model nor a network.

A task draws examples from a seed and scores completions. The warm-up trains on the same examples, prompt and answer. A
task may reply to the turns of the policy, as a tool or a user does (`experiments.rl.turns`). A few tasks are built in.
With the extra ``rl``, every procedural task of reasoning-gym is available by its own name. A task of your own is a
function that returns it, named ``module:function``.
"""

import dataclasses
import difflib
import string
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.rl.calculator import calculate
from experiments.rl.reward_worker import RewardFunction
from experiments.rl.tokens import Prompt
from relibra_jax.support.outside import error_place, import_function
from relibra_jax.support.suggestions import suggest_names


class Example(NamedTuple):
    """A prompt with an answer."""

    prompt: Prompt
    """The text, or the messages, that the policy responds to."""
    answer: str
    """A correct answer, for the warm-up. The task may accept other answers, too."""
    entry: Any = None
    """What else a task needs for scoring: the entry of reasoning-gym, or the JSON object of a file."""
    turns: tuple[str, ...] = ()
    """Correct turns before the answer, for the warm-up of runs with several turns. The task replies to each."""
    task: str = ""
    """The name of the task that it comes from, in a mixture of tasks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A source of examples and a reward function. `TASKS` has the built-in tasks, and `find_task` finds all.

    >>> task = TASKS["add"]
    >>> [example] = task.sample(0, 1)
    >>> example.prompt, example.answer, task.score("71", example), task.score("1", example)
    ('71+0=', '71', 1.0, 0.0)
    """

    name: str
    """The name by which `find_task` finds the task."""
    draw: Callable[[int, int], Sequence[Example]]
    """The function that draws examples: ``(seed, count) -> examples``."""
    score: Callable[[str, Example], float]
    """The reward function: ``(completion, example) -> reward`` in 0..1. Equal texts get equal rewards. With several
    turns, the completion is the policy's last one."""
    reply: Callable[[Sequence[str], Example], str | None] | None = None
    """The function that replies to a turn: ``(turns, example) -> text``, or None if the response is complete. It gets
    all turns of the policy so far. None for tasks whose responses have one turn."""
    draw_evaluation: Callable[[int, int], Sequence[Example]] | None = None
    """The function that draws examples for evaluations, which training never sees. More examples of a seed begin with
    those that fewer have. None takes ``draw`` with seeds of its own."""
    function: RewardFunction | None = None
    """The reward function by its name, for the processes of `experiments.rl.reward_pool`. If its name is that of a
    task, it gets the completion and the example, else the completion and ``Example.entry``. None scores in the run's
    own process."""
    parts: Mapping[str, "Task"] = dataclasses.field(default_factory=dict)
    """The tasks of a mixture by their names (`experiments.rl.task_mixtures`). Other tasks have none."""

    @property
    def all_parts(self) -> Mapping[str, "Task"]:
        """The tasks of a mixture by their names, or this task alone."""
        return self.parts or {self.name: self}

    def sample(self, seed: int | Sequence[int], count: int, *, evaluation: bool = False) -> list[Example]:
        """Draw examples. Equal seeds give equal examples.

        Args:
            seed: the seed: one number, or several, for example the seed of a run and the number of its batch.
            count: the number of examples.
            evaluation: whether the examples are for an evaluation.

        Returns:
            The examples.
        """
        draw = self.draw_evaluation if evaluation and self.draw_evaluation is not None else self.draw
        return list(draw(int(np.random.SeedSequence(seed).generate_state(1)[0]), count))


def exact(completion: str, example: Example) -> float:
    """Return 1 if the completion is the answer, apart from blanks around it, else 0.

    >>> exact(" 12", Example("5+7=", "12")), exact("12.", Example("5+7=", "12"))
    (1.0, 0.0)
    """
    return float(completion.strip() == example.answer)


def in_place(completion: str, example: Example) -> float:
    """Return the share of correct letters in the correct place, out of the letters of the longer text.

    >>> in_place("abx", Example("copy abcd: ", "abcd"))
    0.5
    """
    matches = sum(a == b for a, b in zip(completion, example.answer, strict=False))
    return matches / max(len(completion), len(example.answer))


def reply_by_calculator(turns: Sequence[str], example: Example) -> str | None:
    """Reply to a turn that ends with an equals sign by the value of the expression before it, in a line.

    >>> example = Example("6*7=", "42", turns=("6*7=",))
    >>> [reply_by_calculator([turn], example) for turn in ("6*7=", "6*x=", "42")]
    ['42\\n', 'error: only integers and + - * ( )\\n', None]
    """
    if not turns[-1].endswith("="):
        return None
    try:
        return f"{calculate(turns[-1][:-1])}\n"
    except ValueError as error:
        return f"error: {error}\n"


def find_task(name: str) -> Task:
    """Find a task by name, among the built-in tasks and those of reasoning-gym, or import one.

    Args:
        name: the name of the task, or ``module:function`` for a function that returns one.

    Returns:
        The task. The reward function of an imported one runs in processes.

    Raises:
        ValueError: if there is no such task or function, the function returns no task, the task is not built in and
            reasoning-gym is not installed, or its examples have no answers.
    """
    if name in TASKS:
        return TASKS[name]
    if ":" in name:
        function = import_function("task", name)
        try:
            task = function()
        except Exception as error:
            raise ValueError(f"task {name!r} raised {error_place(error)}") from error
        if not isinstance(task, Task):
            raise ValueError(
                f"task {name!r} returned a {type(task).__name__}: it must return an experiments.rl.tasks.Task"
            )
        return dataclasses.replace(task, name=name, function=RewardFunction(name, of_task=True))
    try:
        import reasoning_gym  # type: ignore[import-not-found,unused-ignore]
        from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ValueError(
            f"task {name!r} must be one of {', '.join(TASKS)}{suggest_names(name, TASKS)}; for tasks of reasoning-gym"
            ' install the extra rl: pip install -e ".[rl]"'
        ) from error
    if name not in DATASETS:
        similar = difflib.get_close_matches(name, [*TASKS, *DATASETS], n=3, cutoff=0)
        raise ValueError(f"unknown task {name!r}; similar names are {', '.join(similar)}")
    judge = reasoning_gym.create_dataset(name, seed=0, size=1)
    if judge[0]["answer"] is None:
        raise ValueError(
            f"task {name!r} cannot be used: its examples have no answers for the warm-up to learn from"
        )

    def draw(seed: int, count: int) -> list[Example]:
        entries = reasoning_gym.create_dataset(name, seed=seed, size=count)
        return [Example(f"{entry['question']}\n", entry["answer"], entry) for entry in entries]

    def score(completion: str, example: Example) -> float:
        return float(judge.score_answer(completion.strip(), example.entry))

    return Task(name=name, draw=draw, score=score)


def _each(make: Callable[[np.random.Generator], Example]) -> Callable[[int, int], list[Example]]:
    def draw(seed: int, count: int) -> list[Example]:
        rng = np.random.default_rng(seed)
        return [make(rng) for _ in range(count)]

    return draw


def _word(rng: np.random.Generator, letters: str, shortest: int, longest: int) -> str:
    return "".join(rng.choice(list(letters), rng.integers(shortest, longest + 1)))


def _copy(rng: np.random.Generator) -> Example:
    word = _word(rng, string.ascii_lowercase, 3, 6)
    return Example(f"copy {word}: ", word)


def _reverse(rng: np.random.Generator) -> Example:
    word = _word(rng, string.ascii_lowercase, 3, 6)
    return Example(f"reverse {word}: ", word[::-1])


def _add(rng: np.random.Generator) -> Example:
    a, b = rng.integers(0, 100, 2)
    return Example(f"{a}+{b}=", str(a + b))


def _calculator(rng: np.random.Generator) -> Example:
    a, b, c = rng.integers(0, 100, 3)
    return Example(f"{a}*{b}+{c}=", str(a * b + c), turns=(f"{a}*{b}+{c}=",))


def _count(rng: np.random.Generator) -> Example:
    word = _word(rng, "abc", 4, 9)
    letter = str(rng.choice(list("abc")))
    return Example(f"count {letter} in {word}: ", str(word.count(letter)))


def _numbers(rng: np.random.Generator) -> Example:
    # Most answers are short and a few are long, like those of reasoning models.
    last = round(2 * 15 ** rng.random())
    return Example(f"1 to {last}: ", " ".join(map(str, range(1, last + 1))))


TASKS: Final[Mapping[str, Task]] = MappingProxyType(
    {
        "copy": Task(name="copy", draw=_each(_copy), score=in_place),
        "reverse": Task(name="reverse", draw=_each(_reverse), score=in_place),
        "add": Task(name="add", draw=_each(_add), score=exact),
        "count": Task(name="count", draw=_each(_count), score=exact),
        "numbers": Task(name="numbers", draw=_each(_numbers), score=in_place),
        "calculator": Task(
            name="calculator", draw=_each(_calculator), score=exact, reply=reply_by_calculator
        ),
    }
)
"""The built-in tasks by name."""
