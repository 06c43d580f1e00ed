"""The server of this project answers what the embedded engine samples, with the weights that it was sent."""

import dataclasses
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
from experiments.engines.worker import Ending, Worker
from experiments.examples import tiny_checkpoint
from experiments.rl.policy import TINY
from experiments.rl.waves import generate_in_waves
from relibra_jax import Topology
from relibra_jax.models import load_pretrained, token_log_probs
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
        for generation in (actual, desired):
            sampled = generation.version[generation.responses.response_mask]
            assert (sampled == version).all()
            assert (generation.version == -1).sum() == generation.version.size - sampled.size
        assert not actual.dropped.any()
        assert actual.filled.sum() == actual.retried == 0
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


@pytest.mark.slow
def test_an_interrupted_batch_carries_on_under_new_weights(folder, worker, engine, monkeypatch):
    """It begins as without the interrupt, and all tokens have what the weights compute that sampled them."""
    mesh = expert_mesh(TOPOLOGY)
    parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY)
    old, new = (load_pretrained(folder, mesh, TOPOLOGY) for _ in range(2))
    nnx.update(new, jax.tree.map(lambda leaf: leaf * 1.5, nnx.state(new, nnx.Param)))
    prompts, lengths, keys, sampling = inputs(old.config.vocabulary)
    engine.sync(old, 0)
    whole = engine.generate(prompts, lengths, keys, sampling).responses
    reached = threading.Event()

    def hold(*arguments, stop, **options):
        def held(step):
            if step == 4 and not reached.is_set():
                reached.set()
                while not stop(step):
                    time.sleep(0.01)
            return stop(step)

        return generate_in_waves(*arguments, stop=held, **options)

    monkeypatch.setattr("experiments.rl.generation.STOP_EVERY", 2)
    monkeypatch.setattr("experiments.engines.worker.generate_in_waves", hold)
    with ThreadPoolExecutor(1) as background:
        future = background.submit(engine.generate, prompts, lengths, keys, sampling)
        assert reached.wait(60)
        engine.sync(new, 1)
        generation = future.result(120)
    actual, version = generation.responses, generation.version
    assert generation.retried == generation.filled.sum() == 0
    assert worker._lengths == {6}, "the second part needs no program for its length"
    before = version == 0
    assert before.sum(1).max() == 4
    for name in ("tokens", "log_probs", "expert_ids"):
        leaf, other = getattr(actual, name), getattr(whole, name)
        np.testing.assert_array_equal(leaf[before], other[before], err_msg=name)
    counts = actual.response_mask.sum(1)
    assert (actual.ended | (counts == 6)).all()
    assert (whole.response_mask.sum(1) <= 4).any(), "some had ended before the interrupt"
    assert (version == 1).any()

    @functools.partial(nnx.jit, static_argnames="parallel")
    def recompute(policy, tokens, mask, *, parallel):
        output = policy(tokens, mask, parallel=parallel)
        log_probs = token_log_probs(policy, output.hidden, tokens, parallel=parallel, temperature=1.2)
        return log_probs, output.expert_ids

    for number, policy in enumerate((old, new)):
        log_probs, ids = recompute(policy, actual.tokens, actual.mask, parallel=parallel)
        sampled = version == number
        np.testing.assert_allclose(actual.log_probs[sampled], np.asarray(log_probs)[sampled], atol=2e-5)
        np.testing.assert_array_equal(actual.expert_ids[sampled], np.asarray(ids)[sampled])


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
    assert read_request(body, [5, 6], 10) == Request((5, 6), seed, 4, Draw(0.5, 0.9, (2,), (4,)), True)


class Scripted(Worker):
    """A worker whose batches are the prompts of their requests, and fail for the token 9."""

    def _load(self, folder, version="default"):
        self._policy, self.version = object(), version

    def _answer(self, requests, interrupted):
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
    return Request(prompt, 0, 4, Draw(temperature, 1.0, (2,), ()), True)


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


class Held(Scripted):
    """A worker whose batches run until they are interrupted."""

    def _answer(self, requests, interrupted):
        while not interrupted():
            time.sleep(0.01)
        return [self._describe(request, None, 0) for request in requests]


@pytest.fixture
def held(folder):
    made = Held(
        folder, nodes=2, ranks_per_node=4, dtype="float32", samples=8, wait_seconds=0.1, chunk_tokens=1024
    )
    yield made
    made.end()
    made.close()


def reason(future):
    return future.result(10)["meta_info"]["finish_reason"]["type"]


def test_an_interrupt_ends_the_requests_before_it(held, folder):
    running, waiting = held.generate(request(1)), held.generate(request(2, temperature=0.5))
    time.sleep(0.3)
    assert not running.done()
    held.interrupt()
    after, loaded = held.generate(request(3)), held.load(folder, "7")
    assert reason(running) == reason(waiting) == "abort"
    assert waiting.result()["output_ids"] == []
    time.sleep(0.3)
    assert not after.done()
    held.interrupt()
    assert reason(after) == "abort"
    assert loaded.result(10) == {}


def test_a_worker_that_ends_refuses_its_requests(held):
    running = held.generate(request(1))
    time.sleep(0.3)
    held.end()
    for future in (running, held.generate(request(2))):
        with pytest.raises(Ending, match="the server is ending"):
            future.result(10)


def test_a_server_that_ends_answers_503(held):
    transport = httpx2.ASGITransport(make_app(held))
    body = {"input_ids": [5], "sampling_params": {"stop_token_ids": [2]}}

    async def post():
        async with httpx2.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            refused = await client.post("/abort_request", json={"rid": "7"})
            held.end()
            return refused, await client.post("/generate", json=body)

    refused, ended = anyio.run(post)
    assert refused.status_code == 400
    assert "abort_all" in refused.json()["message"]
    assert (ended.status_code, ended.text) == (503, "the server is ending")


def test_a_worker_finishes_its_requests_before_it_ends(folder):
    worker = Scripted(
        folder, nodes=2, ranks_per_node=4, dtype="float32", samples=8, wait_seconds=5.0, chunk_tokens=1024
    )
    future = worker.generate(request(1))
    time.sleep(0.2)
    worker.close()
    assert future.result(0)["batch"] == [(1,)]
    assert not worker.alive
