"""New weights interrupt responses, which carry on under them; servers are functions here, and stop where tests say."""

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import httpx2
import jax
import numpy as np
import pytest
from flax import nnx

from experiments.engines import weights
from experiments.engines.http import HttpEngine
from experiments.engines.protocol import EngineError, Sampling, seeds_of
from experiments.engines.settings import EngineRequests
from experiments.rl.policy import TINY
from relibra_jax.contract.types import Topology
from relibra_jax.models import LanguageModel

SAMPLES, PROMPT = 6, 3
PROMPTS = np.arange(1, 4)[None] + np.arange(SAMPLES)[:, None]
LENGTHS = np.full(SAMPLES, PROMPT)
KEYS = jax.random.split(jax.random.key(0), SAMPLES)
ONE_RANK = Topology(num_nodes=1, ranks_per_node=1, num_experts=16, replica_slots=0)
POLICY = nnx.eval_shape(lambda: LanguageModel(TINY, ONE_RANK, rngs=nnx.Rngs(0)))
SAMPLING = Sampling(4, 1.0, 1.0, (7,), 0, np.ones(TINY.vocabulary, bool))
ADDRESS = "http://server:1"


class StoppingServer:
    """A server whose responses are the tokens 5, prompt[0] + 20 and an end, and which can wait for an interrupt.

    Log-probabilities and experts tell the number of weights that it has loaded. Like SGLang it does not run the last
    token.
    """

    def __init__(self):
        self.held = None
        """The number of tokens of a response after which it waits for an interrupt. None for no wait."""
        self.events, self.requests, self.version = [], [], "default"
        self.waiting, self.loads, self.abort_status = 0, 0, 200
        self.change = lambda answer: answer
        self._interrupt = anyio.Event()

    async def answer(self, request):
        path, body = request.url.path, json.loads(request.content or "{}")
        if path == "/get_model_info":
            return httpx2.Response(200, json={"weight_version": self.version, "takes_keys": True})
        if path == "/health":
            return httpx2.Response(200)
        if path == "/abort_request":
            assert body == {"abort_all": True}
            self.events.append("interrupt")
            self._interrupt.set()
            self._interrupt = anyio.Event()
            return httpx2.Response(self.abort_status)
        if path == "/update_weights_from_disk":
            self.events.append("load")
            self.version, self.loads = body["weight_version"], self.loads + 1
            return httpx2.Response(200, json={"success": True})
        return httpx2.Response(200, json=await self._generate(body))

    async def _generate(self, body):
        self.requests.append(body)
        prompt = body["input_ids"]
        so_far = len(prompt) - PROMPT
        tokens = [5, prompt[0] + 20, 7][so_far:]
        reason, version, number = {"type": "stop"}, self.version, self.loads
        if self.held is not None:
            tokens, reason = tokens[: self.held - so_far], {"type": "abort", "message": "Aborted"}
            self.waiting += 1
            await self._interrupt.wait()
            self.waiting -= 1
            self.events.append("answer")
        shape = (len(prompt) + len(tokens) - 1, TINY.layers, TINY.top_k)
        ids = np.broadcast_to(np.int32([number, number + 1]), shape)
        answer = {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": reason,
                "weight_version": version,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(tokens),
                "output_token_logprobs": [[-float(number), token, None] for token in tokens],
                "routed_experts": base64.b64encode(ids.tobytes()).decode(),
            },
        }
        return self.change(answer) if reason["type"] == "abort" else answer


@pytest.fixture
def server():
    return StoppingServer()


@pytest.fixture
def engine(server, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "saved_dtype", lambda source: None)
    monkeypatch.setattr(weights, "save_pretrained", lambda policy, folder, **_: folder.mkdir())
    settings = EngineRequests(weights=tmp_path / "weights", patience=0.3, retries=0)
    made = HttpEngine((ADDRESS,), tmp_path, TINY, settings, transport=httpx2.MockTransport(server.answer))
    yield made
    made.close()


def interrupt(engine, server, held, times=1):
    """Generate in another thread, and send other weights so many times when all responses have ``held`` tokens."""
    engine.sync(POLICY, 3)
    server.held = held
    with ThreadPoolExecutor(1) as background:
        future = background.submit(engine.generate, PROMPTS, LENGTHS, KEYS, SAMPLING)
        for number in range(times):
            end = time.monotonic() + 30
            while server.waiting < SAMPLES:
                assert time.monotonic() < end
                time.sleep(0.01)
            server.held = None if number == times - 1 else held + number + 1
            engine.sync(POLICY, 4 + number)
        return future.result(30)


def check_whole(generation):
    assert generation.retried == 0
    assert not generation.dropped.any()
    for sample in range(SAMPLES):
        expected = [*PROMPTS[sample], 5, PROMPTS[sample, 0] + 20, 7]
        assert generation.responses.tokens[sample][generation.responses.mask[sample]].tolist() == expected
    assert generation.responses.ended.all()


def test_tokens_keep_what_the_weights_recorded_that_sampled_them(engine, server):
    generation = interrupt(engine, server, held=2)
    check_whole(generation)
    for sample in range(SAMPLES):
        assert generation.version[sample].tolist() == [-1, -1, -1, 3, 3, 4, -1]
        assert generation.responses.log_probs[sample, 3:6].tolist() == [-1, -1, -2]
        # The first weights never ran the token at the joint, which they sampled last: it has the experts of the second.
        experts = generation.responses.expert_ids[sample, :6, 0, 0].tolist()
        assert experts == [1, 1, 1, 1, 2, 2]
    assert generation.filled.sum() == SAMPLES, "the end tokens alone"


def test_a_continued_request_has_the_tokens_so_far_and_other_random_numbers(engine, server):
    interrupt(engine, server, held=2)
    by_sample = sorted(server.requests, key=lambda request: (len(request["input_ids"]), request["input_ids"]))
    first, second = by_sample[:SAMPLES], by_sample[SAMPLES:]
    assert [request["input_ids"] for request in second] == [
        [*request["input_ids"], 5, request["input_ids"][0] + 20] for request in first
    ]
    assert {request["sampling_params"]["max_new_tokens"] for request in first} == {4}
    assert {request["sampling_params"]["max_new_tokens"] for request in second} == {2}
    seeds = [request["sampling_params"]["sampling_seed"] for request in by_sample]
    assert seeds[:SAMPLES] == seeds_of(KEYS)
    assert len(set(seeds)) == 2 * SAMPLES
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_weights_come_after_the_last_answer_of_the_ones_before(engine, server):
    interrupt(engine, server, held=1)
    assert server.events == ["load", "interrupt", *["answer"] * SAMPLES, "load"]


def test_a_response_may_have_tokens_of_many_versions(engine, server):
    generation = interrupt(engine, server, held=1, times=2)
    check_whole(generation)
    assert (generation.version == [-1, -1, -1, 3, 4, 5, -1]).all()
    assert (generation.responses.log_probs[:, 3:6] == [-1, -2, -3]).all()
    assert (generation.responses.expert_ids[:, :6, 0, 0] == [1, 1, 1, 2, 3, 3]).all()


def test_a_response_that_ended_at_the_interrupt_is_whole(engine, server):
    """Engines say that it was aborted, because the interrupt came before they looked at its last token."""
    generation = interrupt(engine, server, held=3)
    check_whole(generation)
    assert (generation.version == [-1, -1, -1, 3, 3, 3, -1]).all()
    assert len(server.requests) == SAMPLES


def before_its_turn(answer):
    """As sglang-jax answers a request that it has not begun."""
    meta = {"finish_reason": {"type": "abort", "message": "Abort before prefill"}}
    return {"text": "", "meta_info": {**meta, "prompt_tokens": 0, "completion_tokens": 0}}


def without_routes(answer):
    """As SGLang answers a request that waits for its second turn."""
    del answer["meta_info"]["routed_experts"]
    return answer


@pytest.mark.parametrize("change", [before_its_turn, without_routes])
def test_what_an_interrupted_answer_lacks_is_sampled_again(engine, server, change):
    """It is no fault of the server, and costs no attempt."""
    server.change = change
    generation = interrupt(engine, server, held=2)
    check_whole(generation)
    assert (generation.version == [-1, -1, -1, 4, 4, 4, -1]).all()
    first, again = server.requests[:SAMPLES], server.requests[SAMPLES:]
    assert sorted(first, key=str) == sorted(again, key=str)


def test_what_is_lacking_later_costs_the_tokens_since_the_last_good_one(engine, server):
    answers = []

    def change(answer):
        answers.append(answer)
        return answer if len(answers) <= SAMPLES else without_routes(answer)

    server.change = change
    generation = interrupt(engine, server, held=1, times=2)
    check_whole(generation)
    assert (generation.version == [-1, -1, -1, 3, 5, 5, -1]).all()


def test_a_server_that_cannot_be_interrupted_is_named(engine, server):
    server.abort_status = 404
    with pytest.raises(EngineError, match="http://server:1/abort_request: 404"):
        interrupt(engine, server, held=1)
