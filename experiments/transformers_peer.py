"""The process that generates with `transformers`, and the search for the settings with which it is fastest."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int

from experiments import transformers_worker
from experiments.rl.generation import Responses
from relibra_jax.models import ModelConfig

COPIED_BYTES: Final = 2**31
"""The largest size of the experts' weights that ``batched_mm`` may copy, once for each token of the prompts."""


class Reading(NamedTuple):
    """One timed run."""

    seconds: float
    cpu_seconds: float
    """The seconds of all cores together, which other programs on the machine change less."""
    tokens: int
    """The number of sampled tokens, including those that end a response."""

    @property
    def speed(self) -> float:
        """The sampled tokens per second."""
        return self.tokens / self.seconds


class Case(NamedTuple):
    """Prompts, and the largest number of tokens of their responses."""

    model: ModelConfig
    prompts: Int[np.ndarray, "B P"]
    new_tokens: int

    @property
    def end(self) -> int:
        """The token that ends a response, in both."""
        return self.model.vocabulary - 1

    def cut(self, responses: list[list[int]]) -> list[list[int]]:
        """Leave out what follows the ends of responses."""
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in responses]


class Peer:
    """The process of transformers. Use it in a ``with`` statement, which ends it.

    Args:
        python: the Python that runs it.

    Raises:
        ValueError: if the process cannot be started, or lacks torch or transformers.
    """

    versions: dict[str, str]
    """The versions of torch and transformers."""

    def __init__(self, python: str):
        self._python = python
        # The folders of this project have modules that the other Python should not import.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                [python, str(transformers_worker.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**env, "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            raise ValueError(f"peer_python={python!r} cannot be started: {error.strerror}") from error
        try:
            self.versions = self.ask("versions")
        except ValueError:
            self.__exit__()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, call: str, **arguments: Any) -> Any:
        """Call a method of `experiments.transformers_worker.Worker` and return its result.

        Raises:
            ValueError: if the method raised an error, or the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"call": call, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise ValueError(
                f"peer_python={self._python!r} ended with status {self._process.wait()} in {call}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(f"peer_python={self._python!r} failed in {call} with {reply['error']}")
        return reply["result"]


CORES: Final = os.cpu_count() or 1
CHOICES: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "threads": tuple(dict.fromkeys((CORES, 1))),
        "experts": ("grouped_mm", "eager", "batched_mm"),
        "cache": ("dynamic", "static", "compiled"),
    }
)
"""The settings of transformers that are searched, one after the other; arguments of `Worker.generate`."""


def generate(peer: Peer, case: Case, seed: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Respond to the prompts of a case, as `experiments.transformers_worker.Worker.generate` does."""
    arguments = {"prompts": case.prompts.tolist(), "new_tokens": case.new_tokens, "end": case.end}
    result = peer.ask("generate", seed=seed, **arguments, **settings)
    return {**result, "tokens": case.cut(result["tokens"])}


def timed(peer: Peer, case: Case, seeds: Iterator[int], settings: Mapping[str, Any]) -> Reading:
    """Time one run."""
    result = generate(peer, case, next(seeds), settings)
    return Reading(result["seconds"], result["cpu_seconds"], sum(map(len, result["tokens"])))


def log_prob_difference(peer: Peer, responses: Responses) -> float:
    """Return the largest difference between both log-probabilities of sampled tokens."""
    mask = np.asarray(responses.response_mask)[:, 1:]
    theirs = np.array(peer.ask("log_probs", tokens=np.asarray(responses.tokens).tolist()))
    return float(np.abs(np.where(mask, theirs - np.asarray(responses.log_probs)[:, 1:], 0)).max())


def equal_tokens(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of tokens that are equal at the same place of the same response.

    >>> equal_tokens([[1, 2, 3, 4]], [[1, 2, 5, 4]])
    0.75
    """
    same = [a == b for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=False)]
    return sum(same) / len(same)


def fastest_settings(
    run: Callable[[Mapping[str, Any]], Reading], choices: Mapping[str, tuple[Any, ...]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Choose one setting after the other by the speed of a second run.

    Args:
        run: runs the case with settings.
        choices: the values of each setting; the first ones are the start.

    Returns:
        The fastest settings, and all that were tried, with their tokens per second.

    >>> run = lambda settings: Reading(1.0, 1.0, 9 - settings["threads"] + 2 * (settings["cache"] == "static"))
    >>> best, tried = fastest_settings(run, {"threads": (2, 1), "cache": ("dynamic", "static")})
    >>> best, [each["tokens_per_second"] for each in tried]
    ({'threads': 1, 'cache': 'static'}, [7.0, 8.0, 10.0])
    """
    best = {name: values[0] for name, values in choices.items()}
    tried: list[dict[str, Any]] = []

    def speed(settings: dict[str, Any]) -> float:
        known = [each["tokens_per_second"] for each in tried if settings.items() <= each.items()]
        if not known:
            run(settings)
            known = [run(settings).speed]
            tried.append({**settings, "tokens_per_second": known[0]})
        return known[0]

    for name, values in choices.items():
        best = max(({**best, name: value} for value in values), key=speed)
    return best, tried


def possible_choices(case: Case, *, compiled: bool) -> dict[str, tuple[Any, ...]]:
    """Return `CHOICES` without those that need too much memory or, unless ``compiled``, `torch.compile`."""
    model = case.model
    copied = 12 * case.prompts.size * model.top_k * model.width * model.expert_width
    left_out = ["batched_mm"] * (copied > COPIED_BYTES) + ["compiled"] * (not compiled)
    return {
        name: tuple(value for value in values if value not in left_out) for name, values in CHOICES.items()
    }
