"""The prompts of a run, drawn from a task by a seed. Examples that are too long are skipped."""

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
"""The multiple of the needed examples that is drawn if some examples are too long."""


class Prompts:
    """The examples of a run's task, and their tokens.

    Args:
        config: the settings of the run.
        task: the task.
        tokenizer: the policy's tokenizer.
    """

    def __init__(self, config: Train, task: Task, tokenizer: Tokenizer):
        self.config, self.task, self.tokenizer = config, task, tokenizer

    def groups(self, seed: tuple[int, ...]) -> list[Example]:
        """Draw the examples of a batch, each repeated for all its responses. Equal seeds give equal examples."""
        examples = self.draw(seed, self.config.prompts)
        return [example for example in examples for _ in range(self.config.responses_per_prompt)]

    def draw(self, seed: tuple[int, ...], count: int) -> list[Example]:
        """Draw examples whose prompts and answers are not too long.

        Args:
            seed: the seed of the task's examples.
            count: the number of examples.

        Returns:
            The first ``count`` examples that fit.

        Raises:
            ValueError: if fewer than ``count`` of `MORE_EXAMPLES` times as many examples fit.
        """
        config = self.config
        for times in (1, MORE_EXAMPLES):
            examples = self.task.sample(seed, times * count)
            lengths = np.array([self._lengths(example) for example in examples])
            fits = (lengths <= (config.prompt_tokens, config.response_tokens)).all(1)
            fitting = list(itertools.compress(examples, fits))
            if len(fitting) >= count:
                return fitting[:count]
        longest = lengths.max(0)
        raise ValueError(
            f"task {self.task.name!r}: only {len(fitting)} of {len(examples)} examples fit prompt_tokens="
            f"{config.prompt_tokens} and response_tokens={config.response_tokens}, and {count} are needed; the longest"
            f" prompt has {longest[0]} tokens and the longest answer {longest[1]}"
        )

    def encode(self, examples: list[Example]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
        """Encode the prompts of examples; return their tokens, aligned to the left, and their lengths."""
        prompts = [self.tokenizer.encode_prompt(example.prompt) for example in examples]
        tokens = self.tokenizer.pad_sequences(prompts, self.config.prompt_tokens)
        check_same(tokens, "prompts")
        return tokens, np.array([len(prompt) for prompt in prompts], np.int32)

    def _lengths(self, example: Example) -> tuple[int, int]:
        """Count the tokens of an example's prompt and answer."""
        tokenizer = self.tokenizer
        return len(tokenizer.encode_prompt(example.prompt)), len(tokenizer.encode_answer(example.answer))


def find_tokenizer(config: Train) -> Tokenizer:
    """Load the tokenizer of the checkpoint that a run starts from, or `BYTES` for a model of bytes.

    Raises:
        ValueError: under the conditions of `experiments.rl.checkpoint_tokenizer.load_tokenizer`.
    """
    bytes_suffice = config.model_config.vocabulary == BYTES.size
    if config.model is None or (bytes_suffice and not (config.model / "tokenizer.json").exists()):
        return BYTES
    return load_tokenizer(config.model)
