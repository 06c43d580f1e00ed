"""The protocol that the interfaces of engines implement, and the calls to a server that they use.

One object belongs to one server. `experiments.engines.sglang` and `experiments.engines.vllm` are the interfaces;
`experiments.engines.servers.Server.recognise` finds out which one a server has.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

from experiments.engines.answers import Answer
from experiments.engines.protocol import Sampling
from relibra_jax.models import ModelConfig

FORBIDDEN: Final = -1e9
"""The bias of the logits of tokens that may not be sampled: finite, because JSON has no infinity."""


class ServerDown(Exception):
    """A server that does not answer, or answers that it cannot do what it was asked to do."""


@runtime_checkable
class Connection(Protocol):
    """The calls of one server, as `experiments.engines.servers.Server` has them."""

    address: str
    """The address of the server, for messages."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request and return the answer."""
        ...

    async def ask(self, path: str, *, optional: bool = False) -> Any:
        """Return what the server tells about itself."""
        ...


@runtime_checkable
class Dialect(Protocol):
    """The interface of one server."""

    path: str
    """Where requests for responses go."""

    def request(self, prompt: list[int], sampling: Sampling, seed: int) -> dict[str, Any]:
        """Return the request for one response.

        Args:
            prompt: the tokens of the prompt.
            sampling: how tokens are drawn.
            seed: a random key of 64 bits.

        Raises:
            EngineError: if the server cannot sample like that.
        """
        ...

    def read(
        self,
        answer: Any,
        prompt: int,
        sampling: Sampling,
        config: ModelConfig,
        version: str | None,
        *,
        partial: bool = False,
    ) -> Answer:
        """Read and check the answer to a request, as `experiments.engines.answers.check_answer`."""
        ...

    def is_partial(self, answer: Any, /) -> bool:
        """Whether an answer says that an interrupt has ended the response."""
        ...

    async def interrupt(self) -> None:
        """Ask the server to answer its requests with the tokens that they have, if it can.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it should support that request, and does not.
        """
        ...

    async def load(self, folder: str, version: str) -> None:
        """Let the server load a folder of weights, unless it says that it has them.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it cannot load them.
        """
        ...

    async def describe(self, config: ModelConfig) -> str | None:
        """Ask the server what it is; return the version of its weights, or None if it does not tell.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it says that it has another model, or that it cannot do what a run needs.
        """
        ...
