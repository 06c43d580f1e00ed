"""The prompts and supervised samples of a run, drawn from a task by a seed. Examples that are too long are skipped."""

import itertools
from typing import Final

import numpy as np
from jaxtyping import Bool, Int

from experiments.rl.checkpoint_tokenizer import load_tokenizer
from experiments.rl.configs import Train
from experiments.rl.processes import check_same
from experiments.rl.prompt_files import file_task
from experiments.rl.task_mixtures import find_tasks
from experiments.rl.tasks import Example, Task
from experiments.rl.tokens import BYTES, Tokenizer

EVALUATION: Final = 2
"""A part of the seeds of examples and random keys, for evaluations; see `experiments.rl.rollout.PROMPTS`."""
MORE_EXAMPLES: Final = 8
"""The multiple of the needed examples that is drawn if some examples are too long."""


class Prompts:
    """The examples of a run's task, and their tokens.

    Args:
        config: the settings of the run.
        task: the task.
        tokenizer: the policy's tokenizer.

    Raises:
        ValueError: if responses have several turns, but the task or the tokenizer has no replies.
    """

    def __init__(self, config: Train, task: Task, tokenizer: Tokenizer):
        self.config, self.task, self.tokenizer = config, task, tokenizer
        if config.turns > 1:
            if task.reply is None:
                raise ValueError(
                    f"turns={config.turns} needs a task that replies to turns, and task {task.name!r} does not"
                )
            # A chat template that rejects all replies fails here, before the model is made.
            tokenizer.encode_reply("?")

    def groups(self, seed: tuple[int, ...]) -> list[Example]:
        """Draw the examples of a batch, each repeated for all its responses. Equal seeds give equal examples."""
        examples = self.draw(seed, self.config.prompts)
        return [example for example in examples for _ in range(self.config.responses_per_prompt)]

    def evaluation_groups(self, number: int) -> list[Example]:
        """Draw the examples of an evaluation batch, each repeated for all its responses.

        They are the same for all seeds of runs. A task with examples for evaluations alone gives each of them once
        before one is repeated, in all batches together.
        """
        samples = self.config.evaluation_samples
        count = self.config.samples // samples
        if self.task.draw_evaluation is None:
            examples = self.draw((EVALUATION, number), count)
        else:
            examples = self.draw((EVALUATION,), (number + 1) * count, evaluation=True)[number * count :]
        return [example for example in examples for _ in range(samples)]

    def draw(self, seed: tuple[int, ...], count: int, *, evaluation: bool = False) -> list[Example]:
        """Draw examples whose prompts and answers are not too long.

        Args:
            seed: the seed of the task's examples.
            count: the number of examples.
            evaluation: whether the examples are for an evaluation.

        Returns:
            The first ``count`` examples that fit.

        Raises:
            ValueError: if fewer than ``count`` of `MORE_EXAMPLES` times as many examples fit.
        """
        config = self.config
        for times in (1, MORE_EXAMPLES):
            examples = self.task.sample(seed, times * count, evaluation=evaluation)
            lengths = np.array([self._lengths(example) for example in examples])
            most = (
                config.prompt_tokens,
                config.turn_tokens or config.response_tokens,
                config.response_tokens,
            )
            fits = (lengths <= most).all(1)
            fitting = list(itertools.compress(examples, fits))
            if len(fitting) >= count:
                return fitting[:count]
        longest = lengths.max(0)
        limits = f"prompt_tokens={config.prompt_tokens} and response_tokens={config.response_tokens}"
        found = f"the longest prompt has {longest[0]} tokens and the longest answer {longest[1]}"
        if config.turn_tokens is not None:
            limits += f" with turn_tokens={config.turn_tokens}"
            found = (
                f"the longest prompt has {longest[0]} tokens, the longest turn {longest[1]}, and responses need room"
                f" for {longest[2]}"
            )
        raise ValueError(
            f"task {self.task.name!r}: only {len(fitting)} of {len(examples)} examples fit {limits}, and {count} are"
            f" needed; {found}"
        )

    def encode(self, examples: list[Example]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
        """Encode the prompts of examples; return their tokens, aligned to the left, and their lengths."""
        prompts = [self.tokenizer.encode_prompt(example.prompt) for example in examples]
        tokens = self.tokenizer.pad_sequences(prompts, self.config.prompt_tokens)
        check_same(tokens, "prompts")
        return tokens, np.array([len(prompt) for prompt in prompts], np.int32)

    def supervise(
        self, examples: list[Example]
    ) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """Encode examples with correct responses, for the warm-up.

        Returns:
            The tokens of prompts and responses, aligned to the left, the mask of these tokens, and the mask of those
            that the policy writes.
        """
        parts = [
            [(self.tokenizer.encode_prompt(example.prompt), False), *self._response(example)]
            for example in examples
        ]
        texts = [[token for tokens, _ in row for token in tokens] for row in parts]
        tokens = self.tokenizer.pad_sequences(texts, self.config.prompt_tokens + self.config.response_tokens)
        check_same(tokens, "supervised samples")
        mask, written = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
        for sample, row in enumerate(parts):
            flags = [flag for tokens, flag in row for _ in tokens]
            mask[sample, : len(flags)], written[sample, : len(flags)] = True, flags
        return tokens, mask, written

    def _response(self, example: Example) -> list[tuple[list[int], bool]]:
        """Encode a correct response: the policy's turns and the replies between them, and which the policy writes."""
        texts = (*example.turns[: self.config.turns - 1], example.answer)
        parts = [(self.tokenizer.encode_answer(texts[0]), True)]
        for number in range(1, len(texts)):
            assert self.task.reply is not None
            reply = self.task.reply(texts[:number], example)
            if reply is None:
                raise ValueError(
                    f"task {self.task.name!r}: no reply to turns {list(texts[:number])} of its example"
                    f" {example.prompt!r}, so its answer could not follow"
                )
            parts += [
                (self.tokenizer.encode_reply(reply), False),
                (self.tokenizer.encode_answer(texts[number]), True),
            ]
        return parts

    def _lengths(self, example: Example) -> tuple[int, int, int]:
        """Count the tokens of an example's prompt and of its longest turn, and the room that its response needs.

        A turn only starts if there is room for ``turn_tokens``.
        """
        prompt, parts = self.tokenizer.encode_prompt(example.prompt), self._response(example)
        turns = [len(tokens) for tokens, written in parts if written]
        room = sum(len(tokens) for tokens, _ in parts[:-1]) + (self.config.turn_tokens or turns[-1])
        return len(prompt), max(turns), room


def find_run_task(config: Train, tokenizer: Tokenizer) -> Task:
    """Find the task of a run: that of its file of prompts, or the one that it names.

    Raises:
        ValueError: under the conditions of `experiments.rl.prompt_files.file_task` and
            `experiments.rl.task_mixtures.find_tasks`.
    """
    return find_tasks(config.task) if config.prompts_file is None else file_task(config, tokenizer)


def find_tokenizer(config: Train) -> Tokenizer:
    """Load the tokenizer of the checkpoint that a run starts from, or `BYTES` for a model of bytes.

    Raises:
        ValueError: under the conditions of `experiments.rl.checkpoint_tokenizer.load_tokenizer`.
    """
    bytes_suffice = config.model_config.vocabulary == BYTES.size
    if config.model is None or (bytes_suffice and not (config.model / "tokenizer.json").exists()):
        return BYTES
    return load_tokenizer(config.model)
