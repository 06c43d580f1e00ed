"""SGLang's interface, which the servers of this project have too."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from experiments.engines.answers import Answer, Told, check_answer, reading
from experiments.engines.dialect import FORBIDDEN, Connection
from experiments.engines.protocol import EngineError, Sampling
from relibra_jax.models import ModelConfig

PARTIAL: Final = "abort"
"""The type of the ``finish_reason`` of a response that an interrupt has ended."""
SIZES: Final = ("num_experts", "top_k", "moe_layers", "vocabulary")
"""The sizes of the model that servers of this project tell."""


def is_partial(answer: Any) -> bool:
    """Whether an answer says that an interrupt has ended the response."""
    try:
        return bool(answer["meta_info"]["finish_reason"]["type"] == PARTIAL)
    except (KeyError, TypeError):
        return False


def read_answer(
    answer: Any,
    prompt: int,
    sampling: Sampling,
    config: ModelConfig,
    version: str | None,
    *,
    partial: bool = False,
) -> Answer:
    """Read and check the answer to a request in SGLang's format.

    Args:
        answer: the answer, as JSON was parsed.
        prompt: P, the number of tokens of the prompt.
        sampling: how tokens should have been drawn.
        config: the sizes of the model.
        version: the name of the weights that should have sampled it. None for any. Servers that do not tell it are
            believed.
        partial: whether it may be the beginning of a response that was interrupted.

    Returns:
        The response, or what there is of it.

    Raises:
        BadAnswer: if something is missing or wrong; `OtherWeights` if it is the version.
    """
    with reading():
        meta, tokens = answer["meta_info"], answer["output_ids"]
        logged = meta["output_token_logprobs"]
        told = Told(
            tokens=tokens,
            log_probs=[entry[0] for entry in logged],
            logged=[entry[1] for entry in logged],
            reason=meta["finish_reason"]["type"],
            routes=meta["routed_experts"],
            counts=meta,
            versions=[each for each in [meta.get("weight_version")] if each is not None],
        )
    return check_answer(
        told, prompt, sampling, config, version, layout="sglang", recording=meta, partial=partial
    )


class Sglang:
    """The interface of one server.

    Args:
        server: the calls of the server.
    """

    path = "/generate"
    read = staticmethod(read_answer)
    is_partial = staticmethod(is_partial)

    def __init__(self, server: Connection):
        self._server = server
        self._takes_keys = False
        """Whether the seed of a request is a random key of 64 bits; other servers get 31 bits of it."""

    def request(self, prompt: list[int], sampling: Sampling, seed: int) -> dict[str, Any]:
        """Return the request for one response."""
        return {
            "input_ids": prompt,
            "return_logprob": True,
            "return_routed_experts": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop_token_ids": list(sampling.ends),
                # Without it, some versions leave the end token out of the tokens.
                "no_stop_trim": True,
                "logit_bias": {str(token): FORBIDDEN for token in np.flatnonzero(~sampling.allowed)},
                "sampling_seed": seed if self._takes_keys else seed & 0x7FFFFFFF,
            },
        }

    async def interrupt(self) -> None:
        """Ask the server to answer its requests with the tokens that they have.

        Raises:
            ServerDown: if it does not answer, or cannot now.
            EngineError: if it does not support such a request.
        """
        await self._server.post("/abort_request", {"abort_all": True})

    async def load(self, folder: str, version: str) -> None:
        """Let the server load a folder of weights, unless it says that it has them.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it cannot load them.
        """
        info = await self._server.ask("/get_model_info")
        if isinstance(info, Mapping) and info.get("weight_version") == version:
            return
        body = {"model_path": folder, "weight_version": version, "flush_cache": True}
        answer = await self._server.post("/update_weights_from_disk", body)
        if not (isinstance(answer, Mapping) and answer.get("success") is True):
            message = answer.get("message", answer) if isinstance(answer, Mapping) else answer
            text = " ".join(str(message).split())[:200]
            raise EngineError(f"{self._server.address}: it does not load {folder}: {text}")

    async def describe(self, config: ModelConfig) -> str | None:
        """Ask the server which seeds it takes; return the version of its weights, or None if it does not tell.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it says that it has another model.
        """
        info = await self._server.ask("/get_model_info")
        if not isinstance(info, Mapping):
            return None
        self._takes_keys = info.get("takes_keys") is True
        for name in SIZES:
            if name in info and info[name] != getattr(config, name):
                raise EngineError(
                    f"{self._server.address}: another model, with {name}={info[name]}, not {getattr(config, name)}"
                )
        version = info.get("weight_version")
        return None if version is None else str(version)
