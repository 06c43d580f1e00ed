"""vLLM's interface, as version 0.33.0 has it.

Requests and answers are tokens (``/inference/v1/generate``, its option ``--enable-scale-out``). Routes come with every
answer if the server runs with ``--enable-return-routed-experts``. Weights are loaded by calls that exist only with
``VLLM_SERVER_DEV_MODE=1`` in its environment: the server finishes what it samples and empties its caches (``/pause``),
loads the folder (``reload_weights``), notes the name of the version, and goes on. If it fails in between, it stays
paused, so it never samples with weights that are loaded in part.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from experiments.engines.answers import Answer, BadAnswer, Told, check_answer, reading
from experiments.engines.dialect import FORBIDDEN, Connection
from experiments.engines.protocol import EngineError, Sampling
from relibra_jax.models import ModelConfig

MOST_BIASES: Final = 1024
"""The largest number of tokens whose logits a request may bias (``MAX_NUM_LOGIT_BIAS_TOKENS``)."""
NO_LOG_PROBABILITY: Final = -9999.0
"""What the server writes for a log-probability that is missing, not a number or minus infinity."""


def read_answer(
    answer: Any,
    prompt: int,
    sampling: Sampling,
    config: ModelConfig,
    version: str | None,
    *,
    partial: bool = False,
) -> Answer:
    """Read and check the answer to one request.

    Args:
        answer: the answer, as JSON was parsed.
        prompt: P, the number of tokens of the prompt.
        sampling: how tokens should have been drawn.
        config: the sizes of the model.
        version: the name of the weights that should have sampled all tokens. None for any.
        partial: whether it may be the beginning of a response.

    Returns:
        The response, or what there is of it.

    Raises:
        BadAnswer: if something is missing or wrong; `OtherWeights` if it is the version.
    """
    with reading():
        choice, routes = answer["choices"][0], answer["choices"][0]["routed_experts"]
        logged = choice["logprobs"]["content"]
        values = [entry["logprob"] for entry in logged]
        told = Told(
            tokens=choice["token_ids"],
            log_probs=[None if value == NO_LOG_PROBABILITY else value for value in values],
            logged=[entry["token_id"] for entry in logged],
            reason=choice["finish_reason"],
            routes=routes,
            counts={name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
            versions=[span["version"] for span in choice.get("weight_versions") or ()],
        )
        recording = {"choices": [{"routed_experts": routes}]}
    return check_answer(
        told, prompt, sampling, config, version, layout="vllm_http", recording=recording, partial=partial
    )


class Vllm:
    """The interface of one server.

    Args:
        server: the calls of the server.
    """

    path = "/inference/v1/generate"
    read = staticmethod(read_answer)

    def __init__(self, server: Connection):
        self._server = server
        self._processed: bool | None = None
        """Whether log-probabilities are those after temperature and top-p. None until it is asked."""

    def request(self, prompt: list[int], sampling: Sampling, seed: int) -> dict[str, Any]:
        """Return the request for one response.

        Of more than `MOST_BIASES` tokens that may not be sampled, the first have a bias. A response with another of
        them is bad.

        Raises:
            EngineError: if the server does not give log-probabilities over all tokens at the temperature.
        """
        temperature, top_p = sampling.temperature, sampling.top_p
        if temperature > 0 and (top_p < 1 if self._processed else temperature != 1):
            mode = "processed_logprobs" if self._processed else "raw_logprobs"
            raise EngineError(
                f"{self._server.address}: with --logprobs-mode {mode} it does not give log-probabilities at"
                f" temperature={temperature:g} for top_p={top_p:g}; raw_logprobs are for temperature 1, and"
                " processed_logprobs for top_p 1"
            )
        forbidden = np.flatnonzero(~sampling.allowed)[:MOST_BIASES]
        return {
            "token_ids": prompt,
            "sampling_params": {
                "max_tokens": sampling.max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "stop_token_ids": list(sampling.ends),
                # Otherwise the end tokens of the checkpoint end responses too.
                "ignore_eos": True,
                "logit_bias": {str(token): FORBIDDEN for token in forbidden},
                "seed": seed & 0x7FFFFFFF,
                # The sampled token's alone.
                "logprobs": 0,
                "routed_experts_prompt_start": 0,
                "detokenize": False,
            },
        }

    def is_partial(self, _: Any) -> bool:
        """Return False: nothing interrupts its responses."""
        return False

    async def interrupt(self) -> None:
        """Do nothing: new weights wait for the ends of its responses."""

    async def load(self, folder: str, version: str) -> None:
        """Let the server load a folder of weights, unless it says that it has them.

        Raises:
            ServerDown: if it does not answer, or cannot load them.
            EngineError: if it takes no weights.
        """
        server = self._server
        info = await server.ask("/weight_info", optional=True)
        if not isinstance(info, Mapping):
            raise EngineError(
                f"{server.address}: no /weight_info: does it run vLLM 0.33.0 or later with VLLM_SERVER_DEV_MODE=1?"
            )
        if info.get("weight_version") != version:
            await server.post("/pause?mode=wait", {})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            await server.post("/collective_rpc", reload)
            await server.post("/update_weight_version", {"new_version": version})
        # Also after an earlier attempt whose last call had no answer.
        await server.post("/resume", {})

    async def describe(self, config: ModelConfig) -> str | None:
        """Ask the server for the version of its weights, and once for one token of which only one is allowed.

        The logarithm of its probability is 0 if log-probabilities are those after all that limits sampling, and less
        otherwise.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it has another model, or does not give what a run needs.
        """
        if self._processed is None:
            token = np.arange(config.vocabulary) == 1
            sampling = Sampling(1, 1.0, 1.0, ends=(), pad=0, allowed=np.ones_like(token))
            request = self.request([0], sampling, 0)
            request["sampling_params"]["allowed_token_ids"] = [1]
            answer = await self._server.post(self.path, request)
            try:
                one = self.read(answer, 1, sampling._replace(allowed=token), config, None)
            except BadAnswer as error:
                raise EngineError(f"{self._server.address}: {error}") from None
            self._processed = bool(one.log_probs[0] > -1e-3)
        info = await self._server.ask("/weight_info", optional=True)
        return str(info["weight_version"]) if isinstance(info, Mapping) and "weight_version" in info else None
