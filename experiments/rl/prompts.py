"""The prompts of a run: drawn from a task by a seed, and only those that there is room for."""

import itertools
from typing import Final

import numpy as np
from jaxtyping import Int

from experiments.rl.checkpoint_tokenizer import load_tokenizer
from experiments.rl.configs import Train
from experiments.rl.processes import check_same
from experiments.rl.tasks import Example, Task
from experiments.rl.tokens import BYTES, Tokenizer

MORE_EXAMPLES: Final = 8
"""So many times the examples that are needed are drawn where some have no room."""


class Prompts:
    """Draws examples of a task, and makes tokens of them.

    Args:
        config: the settings of the run.
        task: the task.
        tokenizer: the policy's tokenizer.
    """

    def __init__(self, config: Train, task: Task, tokenizer: Tokenizer):
        self.config, self.task, self.tokenizer = config, task, tokenizer

    def groups(self, seed: tuple[int, ...]) -> list[Example]:
        """The examples of a batch, each as often as it is responded to; the same for the same seed."""
        drawn = self.draw(seed, self.config.prompts)
        return [example for example in drawn for _ in range(self.config.responses_per_prompt)]

    def draw(self, seed: tuple[int, ...], count: int) -> list[Example]:
        """The first examples that there is room for.

        Raises:
            ValueError: if there are too few of them among several times as many.
        """
        config = self.config
        for times in (1, MORE_EXAMPLES):
            drawn = self.task.sample(seed, times * count)
            lengths = np.array([self._lengths(example) for example in drawn])
            fits = (lengths <= (config.prompt_tokens, config.response_tokens)).all(1)
            fitting = list(itertools.compress(drawn, fits))
            if len(fitting) >= count:
                return fitting[:count]
        longest = lengths.max(0)
        raise ValueError(
            f"task {self.task.name!r}: of {len(drawn)} examples {len(fitting)} fit prompt_tokens="
            f"{config.prompt_tokens} and response_tokens={config.response_tokens}, {count} are needed; the longest"
            f" have {longest[0]} and {longest[1]}"
        )

    def encode(self, examples: list[Example]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
        """The tokens of prompts, aligned to the left, and their numbers."""
        texts = [self.tokenizer.encode_prompt(example.prompt) for example in examples]
        tokens = self.tokenizer.pad_rows(texts, self.config.prompt_tokens)
        check_same(tokens, "prompts")
        return tokens, np.array([len(text) for text in texts], np.int32)

    def _lengths(self, example: Example) -> tuple[int, int]:
        """The tokens of prompt and answer."""
        tokenizer = self.tokenizer
        return len(tokenizer.encode_prompt(example.prompt)), len(tokenizer.encode_answer(example.answer))


def find_tokenizer(config: Train) -> Tokenizer:
    """The tokenizer beside the checkpoint that a run starts from; bytes for models that were made for them.

    Raises:
        ValueError: as `experiments.rl.checkpoint_tokenizer.load_tokenizer` says.
    """
    bytes_suffice = config.model_config.vocabulary == BYTES.size
    if config.model is None or (bytes_suffice and not (config.model / "tokenizer.json").exists()):
        return BYTES
    return load_tokenizer(config.model)
