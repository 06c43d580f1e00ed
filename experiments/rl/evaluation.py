"""Evaluations: how their responses are sampled, and pass@k.

pass@k is the probability that at least one of k responses to a prompt is correct. With n responses of which c are
correct, its unbiased estimate is 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374, section 2.1).
"""

import dataclasses
import math
import statistics
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from relibra_jax.support.limits import check_integer, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluations of a run: responses to prompts that it never trains on.

    Raises:
        ValueError: if a number is out of its range.
    """

    temperature: float | None = None
    """The sampling temperature of evaluations. 0 takes the most likely tokens. None takes that of training."""
    samples: int | None = None
    """The number of responses to each prompt. Every evaluation batch has as many responses as a batch of training.
    None takes ``responses_per_prompt``, and 1 with temperature 0."""
    pass_at: int = 1
    """k of pass@k: the probability that at least one of k responses to a prompt is correct."""
    correct: float = 1.0
    """The reward from which a response counts as correct: in pass@k, and in the shares of prompts that are solved."""
    prompts_file: Path | None = None
    """The evaluation prompts of ``prompts_file``, in a file of the same form.
    Prompts that both files have are left out of training."""
    share: float = 0.1
    """The share of different prompts in ``prompts_file`` that are kept for evaluation, if they have no own file.
    Which ones follows from their texts alone."""

    def __post_init__(self) -> None:
        if self.temperature is not None:
            check_not_negative("evaluation.temperature", self.temperature)
        if self.samples is not None:
            check_integer("evaluation.samples", self.samples, least=1)
        check_integer("evaluation.pass_at", self.pass_at, least=1)
        if not math.isfinite(self.correct):
            raise ValueError(f"evaluation.correct={self.correct} must be finite")
        if not 0 < self.share < 1:
            raise ValueError(f"evaluation.share={self.share} must be above 0 and below 1")
        if self.temperature == 0 and self.samples not in (None, 1):
            raise ValueError(
                f"evaluation.samples={self.samples} with evaluation.temperature=0: all responses to a prompt would be"
                " equal"
            )
        if self.prompts_file is not None:  # the run may be resumed from another folder
            object.__setattr__(self, "prompts_file", self.prompts_file.resolve())


def pass_at_k(
    correct: Bool[np.ndarray, "prompts samples"], scored: Bool[np.ndarray, "prompts samples"], k: int
) -> float | None:
    """Estimate pass@k without bias.

    Args:
        correct: True for correct responses, of every prompt.
        scored: False for responses without a reward, which do not count.
        k: the number of responses of which one must be correct.

    Returns:
        The mean over the prompts with at least k responses that have a reward. None if there are none.

    >>> pass_at_k(np.array([[True, False, False, False]]), np.ones((1, 4), bool), 2)
    0.5
    """
    counts = zip(scored.sum(1).tolist(), (correct & scored).sum(1).tolist(), strict=True)
    estimates = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k]
    return statistics.fmean(estimates) if estimates else None
