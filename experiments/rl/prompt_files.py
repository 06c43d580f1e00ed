"""Prompts of your own: files of JSON lines, with a reward function of your own or answers to compare with.

Every line is a JSON object with a ``prompt``, which is a text or a list of chat messages, and possibly an ``answer``.
It may have any further keys, which the reward function gets with the others. Lines whose prompt or answer is too long
are skipped, as with other tasks.

Some prompts are kept for evaluations: those of a file of their own, or else a share of the prompts, which follows from
their texts alone. So neither the seed nor the order of the lines changes which ones they are, and a prompt that is
there twice is never in both parts.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.rl.configs import Train
from experiments.rl.reward_worker import RewardFunction
from experiments.rl.tasks import Example, Task, exact
from experiments.rl.tokens import Message, Prompt, Tokenizer
from relibra_jax.support.json_text import parse_json
from relibra_jax.support.outside import import_function
from relibra_jax.support.suggestions import suggest_names

MESSAGE_KEYS: Final = ("role", "content")


class Line(NamedTuple):
    """A line of a file of prompts."""

    place: str
    """The file and the number of the line, for error messages."""
    prompt: Prompt
    """The prompt."""
    answer: str | None
    """The answer. None if the line has none."""
    entry: dict[str, Any]
    """The whole object."""


def read_prompts(path: Path, *, answers_for: str | None = None) -> list[Line]:
    """Read a file of prompts. Empty lines are skipped.

    Args:
        path: the file, in UTF-8.
        answers_for: what needs the answers, for the error message. None if lines may have none.

    Returns:
        The lines.

    Raises:
        ValueError: if the file is missing or has no prompts, or a line is not a JSON object with a prompt, or with an
            answer if it is needed. The message names file, line and key.
    """
    if not path.is_file():
        raise ValueError(f"prompts_file {path}: there is no such file")
    lines = []
    with path.open("rb") as file:
        for number, encoded in enumerate(file, 1):
            if encoded.strip():
                lines.append(_parse(f"{path}, line {number}", encoded, answers_for))
    if not lines:
        raise ValueError(f"prompts_file {path}: it has no prompts")
    return lines


def _parse(place: str, encoded: bytes, answers_for: str | None) -> Line:
    try:
        entry = parse_json(encoded.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 ({error.reason})") from error
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: expected a JSON object, found {type(entry).__name__}")
    if "prompt" not in entry:
        raise ValueError(f"{place}: no key 'prompt'{suggest_names('prompt', entry)}")
    prompt, answer = _prompt(place, entry["prompt"]), entry.get("answer")
    if answer is None and answers_for is not None:
        raise ValueError(
            f"{place}: no key 'answer'{suggest_names('answer', entry)}, which {answers_for} needs"
        )
    if not isinstance(answer, str | None):
        raise ValueError(f"{place}: 'answer' must be a text, not {answer!r}")
    return Line(place, prompt, answer, entry)


def _prompt(place: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{place}: 'prompt' must be a text or a list of messages, and not empty")
    messages = []
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict):
            raise ValueError(f"{place}: 'prompt', message {number} must be an object, not {message!r}")
        for key in MESSAGE_KEYS:
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"{place}: 'prompt', message {number}: {key!r} must be a text, not {message.get(key)!r}"
                )
        messages.append(Message(*(message[key] for key in MESSAGE_KEYS)))
    return tuple(messages)


def split_prompts(lines: list[Line], share: float) -> tuple[list[Line], list[Line]]:
    """Split lines into those for training and those for evaluation, by their prompts.

    Args:
        lines: the lines of a file.
        share: the share of different prompts for evaluation, rounded up. At least one prompt is left for training.

    Returns:
        The lines for training and those for evaluation, in their order.

    Raises:
        ValueError: if all prompts are equal.
    """
    digests = [hashlib.sha256(json.dumps(line.prompt).encode()).digest() for line in lines]
    different = sorted(set(digests))
    if len(different) < 2:
        raise ValueError(
            f"{lines[0].place}: one prompt cannot be split into training and evaluation: give more, or"
            " evaluation.prompts_file"
        )
    evaluation = set(different[: min(math.ceil(share * len(different)), len(different) - 1)])
    parts: tuple[list[Line], list[Line]] = ([], [])
    for line, digest in zip(lines, digests, strict=True):
        parts[digest in evaluation].append(line)
    return parts


def read_files(config: Train) -> tuple[list[Line], list[Line]]:
    """Read the prompts of a run with ``prompts_file``, and import its reward.

    Args:
        config: the settings of the run.

    Returns:
        The lines for training, and those for evaluation.

    Raises:
        ValueError: under the conditions of `read_prompts`, if the reward is no function of a completion and an object,
            or no prompt is left for training or for evaluation.
    """
    path, evaluation = config.prompts_file, config.evaluation
    assert path is not None
    if config.reward is not None:
        import_function("reward", config.reward, "completion", "example")
    compared = None if config.reward is not None else "comparing with it, without a reward,"
    warmup = f"the warm-up (warmup_steps={config.warmup_steps})" if config.warmup_steps else None
    lines = read_prompts(path, answers_for=compared or warmup)
    if evaluation.prompts_file is None:
        return split_prompts(lines, evaluation.share)
    kept = read_prompts(evaluation.prompts_file, answers_for=compared)
    prompts = {line.prompt for line in kept}
    training = [line for line in lines if line.prompt not in prompts]
    if not training:
        raise ValueError(f"prompts_file {path}: all its prompts are in evaluation.prompts_file, too")
    return training, kept


def file_task(config: Train, tokenizer: Tokenizer) -> Task:
    """Make the task of a run with ``prompts_file``.

    Args:
        config: the settings of the run.
        tokenizer: the policy's tokenizer, for the lengths of prompts and answers.

    Returns:
        The task. Without ``reward`` it compares with the answer, apart from blanks around it.

    Raises:
        ValueError: under the conditions of `read_files`, or if messages do not fit the tokenizer.
    """
    assert config.prompts_file is not None
    training, evaluation = read_files(config)
    function = None if config.reward is None else RewardFunction(config.reward, of_task=False)

    def score(completion: str, example: Example) -> float:
        return exact(completion, example) if function is None else function.load()(completion, example.entry)

    return Task(
        name=config.prompts_file.name,
        draw=_Source(training, config, tokenizer, answered=function is None or config.warmup_steps > 0).draw,
        draw_evaluation=_Source(evaluation, config, tokenizer, answered=function is None).draw,
        score=score,
        function=function,
    )


class _Source:
    """Lines as a source of examples: a batch has all that fit before it has one twice.

    Args:
        lines: the lines.
        config: the settings of the run, with the largest lengths.
        tokenizer: the tokenizer.
        answered: whether the policy must be able to write the answers.
    """

    def __init__(self, lines: list[Line], config: Train, tokenizer: Tokenizer, *, answered: bool):
        self._lines, self._config, self._tokenizer = lines, config, tokenizer
        self._answered = answered
        self._known: dict[int, bool] = {}
        self._check_messages()
        if not any(map(self._fits, range(len(lines)))):
            shortest = min(len(self._encode(line)) for line in lines)
            raise ValueError(
                f"{lines[0].place} and following: none of {len(lines)} prompts fits prompt_tokens="
                f"{config.prompt_tokens}, with an answer of response_tokens={config.response_tokens}; the shortest"
                f" prompt has {shortest} tokens"
            )

    def draw(self, seed: int, count: int) -> list[Example]:
        """Draw examples that fit."""
        rng, drawn = np.random.default_rng(seed), list[Example]()
        while len(drawn) < count:
            for index in rng.permutation(len(self._lines)).tolist():
                if self._fits(index):
                    line = self._lines[index]
                    drawn.append(
                        Example(line.prompt, line.answer or "" if self._answered else "", line.entry)
                    )
                if len(drawn) == count:
                    break
        return drawn

    def _check_messages(self) -> None:
        """Encode one prompt of each order of roles, which is what chat templates reject."""
        by_roles = {
            tuple(message.role for message in line.prompt): line
            for line in self._lines
            if not isinstance(line.prompt, str)
        }
        for line in by_roles.values():
            self._encode(line)

    def _encode(self, line: Line) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(line.prompt)
        except ValueError as error:
            raise ValueError(f"{line.place}: 'prompt': {error}") from error

    def _fits(self, index: int) -> bool:
        if index not in self._known:
            line, config = self._lines[index], self._config
            answer = self._tokenizer.encode_answer(line.answer or "") if self._answered else []
            fits = len(answer) <= config.response_tokens and len(self._encode(line)) <= config.prompt_tokens
            self._known[index] = fits
        return self._known[index]
