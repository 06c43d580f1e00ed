"""What a run needs of the engine that samples its responses.

A run gives the engine its weights (`RolloutEngine.sync`), and then asks for responses (`RolloutEngine.generate`). It
gets the tokens, the experts of every token, the log-probabilities, and the version of the weights that sampled them.
The version of weights is the number of updates that made them. The engine of the run's own process is
`experiments.engines.embedded`; `experiments.engines.http` speaks to servers.
"""

from typing import Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Key

from experiments.rl.generation import Responses, Watch
from relibra_jax.contract.types import Array
from relibra_jax.models import LanguageModel

UNSAMPLED: Final = -1
"""The version of tokens of prompts, and of padding."""


class EngineError(ValueError):
    """An engine that cannot go on. The message is one line, with the address and the numbers."""


class Sampling(NamedTuple):
    """How tokens are drawn."""

    max_new_tokens: int
    """The largest number of tokens of a response, its end included."""
    temperature: float
    """The sampling temperature. 0 takes the most likely token."""
    top_p: float
    """The sum of probabilities for nucleus sampling."""
    ends: tuple[int, ...]
    """The tokens that end a response."""
    pad: int
    """The padding token of the result."""
    allowed: Bool[np.ndarray, " V"]
    """True on the tokens that a response may contain."""


class Sent(NamedTuple):
    """What a transfer of weights to an engine took."""

    bytes: int = 0
    """The bytes that the run wrote. 0 if the engine had the weights already."""
    seconds: float = 0.0
    """The time until all servers that answer had the weights."""


class Generation(NamedTuple):
    """The responses of one call, and what it took to get them."""

    responses: Responses
    """The responses, on the host."""
    version: Int[np.ndarray, "B T"]
    """The version of the weights that sampled each token, `UNSAMPLED` for tokens that were not sampled."""
    dropped: Bool[np.ndarray, " B"]
    """True for samples without a response, whose answers were all bad. Their masks are False everywhere."""
    filled: Int[np.ndarray, " B"]
    """The number of tokens of each response without a route, which have that of the token before."""
    retried: int = 0
    """The number of answers that were bad or did not come, and were asked for again."""
    failures: tuple[str, ...] = ()
    """A text for each sample that was dropped because the task failed to reply to it (`experiments.rl.turns`)."""


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine that samples responses with the weights of a run."""

    def sync(self, policy: LanguageModel, version: int) -> Sent:
        """Give the engine the weights, and return when it samples with them.

        Responses that are sampled in another thread carry on under the new weights, in engines that allow it.

        Args:
            policy: the policy. An engine with other weights of the same version keeps those.
            version: the number of updates that made the weights.
        """
        ...

    def generate(
        self,
        prompts: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        keys: Key[jax.Array, " B"],
        sampling: Sampling,
        *,
        responses_per_prompt: int = 1,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample a response to every prompt with the weights of the last `sync`.

        Args:
            prompts: the prompts, aligned to the left.
            lengths: the number of tokens in each prompt, 0 for samples that need no response.
            keys: the random key of each sample.
            sampling: how tokens are drawn.
            responses_per_prompt: the number of successive samples with the same prompt.
            watch: a callback to call while responses end.

        Returns:
            The responses, in the order of the prompts.
        """
        ...

    def close(self) -> None:
        """End a generation that is running, and free what the engine holds outside of this process."""
        ...


def seeds_of(keys: Key[jax.Array, " B"]) -> list[int]:
    """Return each sample's key as a signed integer of 64 bits.

    >>> seeds_of(jax.random.key(7)[None])
    [7]
    """
    data = np.asarray(jax.random.key_data(keys)).astype(np.uint32)
    return (data[:, 0].astype(np.int64) << 32 | data[:, 1].astype(np.int64)).tolist()


def keys_of(seeds: list[int]) -> Key[jax.Array, " B"]:
    """Return the keys of which `seeds_of` returns these seeds.

    >>> jax.random.key_data(keys_of([7])).tolist()
    [[0, 7]]
    """
    whole = np.asarray(seeds, np.int64)
    data = np.stack([(whole >> 32) & 0xFFFFFFFF, whole & 0xFFFFFFFF], axis=1).astype(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(data))
