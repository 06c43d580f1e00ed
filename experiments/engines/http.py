"""The engine behind HTTP: servers with SGLang's interface, which answer sample by sample.

Each sample is a request of its own, so that servers can batch them as they like, and answers come as responses end. An
answer is checked (`experiments.engines.answers`) before it enters the batch. Bad answers are asked for again. A sample
whose answers are all bad ends the run or is dropped, by a setting.

The server of this project (`python -m experiments.serve`) gets the random key of each sample, 64 bits, as the seed, and
draws what the embedded engine draws. Other engines get 31 bits of it, and draw their own numbers, or ignore it.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Key

from experiments.engines.answers import Answer, BadAnswer, OtherWeights, read_answer
from experiments.engines.protocol import Generation, Sampling, Sent
from experiments.engines.servers import EngineError, Server, ServerDown, Servers
from experiments.engines.settings import EngineRequests
from experiments.engines.weights import WeightFolders
from experiments.rl.generation import Responses, Watch
from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import Array
from relibra_jax.models import LanguageModel, ModelConfig

FORBIDDEN: Final = -1e9
"""The bias of the logits of tokens that may not be sampled: finite, because JSON has no infinity."""


class HttpEngine:
    """An engine of one or more servers.

    Args:
        addresses: the addresses of the servers, ``http://host:port``.
        source: the folder of the checkpoint that the run started from.
        config: the sizes of the model.
        settings: the limits of requests.
        sends: whether `sync` sends weights. False for servers that were started with the run's.
        transport: the transport of the HTTP client, for tests. None for the network.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        source: Path,
        config: ModelConfig,
        settings: EngineRequests,
        *,
        sends: bool = True,
        transport: httpx2.AsyncBaseTransport | None = None,
    ):
        self._addresses, self._config, self._settings = addresses, config, settings
        self._sends, self._transport = sends, transport
        self._folders = WeightFolders(source, settings.weights)
        self._version: int | None = None

    def sync(self, policy: LanguageModel, version: int) -> Sent:
        """Write the weights to a folder, and let all servers load it. One that is down does so when it is back.

        Raises:
            EngineError: if a server cannot load the weights, or no server answers.
        """
        if version == self._version or not self._sends:
            self._version = version
            return Sent()
        start = time.perf_counter()
        written = self._folders.write(policy, version)
        self._version = version
        _run(self._load_all)
        self._folders.forget_others()
        return Sent(written, time.perf_counter() - start)

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
        """Ask for a response to every prompt, as in `experiments.engines.protocol.RolloutEngine`.

        Raises:
            EngineError: if a request is rejected, no server answers, or all answers to a sample are bad and the
                settings do not drop it.
        """
        assert self._version is not None, "sync comes first"
        batch = _Batch(np.asarray(prompts), np.asarray(lengths), sampling, self._config, watch)
        _run(functools.partial(self._generate, batch, seeds_of(keys)))
        return batch.generation(self._version)

    def close(self) -> None:
        """Remove the folders of weights."""
        self._folders.close()

    async def _load_all(self) -> None:
        async with self._client() as client:
            await self._servers(client).load_all()

    async def _generate(self, batch: "_Batch", seeds: list[int]) -> None:
        async with self._client() as client:
            servers = self._servers(client)
            async with anyio.create_task_group() as background:
                background.start_soon(servers.revive)
                async with anyio.create_task_group() as samples:
                    for sample, seed in enumerate(seeds):
                        samples.start_soon(self._sample, servers, batch, sample, seed)
                background.cancel_scope.cancel()

    async def _sample(self, servers: Servers, batch: "_Batch", sample: int, key: int) -> None:
        """Ask for one sample until there is a good answer."""
        request, attempts = batch.request(sample), 1 + self._settings.retries
        for attempt in range(attempts):
            batch.retried += attempt > 0
            async with servers.borrow() as server:
                try:
                    request["sampling_params"]["sampling_seed"] = await server.seed(key)
                    batch.add(sample, await server.post("/generate", request), self._version or 0)
                    return
                except (ServerDown, BadAnswer) as error:
                    failure: Exception = error
                    reason = f"{server.address}: sample {sample}: {error}"
                    if isinstance(error, ServerDown | OtherWeights):
                        servers.mark_down(server, str(error))
        if isinstance(failure, ServerDown) or self._settings.bad_answers == "stop":
            raise EngineError(f"{reason} (after {attempts} attempts)")

    def _servers(self, client: httpx2.AsyncClient) -> Servers:
        current = self._folders.current
        folder = None if current is None else str(current)
        servers = [Server(address, client, self._settings) for address in self._addresses]
        return Servers(servers, self._settings, folder, self._version or 0)

    def _client(self) -> httpx2.AsyncClient:
        most = self._settings.at_once * len(self._addresses)
        limits = httpx2.Limits(max_connections=most + len(self._addresses), max_keepalive_connections=most)
        return httpx2.AsyncClient(limits=limits, transport=self._transport, trust_env=False)


def _run(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task in an event loop; of the errors of its parts, raise the first alone."""
    try:
        anyio.run(task)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class _Batch:
    """The answers of a batch as they come."""

    def __init__(
        self,
        prompts: np.ndarray,
        lengths: np.ndarray,
        sampling: Sampling,
        config: ModelConfig,
        watch: Watch | None,
    ):
        self._prompts, self._lengths, self._sampling, self._config = prompts, lengths, sampling, config
        self._watch = watch
        self._answers: list[Answer | None] = [None] * len(prompts)
        self.retried = 0

    def request(self, sample: int) -> dict[str, Any]:
        """Return the request for a sample, in SGLang's format without a seed."""
        sampling = self._sampling
        return {
            "input_ids": self._prompts[sample, : self._lengths[sample]].tolist(),
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
            },
        }

    def add(self, sample: int, answer: Any, version: int) -> None:
        """Check an answer and keep it; raises `BadAnswer`. Then call the watch."""
        prompt = int(self._lengths[sample])
        self._answers[sample] = read_answer(answer, prompt, self._sampling, self._config, version)
        if self._watch is not None:
            ended = np.array([answer is not None for answer in self._answers])
            if not ended.all() and not self._watch.look(ended, lambda: self._responses()):
                self._watch = None

    def generation(self, version: int) -> Generation:
        """Return all responses."""
        answers = self._answers
        return Generation(
            self._responses(),
            np.full(len(answers), version, np.int32),
            np.array([answer is None for answer in answers]),
            self.retried,
            sum(answer.filled for answer in answers if answer is not None),
        )

    def _responses(self) -> Responses:
        """Put the answers so far into arrays. Samples without an answer have no token."""
        samples, longest = self._prompts.shape
        shape, config = (samples, longest + self._sampling.max_new_tokens), self._config
        tokens = np.full(shape, self._sampling.pad, np.int32)
        mask, response_mask = np.zeros(shape, bool), np.zeros(shape, bool)
        log_probs = np.zeros(shape, np.float32)
        ids = np.zeros((*shape, config.moe_layers, config.top_k), id_dtype(config.num_experts))
        ended = np.zeros(samples, bool)
        for sample, answer in enumerate(self._answers):
            if answer is None:
                continue
            start = int(self._lengths[sample])
            end = start + len(answer.tokens)
            tokens[sample, :start] = self._prompts[sample, :start]
            tokens[sample, start:end] = answer.tokens
            mask[sample, :end] = True
            response_mask[sample, start:end] = True
            log_probs[sample, start:end] = answer.log_probs
            ids[sample, :end] = answer.expert_ids
            ended[sample] = answer.ended
        return Responses(tokens, mask, response_mask, ids, log_probs, ended)


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
