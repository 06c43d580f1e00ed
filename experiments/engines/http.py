"""The engine behind HTTP: servers with SGLang's or vLLM's interface, which answer sample by sample.

Each sample is a request of its own, so that servers can batch them as they like, and answers come as responses end. An
answer is checked (`experiments.engines.answers`) before it enters the batch. Bad answers are asked for again. A sample
whose answers are all bad ends the run or is dropped, by a setting.

New weights interrupt the responses that are sampled. They carry on as requests whose prompts have the tokens so far
(`experiments.engines.segments`).

The server of this project (`python -m experiments.serve`) gets the random key of each sample, 64 bits, as the seed, and
draws what the embedded engine draws. Other engines get 31 bits of it, and draw their own numbers, or ignore it.
"""

import functools
import threading
import time
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import jax
import numpy as np
from jaxtyping import Int, Key

from experiments.engines.answers import BadAnswer, OtherWeights
from experiments.engines.dialect import Dialect, ServerDown
from experiments.engines.event_loop import EventLoop
from experiments.engines.protocol import UNSAMPLED, EngineError, Generation, Sampling, Sent, seeds_of
from experiments.engines.segments import Joined, Segments
from experiments.engines.servers import Server, Servers, Weights
from experiments.engines.settings import EngineRequests
from experiments.engines.sharing import together
from experiments.engines.weights import WeightFolders
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
        self._config, self._settings, self._sends = config, settings, sends
        most = settings.at_once * len(addresses)
        # Servers close idle connections after 5 s or more.
        limits = httpx2.Limits(
            max_connections=most + len(addresses), max_keepalive_connections=most, keepalive_expiry=3
        )
        self._client = httpx2.AsyncClient(limits=limits, transport=transport, trust_env=False)
        self._servers = Servers(
            [Server(address, settings, self._client) for address in addresses], settings, config
        )
        self._events = EventLoop()
        self._folders = WeightFolders(source, settings.weights)
        self._version: int | None = None
        self._answered: dict[int, str] = {}
        """The address of the server that answered each sample last. It may still have the prefix of its next turn."""
        self._closed = threading.Event()

    def sync(self, policy: LanguageModel, version: int) -> Sent:
        """Write the weights to a folder, and let all servers load it. One that is down does so when it is back.

        All processes of a run call it. The first one writes, and lets servers load. Responses that other threads
        generate meanwhile are interrupted, and carry on under the new weights.

        Raises:
            EngineError: if the weights cannot be written, a server cannot load them or be interrupted, or no server
                answers.
        """
        if version == self._version:
            return Sent()
        start, written = time.perf_counter(), 0
        if self._sends:
            written = together(lambda: self._folders.write(policy, version))
            self._version = None
            self._renew(Weights(version, str(self._folders.current), self._folders.tag))
            self._folders.forget_others()
            self._answered.clear()  # servers keep no prefix under new weights
        else:
            self._servers.weights = Weights(version, None, None)
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
        assert self._servers.weights is not None, "sync comes first"
        batch = _Batch(np.asarray(prompts), np.asarray(lengths), sampling, self._config, watch)
        self._events.run(functools.partial(self._generate, batch, seeds_of(keys)))
        generation = batch.generation()
        if generation.dropped.mean() > MOST_DROPPED:
            raise EngineError(
                f"{generation.dropped.sum()} of {len(generation.dropped)} samples have no good answer; the last reason:"
                f" {batch.reason}"
            )
        return generation

    def close(self) -> None:
        """End a generation that is running, and remove the folders of weights."""
        self._closed.set()
        self._events.close(self._client.aclose)
        self._folders.close()

    def _renew(self, weights: Weights) -> None:
        """Let servers load weights between the requests of all processes."""
        servers, run = self._servers, self._events.run
        load = functools.partial(servers.load, weights)
        try:
            # No process interrupts requests of another one that does not know of it.
            together(lambda: run(servers.hold))
            together(lambda: run(servers.interrupt))
            together(lambda: run(load) if is_first() else None)
            together(lambda: None if is_first() else run(load))  # they find what the first has loaded
        finally:
            run(servers.go_on)

    async def _generate(self, batch: "_Batch", keys: list[int]) -> None:
        async with anyio.create_task_group() as background:
            background.start_soon(self._watch_for_end)
            await self._servers.wait_while_held()
            await self._servers.prepare()
            background.start_soon(self._servers.revive)
            async with anyio.create_task_group() as samples:
                for sample, key in enumerate(keys):
                    if batch.lengths[sample]:
                        samples.start_soon(self._sample, batch, sample, key)
            background.cancel_scope.cancel()

    async def _watch_for_end(self) -> None:
        """Raise `EngineError` when the engine is closed."""
        while not self._closed.is_set():
            await anyio.sleep(0.2)
        raise EngineError("the engine was closed")

    async def _sample(self, batch: "_Batch", sample: int, key: int) -> None:
        """Ask for one sample until it is complete, and after a bad answer another server if there is one."""
        failed, attempts, changed, servers = set[str](), 0, 0, self._servers
        while not batch.segments[sample].complete:
            async with servers.borrow(failed, self._answered.get(sample)) as server:
                weights, interrupts, dialect = servers.weights, servers.interrupts, server.dialect
                assert weights is not None
                assert dialect is not None, "servers are recognised before they are up"
                request = batch.request(sample, dialect, batch.segments[sample].seed(key) ^ changed)
                try:
                    answer = await server.post(dialect.path, request)
                    batch.add(sample, dialect, answer, weights, interrupted=servers.interrupts > interrupts)
                    self._answered[sample], attempts = server.address, 0
                    failed.clear()
                except (ServerDown, BadAnswer) as error:
                    attempts += 1
                    failed.add(server.address)
                    batch.reason = f"{server.address}: sample {sample}: {error}"
                    if isinstance(error, ServerDown | OtherWeights):
                        servers.mark_down(server, str(error))
                    else:
                        changed += 1  # the same seed might give the same answer
                    if attempts > self._settings.retries:
                        if isinstance(error, ServerDown) or self._settings.bad_answers == "stop":
                            raise EngineError(f"{batch.reason} (after {attempts} attempts)") from None
                        return
                    batch.retried += 1


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
        self._prompts, self.lengths, self._sampling, self._config = prompts, lengths, sampling, config
        self._watch = watch
        self.segments = [
            Segments(prompt[:length], sampling) for prompt, length in zip(prompts, lengths, strict=True)
        ]
        self._joined: dict[int, Joined] = {}
        self._loads: dict[int, np.ndarray] = {}
        """The counts of complete samples, for the watch."""
        self.retried = 0
        self.reason = ""
        """What was wrong with the last bad answer."""

    def request(self, sample: int, dialect: Dialect, seed: int) -> dict[str, Any]:
        """Return the request for the next segment of a sample."""
        segments = self.segments[sample]
        return dialect.request(segments.tokens.tolist(), segments.sampling, seed)

    def add(self, sample: int, dialect: Dialect, answer: Any, weights: Weights, *, interrupted: bool) -> None:
        """Check an answer and keep it, and call the watch if the response is complete.

        Nothing is kept of an interrupted response that lacks what its tokens need, such as one that had not begun.

        Args:
            sample: the number of the sample.
            dialect: the interface of the server.
            answer: the answer.
            weights: the weights of the servers when the request was sent.
            interrupted: whether requests were interrupted since then.

        Raises:
            BadAnswer: if the answer is bad, and not just interrupted.
        """
        segments = self.segments[sample]
        prompt, partial = len(segments.tokens), interrupted and dialect.is_partial(answer)
        try:
            segment = dialect.read(
                answer, prompt, segments.sampling, self._config, weights.version, partial=partial
            )
        except BadAnswer:
            if partial:
                return
            raise
        segments.add(segment, weights.number)
        if segments.complete:
            self._joined[sample] = segments.join()
        if segments.complete and self._watch is not None:
            expert_ids = self._joined[sample].answer.expert_ids
            self._loads[sample] = count_copies(expert_ids, num_experts=self._config.num_experts)
            ended = np.array([each.complete for each in self.segments])
            if not ended.all() and not self._watch.look(ended, self._counts):
                self._watch = None

    def _counts(self) -> Batch:
        """Count the complete samples, with a sample of their routes, as `experiments.rl.counts` does."""
        config = self._config
        samples = len(self.segments)
        load = np.zeros((samples, config.moe_layers, config.num_experts), np.int32)
        lengths = np.zeros(samples, np.int32)
        for number, of_sample in self._loads.items():
            load[number], lengths[number] = of_sample, len(self._joined[number].answer.expert_ids)
        sample, token = token_places(lengths, TOKENS)
        routes = np.zeros((TOKENS, config.moe_layers, config.top_k), id_dtype(config.num_experts))
        for number in np.unique(sample[sample != EMPTY]):
            expert_ids = self._joined[int(number)].answer.expert_ids
            routes[sample == number] = expert_ids[token[sample == number]]
        length = self._prompts.shape[1] + self._sampling.max_new_tokens
        return Batch(load, lengths, Routes(routes, sample), sequence_length=float(length))

    def generation(self) -> Generation:
        """Return all responses. Samples without a complete one have no token."""
        samples, longest = self._prompts.shape
        shape, config = (samples, longest + self._sampling.max_new_tokens), self._config
        tokens = np.full(shape, self._sampling.pad, np.int32)
        mask, response_mask = np.zeros(shape, bool), np.zeros(shape, bool)
        log_probs = np.zeros(shape, np.float32)
        ids = np.zeros((*shape, config.moe_layers, config.top_k), id_dtype(config.num_experts))
        ended, dropped = np.zeros(samples, bool), self.lengths > 0
        versions, filled = np.full(shape, UNSAMPLED, np.int32), np.zeros(samples, np.int32)
        for sample, (answer, version) in self._joined.items():
            start = int(self.lengths[sample])
            end = start + len(answer.tokens)
            tokens[sample, :start] = self._prompts[sample, :start]
            tokens[sample, start:end] = answer.tokens
            mask[sample, :end] = True
            response_mask[sample, start:end] = True
            log_probs[sample, start:end] = answer.log_probs
            ids[sample, :end] = answer.expert_ids
            ended[sample], dropped[sample] = answer.ended, False
            versions[sample, start:end], filled[sample] = version, answer.filled
        responses = Responses(tokens, mask, response_mask, ids, log_probs, ended)
        return Generation(responses, versions, dropped, filled, self.retried)
