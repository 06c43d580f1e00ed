"""The engine behind HTTP: servers with SGLang's or vLLM's interface, which answer sample by sample.

Each sample is a request of its own, so that servers can batch them as they like, and answers come as responses end. An
answer is checked (`experiments.engines.answers`) before it enters the batch. Bad answers are asked for again. A sample
whose answers are all bad ends the run or is dropped, by a setting.

The server of this project (`python -m experiments.serve`) gets the random key of each sample, 64 bits, as the seed, and
draws what the embedded engine draws. Other engines get 31 bits of it, and draw their own numbers, or ignore it.
"""

import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import jax
import numpy as np
from jaxtyping import Int, Key

from experiments.engines.answers import Answer, BadAnswer, OtherWeights
from experiments.engines.dialect import Dialect, ServerDown
from experiments.engines.protocol import EngineError, Generation, Sampling, Sent, seeds_of
from experiments.engines.servers import Server, Servers
from experiments.engines.settings import EngineRequests
from experiments.engines.weights import WeightFolders
from experiments.engines.sharing import together
from experiments.rl.generation import Responses, Watch
from experiments.rl.processes import is_first
from relibra_jax import Batch
from relibra_jax.contract.planner import Routes
from relibra_jax.contract.replay import count_copies, id_dtype
from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.models import LanguageModel, ModelConfig
from relibra_jax.planning.routes import TOKENS, token_places

MOST_DROPPED: Final = 0.5
"""The share of samples without a good answer above which a batch is of no use."""


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
        self._config, self._settings, self._sends, self._transport = config, settings, sends, transport
        self._all = [Server(address, settings) for address in addresses]
        self._folders = WeightFolders(source, settings.weights)
        self._version: int | None = None
        self._closed = threading.Event()

    def sync(self, policy: LanguageModel, version: int) -> Sent:
        """Write the weights to a folder, and let all servers load it. One that is down does so when it is back.

        All processes of a run call it. The first one writes, and speaks to the servers.

        Raises:
            EngineError: if the weights cannot be written, a server cannot load them, or no server answers.
        """
        if version == self._version:
            return Sent()
        start, written = time.perf_counter(), 0
        if self._sends:
            written = together(lambda: self._folders.write(policy, version))
            self._version = None
            together(lambda: _run(self._load_all) if is_first() else None)
            self._folders.forget_others()
        self._version = version
        return Sent(written, time.perf_counter() - start if self._sends else 0.0)

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
            EngineError: if a request is rejected, no server answers, all answers to a sample are bad and the settings
                do not drop it, or more than `MOST_DROPPED` of the samples are dropped.
        """
        assert self._version is not None, "sync comes first"
        tag = self._folders.tag if self._sends else None
        batch = _Batch(np.asarray(prompts), np.asarray(lengths), sampling, self._config, watch, tag)
        _run(functools.partial(self._generate, batch, seeds_of(keys)))
        generation = batch.generation(self._version)
        if generation.dropped.mean() > MOST_DROPPED:
            raise EngineError(
                f"{generation.dropped.sum()} of {len(generation.dropped)} samples have no good answer; the last reason:"
                f" {batch.reason}"
            )
        return generation

    def close(self) -> None:
        """End a generation that is running, and remove the folders of weights."""
        self._closed.set()
        self._folders.close()

    async def _load_all(self) -> None:
        async with self._servers() as servers:
            await servers.prepare()
            await servers.wait_for_one()

    async def _generate(self, batch: "_Batch", keys: list[int]) -> None:
        async with self._servers() as servers, anyio.create_task_group() as background:
            background.start_soon(self._watch_for_end)
            await servers.prepare()
            background.start_soon(servers.revive)
            async with anyio.create_task_group() as samples:
                for sample, key in enumerate(keys):
                    samples.start_soon(self._sample, servers, batch, sample, key)
            background.cancel_scope.cancel()

    async def _watch_for_end(self) -> None:
        """Raise `EngineError` when the engine is closed."""
        while not self._closed.is_set():
            await anyio.sleep(0.2)
        raise EngineError("the engine was closed")

    async def _sample(self, servers: Servers, batch: "_Batch", sample: int, key: int) -> None:
        """Ask for one sample until there is a good answer, each time another server if there is one."""
        failed = set[str]()
        attempts, changed = 1 + self._settings.retries, 0
        for attempt in range(attempts):
            batch.retried += attempt > 0
            async with servers.borrow(failed) as server:
                dialect = server.dialect
                assert dialect is not None, "servers are recognised before they are up"
                request = batch.request(sample, dialect, key ^ changed)
                try:
                    batch.add(sample, dialect, await server.post(dialect.path, request))
                    return
                except (ServerDown, BadAnswer) as error:
                    failure: Exception = error
                    failed.add(server.address)
                    batch.reason = f"{server.address}: sample {sample}: {error}"
                    if isinstance(error, ServerDown | OtherWeights):
                        servers.mark_down(server, str(error))
                    else:
                        changed += 1  # the same seed might give the same answer
        if isinstance(failure, ServerDown) or self._settings.bad_answers == "stop":
            raise EngineError(f"{batch.reason} (after {attempts} attempts)")

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[Servers]:
        """Open the HTTP client of a call for the servers."""
        most = self._settings.at_once * len(self._all)
        # Servers close idle connections after 5 s or more.
        limits = httpx2.Limits(
            max_connections=most + len(self._all), max_keepalive_connections=most, keepalive_expiry=3
        )
        async with httpx2.AsyncClient(limits=limits, transport=self._transport, trust_env=False) as client:
            for server in self._all:
                server.client = client
            folder = self._folders.current
            yield Servers(
                self._all,
                self._settings,
                self._config,
                folder=None if folder is None else str(folder),
                version=self._folders.tag,
            )


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
        tag: str | None,
    ):
        self._prompts, self._lengths, self._sampling, self._config = prompts, lengths, sampling, config
        self._watch, self._tag = watch, tag
        self._answers: list[Answer | None] = [None] * len(prompts)
        self.retried = 0
        self.reason = ""
        """What was wrong with the last bad answer."""

    def request(self, sample: int, dialect: Dialect, seed: int) -> dict[str, Any]:
        """Return the request for a sample."""
        prompt = self._prompts[sample, : self._lengths[sample]].tolist()
        return dialect.request(prompt, self._sampling, seed)

    def add(self, sample: int, dialect: Dialect, answer: Any) -> None:
        """Check an answer and keep it; raises `BadAnswer`. Then call the watch."""
        prompt = int(self._lengths[sample])
        self._answers[sample] = dialect.read(answer, prompt, self._sampling, self._config, self._tag)
        if self._watch is not None:
            ended = np.array([answer is not None for answer in self._answers])
            if not ended.all() and not self._watch.look(ended, self._counts):
                self._watch = None

    def _counts(self) -> Batch:
        """Count the samples that have an answer, with a sample of their routes, as `experiments.rl.counts` does."""
        config = self._config
        load = np.zeros((len(self._answers), config.moe_layers, config.num_experts), np.int32)
        lengths = np.zeros(len(self._answers), np.int32)
        for number, answer in enumerate(self._answers):
            if answer is not None:
                load[number] = count_copies(answer.expert_ids, num_experts=config.num_experts)
                lengths[number] = len(answer.expert_ids)
        sample, token = token_places(lengths, TOKENS)
        routes = np.zeros((TOKENS, config.moe_layers, config.top_k), id_dtype(config.num_experts))
        for number in np.unique(sample[sample != EMPTY]):
            answer = self._answers[number]
            assert answer is not None
            routes[sample == number] = answer.expert_ids[token[sample == number]]
        length = self._prompts.shape[1] + self._sampling.max_new_tokens
        return Batch(load, lengths, Routes(routes, sample), sequence_length=float(length))

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
