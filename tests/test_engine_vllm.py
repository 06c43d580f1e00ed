"""vLLM's interface: a server that answers in the form of version 0.33.0, and what a run makes of it.

The forms are those of its code: ``entrypoints/scale_out/token_in_token_out`` (requests and answers),
``entrypoints/rl/online/api_router.py`` and ``entrypoints/serve/dev/rpc/api_router.py`` (weights).
"""

import base64
import io
import json

import anyio
import httpx2
import numpy as np
import pytest
from test_engine_http import ENDS, FIRST, KEYS, LENGTHS, POLICY, PROMPTS, SAMPLES, SAMPLING, SECOND
from test_engine_http import FakeServer as FakeSglang

from experiments.engines import vllm, weights
from experiments.engines.answers import BadAnswer
from experiments.engines.http import HttpEngine
from experiments.engines.protocol import EngineError
from experiments.engines.settings import EngineRequests
from experiments.rl.policy import TINY

TAKEN = frozenset(
    ("max_tokens", "temperature", "top_p", "stop_token_ids", "ignore_eos", "logit_bias", "seed", "logprobs")
    + ("routed_experts_prompt_start", "detokenize", "allowed_token_ids")
)
"""The fields of its ``SamplingParams`` that a run uses; it ignores others without a word."""


def routes(first, rows):
    """Return the experts of the tokens of a sample: others for every token and layer."""
    ids = first + np.arange(rows)[:, None] * 3 + np.arange(TINY.layers)
    return np.stack([ids % 16, (ids + 5) % 16], axis=-1)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


class FakeVllm:
    """A server that answers every request with the tokens 5, prompt[0] + 20 and an end, of log-probability -1."""

    def __init__(self):
        self.calls, self.requests = [], []
        """The calls that change it, and the requests for responses."""
        self.version, self.paused = "default", False
        self.dev_mode = self.scale_out = True
        self.processed = False
        """Whether it runs with ``--logprobs-mode processed_logprobs``."""
        self.answers = {}
        """Other answers to calls than the usual ones, by path."""
        self.change = lambda answer, body: answer

    async def answer(self, request):
        path, body = request.url.path, json.loads(request.content or "null")
        if path in self.answers:
            return self.answers[path]
        if path == "/health":
            return httpx2.Response(200)
        if path == "/version":
            return httpx2.Response(200, json={"version": "0.33.0"})
        if path == "/inference/v1/generate":
            await anyio.sleep(0.01)
            return self.generate(body)
        if not self.dev_mode or path == "/get_model_info":
            return httpx2.Response(404, json={"detail": "Not Found"})
        if path == "/weight_info":
            return httpx2.Response(200, json={"weight_version": self.version})
        self.calls.append((str(request.url.raw_path, "ascii"), body))
        if path == "/pause":
            self.paused = True
            return httpx2.Response(200, json={"status": "paused"})
        if path == "/resume":
            self.paused = False
            return httpx2.Response(200, json={"status": "resumed"})
        assert self.paused, "weights change only while it is paused"
        if path == "/collective_rpc":
            return httpx2.Response(200, json={"results": [None]})
        assert path == "/update_weight_version"
        self.version = body["new_version"]
        return httpx2.Response(200, json={"success": True, "new_version": self.version})

    def generate(self, body):
        params, prompt = body["sampling_params"], body["token_ids"]
        assert params.keys() <= TAKEN
        if not self.scale_out:
            return httpx2.Response(403, json={"error": {"message": "Scale-out endpoints are disabled."}})
        if self.paused:
            return httpx2.Response(503, json={"error": {"message": "generation is paused"}})
        tokens, log_prob, reason = [5, prompt[0] + 20, 7], -1.0, "stop"
        if only := params.get("allowed_token_ids"):
            tokens, log_prob, reason = only, 0.0 if self.processed else -6.0, "length"
        else:
            self.requests.append(body)
        rows = routes(prompt[0], len(prompt) + len(tokens) - 1).astype(np.uint8)
        span = {"version": self.version, "start": 0, "end": len(tokens)}
        entries = [
            {"token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": []} for token in tokens
        ]
        choice = {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": 7 if reason == "stop" else None,
            "token_ids": tokens,
            "routed_experts": npy(rows),
            "sampling_mask": None,
            "weight_versions": [span],
            "logprobs": {"content": entries},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        answer = {"request_id": "generate-tokens-1", "usage": usage, "output_mode": "tokens"}
        return httpx2.Response(200, json=self.change({**answer, "choices": [choice]}, body))


@pytest.fixture
def servers():
    return {FIRST: FakeVllm(), SECOND: FakeVllm()}


@pytest.fixture
def engine(servers, tmp_path, monkeypatch):
    """Return a function that makes an engine of the servers with other settings."""
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(weights, "saved_dtype", lambda source: None)
    monkeypatch.setattr(weights, "save_pretrained", lambda policy, folder, **_: folder.mkdir())

    async def answer(request):
        return await servers[f"http://{request.url.host}:{request.url.port}"].answer(request)

    def make(addresses=(FIRST, SECOND), *, sends=True, **settings):
        settings = EngineRequests(**{"weights": tmp_path / "weights", "patience": 0.3, **settings})
        transport = httpx2.MockTransport(answer)
        return HttpEngine(addresses, tmp_path, TINY, settings, sends=sends, transport=transport)

    return make


def generate(engine, sampling=SAMPLING, version=0):
    engine.sync(POLICY, version)
    return engine.generate(PROMPTS, LENGTHS, KEYS, sampling)


def check(generation):
    """Check that every sample has its own response, and the routes that were encoded."""
    responses = generation.responses
    assert not generation.dropped.any()
    assert generation.filled.sum() == SAMPLES, "the last token of each has no route"
    for sample in range(SAMPLES):
        first = PROMPTS[sample, 0]
        assert responses.mask[sample].sum() == 6
        assert responses.tokens[sample, :6].tolist() == [*PROMPTS[sample], 5, first + 20, 7]
        assert responses.response_mask[sample].nonzero()[0].tolist() == [3, 4, 5]
        assert responses.log_probs[sample, 3:6].tolist() == [-1.0] * 3
        np.testing.assert_array_equal(responses.expert_ids[sample, :6], routes(first, 5)[[0, 1, 2, 3, 4, 4]])
        assert responses.ended[sample]


def test_a_batch_has_the_tokens_log_probabilities_and_routes_of_the_answers(engine, servers):
    generation = generate(engine(at_once=3), version=4)
    check(generation)
    assert (generation.version[generation.responses.response_mask] == 4).all()
    assert generation.retried == 0
    requests = [request for server in servers.values() for request in server.requests]
    assert len({request["sampling_params"]["seed"] for request in requests}) == SAMPLES
    assert all(0 <= request["sampling_params"]["seed"] < 2**31 for request in requests)
    assert requests[0]["sampling_params"] | {"seed": 0} == {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "stop_token_ids": list(ENDS),
        "ignore_eos": True,
        "logit_bias": {"9": -1e9},
        "seed": 0,
        "logprobs": 0,
        "routed_experts_prompt_start": 0,
        "detokenize": False,
    }


def test_weights_are_loaded_while_the_server_is_paused(engine, servers, tmp_path):
    one = engine()
    one.sync(POLICY, 5)
    one.sync(POLICY, 6)
    (own,) = (tmp_path / "weights").iterdir()
    for server in servers.values():
        names = [body["new_version"] for path, body in server.calls if path == "/update_weight_version"]
        assert len(set(names)) == 2
        assert server.calls == [
            call
            for name, version in zip(names, (5, 6), strict=True)
            for call in (
                ("/pause?mode=wait", {}),
                (
                    "/collective_rpc",
                    {"method": "reload_weights", "kwargs": {"weights_path": str(own / f"version-{version}")}},
                ),
                ("/update_weight_version", {"new_version": name}),
                ("/resume", {}),
            )
        ]
    check(generate(one, version=6))
    assert len(servers[FIRST].calls) == 8, "weights of the same version are not sent again"


def test_a_server_that_cannot_load_stays_paused_until_it_can(engine, servers):
    server = servers[FIRST]
    server.answers["/collective_rpc"] = httpx2.Response(500, text="no safetensors")
    one = engine((FIRST,))
    with pytest.raises(
        EngineError, match=r"no server has answered for 0.3 s: .*/collective_rpc: 500 no safetensors"
    ):
        one.sync(POLICY, 1)
    assert server.paused
    server.answers.clear()
    check(generate(one, version=1))


def test_a_server_whose_resume_had_no_answer_is_resumed_again(engine, servers):
    server = servers[FIRST]
    server.answers["/resume"] = httpx2.Response(500)
    one = engine((FIRST,))
    with pytest.raises(EngineError, match="no server has answered"):
        one.sync(POLICY, 1)
    loads = [path for path, _ in server.calls].count("/collective_rpc")
    assert loads == 1, "it has the weights"
    server.answers.clear()
    check(generate(one, version=1))


def test_a_server_that_loses_its_weights_gets_them_again(engine, servers):
    server = servers[FIRST]

    def restart(answer, body):
        server.version, server.change = "default", lambda answer, body: answer
        answer["choices"][0]["weight_versions"][0]["version"] = "default"
        return answer

    one = engine((FIRST,), at_once=2)
    one.sync(POLICY, 4)
    server.change = restart
    generation = generate(one, version=4)
    check(generation)
    assert 1 <= generation.retried <= 2
    assert [path for path, _ in server.calls].count("/collective_rpc") == 2


def test_servers_with_either_interface_share_a_batch(engine, servers):
    servers[SECOND] = FakeSglang()
    generation = generate(engine(at_once=2))
    assert not generation.dropped.any()
    assert servers[FIRST].requests
    assert servers[SECOND].requests
    assert generation.filled.sum() == len(servers[FIRST].requests)


def test_servers_without_development_mode_sample_with_the_weights_that_they_have(engine, servers):
    for server in servers.values():
        server.dev_mode = False
    check(generate(engine(sends=False)))
    with pytest.raises(
        EngineError, match=r"http://first:1: no /weight_info: does it .* VLLM_SERVER_DEV_MODE=1"
    ):
        engine((FIRST,)).sync(POLICY, 1)


@pytest.mark.parametrize(
    ("processed", "fits", "other", "message"),
    [
        (False, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 0.5}, "raw_logprobs it does not give"),
        (True, {"temperature": 0.5, "top_p": 1.0}, {"top_p": 0.9}, "processed_logprobs it does not give"),
    ],
)
def test_log_probabilities_are_those_at_the_temperature(engine, servers, processed, fits, other, message):
    for server in servers.values():
        server.processed = processed
    one = engine()
    check(generate(one, SAMPLING._replace(**fits)))
    check(generate(one, SAMPLING._replace(temperature=0.0)))
    with pytest.raises(EngineError, match=message):
        generate(one, SAMPLING._replace(**fits)._replace(**other))


def test_no_more_tokens_have_a_bias_than_the_server_takes(engine, servers, monkeypatch):
    monkeypatch.setattr(vllm, "MOST_BIASES", 2)
    forbidden = SAMPLING._replace(allowed=~np.isin(np.arange(TINY.vocabulary), [9, 11, 13]))
    check(generate(engine((FIRST,)), forbidden))
    assert servers[FIRST].requests[0]["sampling_params"]["logit_bias"] == {"9": -1e9, "11": -1e9}


def entries(*log_probs, tokens=(5, 24, 7)):
    return {
        "content": [
            {"token_id": token, "logprob": each} for token, each in zip(tokens, log_probs, strict=True)
        ]
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routed_experts": None}, "no routed_experts: does the server run with --enable-return-routed"),
        ({"routed_experts": ...}, "the answer lacks 'routed_experts'"),
        ({"routed_experts": "AAAA"}, "not base64 of an .npy"),
        ({"routed_experts": npy(routes(4, 4).astype(np.uint8))}, "2 of 6 tokens have none"),
        ({"routed_experts": npy(routes(4, 7).astype(np.uint8))}, "it has rows 0..6, but only 6 real tokens"),
        ({"routed_experts": npy(routes(4, 5)[:, :3].astype(np.uint8))}, "3 layers"),
        ({"routed_experts": npy(routes(4, 5)[..., :1].astype(np.uint8))}, "top-1"),
        ({"routed_experts": npy(routes(4, 5) * 0)}, "no route .only zeros"),
        ({"routed_experts": npy(routes(4, 5) + 16)}, "token 0, layer 0"),
        ({"logprobs": None}, "the answer has another form"),
        ({"logprobs": entries(-1.0, -9999.0, -1.0)}, "a log-probability is nan"),
        ({"logprobs": entries(-1.0, None, -1.0)}, "a log-probability is nan"),
        ({"logprobs": entries(-1.0, -1.0, -1.0, tokens=(5, 5, 7))}, "3 log-probabilities are not those"),
        ({"token_ids": None}, "tokens must be a list of integers, found None"),
        ({"token_ids": [5, 9, 7]}, "token 9 may not be sampled"),
        ({"token_ids": [5, 24]}, "completion_tokens is 3, where there are 2"),
        ({"finish_reason": "abort"}, "the response ended by 'abort'"),
        ({"finish_reason": "repetition"}, "the response ended by 'repetition'"),
        (
            {"weight_versions": [{"version": "other", "start": 0, "end": 3}]},
            "sampled with weights of version other, where",
        ),
    ],
)
def test_bad_answers_say_what_is_wrong(fields, message):
    body = {"token_ids": [4, 5, 6], "sampling_params": {}}
    answer = json.loads(FakeVllm().generate(body).content)
    assert vllm.read_answer(answer, 3, SAMPLING, TINY, version="default").filled == 1
    choice = answer["choices"][0] | fields
    answer["choices"] = [{name: value for name, value in choice.items() if value is not ...}]
    with pytest.raises(BadAnswer, match=message):
        vllm.read_answer(answer, 3, SAMPLING, TINY, version="default")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"scale_out": False}, "/inference/v1/generate: 403 .*Scale-out endpoints are disabled"),
        (
            {"change": lambda answer, _: {"choices": [{**answer["choices"][0], "routed_experts": None}]}},
            "http://first:1: the answer lacks 'usage'",
        ),
        ({"answers": {"/version": httpx2.Response(404)}}, r"neither /get_model_info \(SGLang\) nor /version"),
    ],
)
def test_servers_that_cannot_do_what_a_run_needs_end_it_before_the_first_batch(
    engine, servers, fault, message
):
    for name, value in fault.items():
        setattr(servers[FIRST], name, value)
    with pytest.raises(EngineError, match=message):
        engine((FIRST,)).sync(POLICY, 0)
