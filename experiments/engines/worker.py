"""The worker of a server: it samples responses to requests, one batch at a time, and loads weights between batches.

Requests that come within a short time of each other and draw tokens in the same way are one batch. It is filled up to a
fixed number of samples, so that few programs are compiled. Samples do not enter a running batch: that is what engines
are for.
"""

import base64
import dataclasses
import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.engines.protocol import keys_of
from experiments.engines.requests import Request
from experiments.rl.devices import host_devices
from experiments.rl.generation import Responses
from experiments.rl.waves import generate_in_waves
from relibra_jax.contract.types import Topology
from relibra_jax.execution import ExpertParallel
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import LanguageModel, load_pretrained
from relibra_jax.models.hf_config import load_config

SMALLEST_PROMPT: Final = 16
"""The least width of an array of prompts. Others are powers of two."""


class Worker:
    """The worker, with a model on the devices of this process.

    Args:
        model: the folder of the checkpoint.
        nodes: the number of nodes of the expert-parallel group.
        ranks_per_node: the number of ranks of a node.
        dtype: the dtype of the computation.
        samples: the number of samples of a batch, a multiple of the number of ranks.
        wait_seconds: the time without another request after which a batch starts that is not full.
        chunk_tokens: the largest number of tokens of a rank that run at once.
    """

    def __init__(
        self,
        model: Path,
        *,
        nodes: int,
        ranks_per_node: int,
        dtype: str,
        samples: int,
        wait_seconds: float,
        chunk_tokens: int,
    ):
        self._dtype, self._samples, self._wait_seconds = dtype, samples, wait_seconds
        self.config = load_config(model)
        """The sizes of the model, which no weights change."""
        topology = Topology(
            num_nodes=nodes,
            ranks_per_node=ranks_per_node,
            num_experts=self.config.num_experts,
            replica_slots=0,
        )
        mesh = expert_mesh(topology, devices=host_devices(topology.num_ranks))
        self._parallel = ExpertParallel(mesh=mesh, topology=topology, chunk_tokens=chunk_tokens)
        self.model, self.version = model, "default"
        """The folder and the version of the weights, as SGLang names them."""
        self._policy: LanguageModel | None = None
        self._load(model)
        self._jobs: queue.Queue[tuple[Request | tuple[Path, str], Future[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> Future[dict[str, Any]]:
        """Queue a request; the result is an answer in SGLang's format."""
        return self._submit(request)

    def load(self, folder: Path, version: str) -> Future[None]:
        """Queue the loading of weights, after all requests before it."""
        return self._submit((folder, version))

    def close(self) -> None:
        """Finish the requests in the queue, and end."""
        self._jobs.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the worker still works."""
        return self._thread.is_alive()

    def _submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        entry = self._jobs.get()
        while entry is not None:
            entries, following = [entry], None
            if isinstance(entry[0], Request):
                entries, following = self._gather(entry)
            # Requests whose client is gone are left out.
            entries = [each for each in entries if each[1].set_running_or_notify_cancel()]
            if entries:
                self._finish(entries)
            entry = following or self._jobs.get()

    def _finish(self, entries: list[Any]) -> None:
        """Do the jobs, requests of one batch or the loading of weights, and set their results."""
        try:
            if isinstance(entries[0][0], Request):
                results = self._answer([request for request, _ in entries])
            else:
                self._load(*entries[0][0])
                results = [{}]
        except Exception as error:
            for _, future in entries:
                future.set_exception(error)
        else:
            for (_, future), result in zip(entries, results, strict=True):
                future.set_result(result)

    def _gather(self, first: Any) -> tuple[list[Any], Any]:
        """Return the batch of a request, of what comes soon and is alike, and what came next, if that is not."""
        entries = [first]
        while len(entries) < self._samples:
            try:
                entry = self._jobs.get(timeout=self._wait_seconds)
            except queue.Empty:
                break
            if entry is None:
                self._jobs.put(None)  # the end comes after this batch
                break
            if not isinstance(entry[0], Request) or entry[0].draw != first[0].draw:
                return entries, entry
            entries.append(entry)
        return entries, None

    def _load(self, folder: Path, version: str = "default") -> None:
        for field in dataclasses.fields(self.config):
            mine, other = (getattr(each, field.name) for each in (self.config, load_config(folder)))
            if mine != other:
                raise ValueError(f"{folder} has another model: {field.name}={other}, not {mine}")
        parallel = self._parallel
        self._policy = None  # no memory has room for two
        self._policy = load_pretrained(folder, parallel.mesh, parallel.topology, dtype=self._dtype)
        self.model, self.version = folder, version

    def _answer(self, requests: list[Request]) -> list[dict[str, Any]]:
        if self._policy is None:
            raise RuntimeError(f"the weights in {self.model} were not loaded")
        prompts = [request.prompt for request in requests]
        longest = max(map(len, prompts))
        width = max(1 << (longest - 1).bit_length(), SMALLEST_PROMPT)
        tokens = np.zeros((self._samples, width), np.int32)
        lengths = np.zeros(self._samples, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        seeds = [request.seed for request in requests]
        draw = requests[0].draw
        allowed = np.ones(self.config.vocabulary, bool)
        allowed[list(draw.forbidden)] = False
        responses = generate_in_waves(
            self._policy,
            tokens,
            lengths,
            keys_of(seeds + [0] * (self._samples - len(seeds))),
            parallel=self._parallel,
            max_new_tokens=draw.max_new_tokens,
            temperature=draw.temperature,
            top_p=draw.top_p,
            ends=draw.ends,
            allowed=allowed,
        )
        return [self._describe(request, responses, row) for row, request in enumerate(requests)]

    def _describe(self, request: Request, responses: Responses, row: int) -> dict[str, Any]:
        """Return a response in SGLang's format. It has a route for every token, the last one too."""
        prompt = len(request.prompt)
        count = int(responses.response_mask[row].sum())
        tokens = responses.tokens[row, prompt : prompt + count].tolist()
        log_probs = responses.log_probs[row, prompt : prompt + count].tolist()
        ended = bool(responses.ended[row])
        meta = {
            "finish_reason": (
                {"type": "stop", "matched": tokens[-1]} if ended else {"type": "length", "length": count}
            ),
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "weight_version": self.version,
            "output_token_logprobs": [
                [log_prob, token, None] for log_prob, token in zip(log_probs, tokens, strict=True)
            ],
        }
        if request.routes:
            ids = responses.expert_ids[row, : prompt + count].astype(np.int32)
            meta["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
        return {"output_ids": tokens, "meta_info": meta}
