"""The worker of a server: it samples responses to requests, one batch at a time, and loads weights between batches.

Requests that come within a short time of each other and draw tokens in the same way are one batch. It is filled up to a
fixed number of samples, so that few programs are compiled. Samples do not enter a running batch: that is what engines
are for.

An interrupt ends the running batch within a few decoding steps. Its requests, and those that wait, are answered with
the tokens that they have. The responses can then go on under other weights, as requests with longer prompts.
"""

import base64
import dataclasses
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.engines.protocol import keys_of
from experiments.engines.requests import Request
from experiments.engines.sglang import PARTIAL, is_partial
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
ENDING: Final = "the server is ending"
"""The error message for requests that come too late."""


class Ending(Exception):
    """A request that a worker does not answer any more, because it is ending."""


class _Job(NamedTuple):
    """A request, or a folder and version of weights to load, and its result."""

    work: Request | tuple[Path, str]
    result: Future[Any]
    interrupts: int
    """The number of interrupts before it."""


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
        self._lengths = set[int]()
        """The largest numbers of tokens of a response for which there are programs."""
        self._interrupts, self._ending = 0, False
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def generate(self, request: Request) -> Future[dict[str, Any]]:
        """Queue a request; the result is an answer in SGLang's format."""
        return self._submit(request)

    def load(self, folder: Path, version: str) -> Future[None]:
        """Queue the loading of weights, after all requests before it."""
        return self._submit((folder, version))

    def interrupt(self) -> None:
        """Answer the requests so far with the tokens that they have, within a few decoding steps."""
        self._interrupts += 1

    def end(self) -> None:
        """Interrupt the requests, and take no more. They raise `Ending` if they have not ended by themselves."""
        self._ending = True
        self.interrupt()

    def close(self) -> None:
        """Finish the requests in the queue, and end."""
        self._jobs.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the worker still works."""
        return self._thread.is_alive()

    def _submit(self, work: Any) -> Future[Any]:
        result: Future[Any] = Future()
        if self._ending:
            result.set_exception(Ending(ENDING))
        else:
            self._jobs.put(_Job(work, result, self._interrupts))
        return result

    def _work(self) -> None:
        job = self._jobs.get()
        while job is not None:
            jobs, following = [job], None
            if isinstance(job.work, Request):
                jobs, following = self._gather(job)
            # Requests whose client is gone are left out.
            jobs = [each for each in jobs if each.result.set_running_or_notify_cancel()]
            if jobs:
                self._finish(jobs)
            job = following or self._jobs.get()

    def _finish(self, jobs: list[_Job]) -> None:
        """Do the jobs, requests of one batch or the loading of weights, and set their results."""
        try:
            if isinstance(jobs[0].work, Request):
                requests = [job.work for job in jobs if isinstance(job.work, Request)]
                if self._interrupted(jobs[0]):
                    results = [self._describe(request, None, 0) for request in requests]
                else:
                    results = self._answer(requests, lambda: self._interrupted(jobs[0]))
            else:
                self._load(*jobs[0].work)
                results = [{}]
        except Exception as error:
            for job in jobs:
                job.result.set_exception(error)
        else:
            for job, result in zip(jobs, results, strict=True):
                if self._ending and is_partial(result):
                    job.result.set_exception(Ending(ENDING))
                else:
                    job.result.set_result(result)

    def _interrupted(self, job: _Job) -> bool:
        return self._interrupts > job.interrupts

    def _gather(self, first: _Job) -> tuple[list[_Job], _Job | None]:
        """Return the batch of a request, with similar ones that come soon; and the next job if it is not similar."""
        jobs = [first]
        while len(jobs) < self._samples:
            try:
                job = self._jobs.get(timeout=0 if self._interrupted(first) else self._wait_seconds)
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # the end comes after this batch
                break
            if not _alike(job, first):
                return jobs, job
            jobs.append(job)
        return jobs, None

    def _load(self, folder: Path, version: str = "default") -> None:
        for field in dataclasses.fields(self.config):
            mine, other = (getattr(each, field.name) for each in (self.config, load_config(folder)))
            if mine != other:
                raise ValueError(f"{folder} has another model: {field.name}={other}, not {mine}")
        parallel = self._parallel
        self._policy = None  # no memory has room for two
        self._policy = load_pretrained(folder, parallel.mesh, parallel.topology, dtype=self._dtype)
        self.model, self.version = folder, version

    def _answer(self, requests: list[Request], interrupted: Callable[[], bool]) -> list[dict[str, Any]]:
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
        most = max(request.max_new_tokens for request in requests)
        # Continued responses have fewer tokens left, and need no programs of their own if their prompts fit.
        length = min((each for each in self._lengths if each >= most), default=most)
        self._lengths.add(length)
        responses = generate_in_waves(
            self._policy,
            tokens,
            lengths,
            keys_of(seeds + [0] * (self._samples - len(seeds))),
            parallel=self._parallel,
            max_new_tokens=length,
            temperature=draw.temperature,
            top_p=draw.top_p,
            ends=draw.ends,
            allowed=allowed,
            stop=lambda step: step >= most or interrupted(),
        )
        return [self._describe(request, responses, row) for row, request in enumerate(requests)]

    def _describe(self, request: Request, responses: Responses | None, row: int) -> dict[str, Any]:
        """Return a response in SGLang's format. It has a route for every token, the last one too.

        ``responses`` is None for a batch that was interrupted before it ran.
        """
        prompt = len(request.prompt)
        sampled = 0 if responses is None else int(responses.response_mask[row].sum())
        # The others of the batch may have more tokens.
        count = min(sampled, request.max_new_tokens)
        tokens, log_probs, ended = list[int](), list[float](), False
        if responses is not None:
            tokens = responses.tokens[row, prompt : prompt + count].tolist()
            log_probs = responses.log_probs[row, prompt : prompt + count].tolist()
            ended = bool(responses.ended[row]) and sampled == count
        reason: dict[str, Any] = {"type": PARTIAL, "message": "interrupted"}
        if ended:
            reason = {"type": "stop", "matched": tokens[-1]}
        elif count == request.max_new_tokens:
            reason = {"type": "length", "length": count}
        meta = {
            "finish_reason": reason,
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "weight_version": self.version,
            "output_token_logprobs": [
                [log_prob, token, None] for log_prob, token in zip(log_probs, tokens, strict=True)
            ],
        }
        if request.routes and responses is not None:
            ids = responses.expert_ids[row, : prompt + count].astype(np.int32)
            meta["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
        return {"output_ids": tokens, "meta_info": meta}


def _alike(job: _Job, first: _Job) -> bool:
    """Whether a job can be in the batch of the first one."""
    if not isinstance(job.work, Request) or not isinstance(first.work, Request):
        return False
    return job.work.draw == first.work.draw and job.interrupts == first.interrupts
