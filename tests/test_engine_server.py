"""The server of this project answers what the embedded engine samples, with the weights that it was sent."""

import dataclasses
import time

import anyio
import httpx2
import jax
import numpy as np
import pytest
from flax import nnx

from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.http import HttpEngine
from experiments.engines.protocol import EngineError, Sampling, seeds_of
from experiments.engines.requests import Draw, Request, read_request
from experiments.engines.server import make_app
from experiments.engines.settings import EngineRequests
from experiments.engines.worker import Worker
from experiments.examples import tiny_checkpoint
from experiments.rl.policy import TINY
from relibra_jax import Topology
from relibra_jax.models import load_pretrained
from relibra_jax.models.hf_config import load_config
from relibra_jax.nnx import ExpertParallel, expert_mesh

SMALLEST = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "expert_width": 16}
TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=0)
SAMPLES, ADDRESS = 16, "http://server:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a checkpoint of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_checkpoint, "POLICIES", {"tiny": dataclasses.replace(TINY, **SMALLEST)})
        folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
        return tiny_checkpoint.make_checkpoint(folder, "qwen3_moe", head_width=8)


@pytest.fixture(scope="module")
def worker(folder):
    made = Worker(
        folder,
        nodes=2,
        ranks_per_node=4,
        dtype="float32",
        samples=SAMPLES,
        wait_seconds=0.5,
        chunk_tokens=1024,
    )
    yield made
    made.close()


@pytest.fixture
def engine(folder, worker, tmp_path):
    """Return the engine of a run whose server is an application in this process."""
    settings = EngineRequests(weights=tmp_path / "weights", retries=0, patience=1.0)
    transport = httpx2.ASGITransport(make_app(worker))
    made = HttpEngine((ADDRESS,), folder, load_config(folder), settings, transport=transport)
    yield made
    made.close()


def inputs(vocabulary):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 17, SAMPLES).astype(np.int32)
    lengths[0] = 16
    prompts = rng.integers(3, vocabulary, (SAMPLES, 16)).astype(np.int32)
    sampling = Sampling(6, 1.2, 0.95, tuple(range(3, 40)), 1, np.arange(vocabulary) != 41)
    return prompts, lengths, jax.random.split(jax.random.key(3), SAMPLES), sampling


@pytest.mark.slow
def test_a_server_samples_what_the_embedded_engine_samples(folder, worker, engine):
    """Also after an update of the weights, which the server loads from a folder."""
    mesh = expert_mesh(TOPOLOGY)
    policy = load_pretrained(folder, mesh, TOPOLOGY)
    parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY)
    embedded = EmbeddedEngine(lambda: policy, parallel, wave_samples=None, float8=None)
    prompts, lengths, keys, sampling = inputs(policy.config.vocabulary)
    seen = []
    for version in (0, 1):
        if version:
            state = nnx.state(policy, nnx.Param)
            nnx.update(policy, jax.tree.map(lambda leaf: leaf * 1.5, state))
        embedded.sync(policy, version)
        sent = engine.sync(policy, version)
        assert sent.bytes == sum(path.stat().st_size for path in worker.model.iterdir())
        actual, desired = (each.generate(prompts, lengths, keys, sampling) for each in (engine, embedded))
        assert (actual.version == version).all()
        assert not actual.dropped.any()
        assert actual.filled == actual.retried == 0
        for name, leaf, other in zip(
            actual.responses._fields, actual.responses, desired.responses, strict=True
        ):
            if name == "log_probs":
                np.testing.assert_allclose(leaf, other, atol=1e-6)
            elif name == "expert_ids":
                np.testing.assert_array_equal(leaf[desired.responses.mask], other[desired.responses.mask])
            else:
                np.testing.assert_array_equal(leaf, other, err_msg=name)
        seen.append(actual.responses)
    assert (seen[0].tokens != seen[1].tokens).any(), "other weights sample other tokens"
    assert seen[0].ended.any()
    assert not seen[0].ended.all()


def test_a_server_refuses_weights_of_another_model(folder, engine, tmp_path, monkeypatch):
    other = tiny_checkpoint.make_checkpoint(tmp_path / "other", "qwen3_moe")
    policy = load_pretrained(folder, expert_mesh(TOPOLOGY), TOPOLOGY)
    monkeypatch.setattr(
        "experiments.engines.weights.save_pretrained", lambda policy, to, **_: other.rename(to)
    )
    with pytest.raises(
        EngineError, match=r"/update_weights_from_disk: 400 .*another model: width=64, not 16"
    ):
        engine.sync(policy, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids: expected the tokens of a prompt"),
        ({"input_ids": [999]}, "input_ids: token 999 is not in the vocabulary of 394"),
        ({"input_ids": [[]]}, "a prompt must have at least one token"),
        ({"input_ids": [5]}, "stop_token_ids must name at least one token"),
        ({"input_ids": [5], "sampling_params": {"stop_token_ids": "x"}}, "stop_token_ids: expected a list"),
        ({"input_ids": [5.9]}, "input_ids: expected an integer, found 5.9"),
        ({"input_ids": [5], "sampling_params": []}, "stop_token_ids must name at least one token"),
        ({"input_ids": [5], "sampling_params": [1]}, "sampling_params and logit_bias must be objects"),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "top_p": None}},
            "top_p: expected a number",
        ),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "top_p": 2}},
            "top_p=2.0 must be above 0",
        ),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "max_new_tokens": 4.9}},
            "max_new_tokens: expected an integer, found 4.9",
        ),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "sampling_seed": 2**70}},
            "has more than 64 bits",
        ),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "logit_bias": {"4": "no"}}},
            "logit_bias: expected a number, found no",
        ),
        ({"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "top_k": 3}}, "top_k not supported"),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [2], "logit_bias": {"4": 1.5}}},
            "logit_bias of token 4: only tokens that may not be sampled",
        ),
    ],
)
def test_bad_requests_get_one_line(worker, body, message):
    transport = httpx2.ASGITransport(make_app(worker))

    async def post():
        async with httpx2.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            return await client.post("/generate", json=body)

    response = anyio.run(post)
    assert response.status_code == 400
    assert message in response.json()["message"]


def test_read_request_takes_the_fields_that_runs_send():
    keys = jax.random.split(jax.random.key(9), 2)
    (seed, _) = seeds_of(keys)
    params = {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop_token_ids": [2],
        "no_stop_trim": True,
        "logit_bias": {"4": -1e9},
        "sampling_seed": seed,
    }
    body = {"sampling_params": params, "return_routed_experts": True}
    assert read_request(body, [5, 6], 10) == Request((5, 6), seed, Draw(4, 0.5, 0.9, (2,), (4,)), True)


class Scripted(Worker):
    """A worker whose batches are the prompts of their requests, and fail for the token 9."""

    def _load(self, folder, version="default"):
        self._policy, self.version = object(), version

    def _answer(self, requests):
        time.sleep(0.05)
        if any(9 in request.prompt for request in requests):
            raise RuntimeError("out of memory")
        return [{"batch": [request.prompt for request in requests]} for _ in requests]


@pytest.fixture
def scripted(folder):
    made = Scripted(
        folder, nodes=2, ranks_per_node=4, dtype="float32", samples=8, wait_seconds=0.2, chunk_tokens=1024
    )
    yield made
    made.close()


def request(*prompt, temperature=1.0):
    return Request(prompt, 0, Draw(4, temperature, 1.0, (2,), ()), True)


def test_a_batch_has_requests_that_draw_alike_in_their_order(scripted, folder):
    futures = [scripted.generate(request(token)) for token in (1, 2)]
    other = scripted.generate(request(3, temperature=0.5))
    loaded = scripted.load(folder, "7")
    last = scripted.generate(request(4))
    assert [future.result(10)["batch"] for future in futures] == [[(1,), (2,)]] * 2
    assert other.result(10)["batch"] == [(3,)]
    assert loaded.result(10) == {}
    assert last.result(10)["batch"] == [(4,)]
    assert scripted.version == "7"


def test_a_worker_outlives_failures_and_clients_that_are_gone(scripted):
    bad = scripted.generate(request(9))
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.result(10)
    busy = scripted.generate(request(5, temperature=0.1))
    gone, kept = (scripted.generate(request(token)) for token in (6, 7))
    assert gone.cancel()
    assert busy.result(10)["batch"] == [(5,)]
    assert kept.result(10)["batch"] == [(7,)]
    assert scripted.alive


def test_a_worker_finishes_its_requests_before_it_ends(folder):
    worker = Scripted(
        folder, nodes=2, ranks_per_node=4, dtype="float32", samples=8, wait_seconds=5.0, chunk_tokens=1024
    )
    future = worker.generate(request(1))
    time.sleep(0.2)
    worker.close()
    assert future.result(0)["batch"] == [(1,)]
    assert not worker.alive
