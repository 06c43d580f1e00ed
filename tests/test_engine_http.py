"""The engine behind HTTP against servers that answer, lie, fail, die and come back; they are functions here."""

import base64
import json
import os
import threading
import time

import anyio
import httpx2
import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from experiments.engines import weights
from experiments.engines.http import HttpEngine
from experiments.engines.protocol import EngineError, Sampling, Sent, seeds_of
from experiments.engines.settings import EngineRequests
from experiments.engines.weights import remove_left
from experiments.examples.tiny_checkpoint import make_checkpoint
from experiments.rl.configs import Train
from experiments.rl.generation import Watch
from experiments.rl.policy import TINY
from experiments.rl.run_folder import save_config, saved_config
from relibra_jax.contract.types import RoutingReplay, Topology
from relibra_jax.models import LanguageModel
from relibra_jax.planning.batch import count_batch

ENDS = (7,)
SAMPLES = 12
PROMPTS = np.arange(1, 4)[None] + np.arange(SAMPLES)[:, None]
LENGTHS = np.full(SAMPLES, 3)
KEYS = jax.random.split(jax.random.key(0), SAMPLES)
ONE_RANK = Topology(num_nodes=1, ranks_per_node=1, num_experts=16, replica_slots=0)
POLICY = nnx.eval_shape(lambda: LanguageModel(TINY, ONE_RANK, rngs=nnx.Rngs(0)))
"""A policy without arrays: what these tests send is a folder's name."""
SAMPLING = Sampling(4, 1.0, 0.9, ENDS, 0, np.arange(TINY.vocabulary) != 9)
FIRST, SECOND = "http://first:1", "http://second:2"


class FakeServer:
    """A server that answers every request with the tokens 5, prompt[0] + 20 and an end."""

    def __init__(self):
        self.requests, self.loaded, self.version = [], [], "default"
        self.info = {}
        """What it tells about itself, besides the version."""
        self.tells_version = True
        self.load_status = 200
        self.dead, self.most_at_once, self._now = False, 0, 0
        self.change = lambda answer, body: answer

    async def answer(self, request):
        if self.dead:
            raise httpx2.ConnectError("connection refused")
        if request.url.path == "/health":
            return httpx2.Response(200)
        if request.url.path == "/get_model_info":
            version = {"weight_version": self.version} if self.tells_version else {}
            return httpx2.Response(200, json={**self.info, **version})
        body = json.loads(request.content)
        if request.url.path == "/update_weights_from_disk":
            self.loaded.append(body)
            if self.load_status != 200:
                return httpx2.Response(self.load_status, text="out of memory")
            self.version = body["weight_version"]
            return httpx2.Response(200, json={"success": True, "message": ""})
        assert request.url.path == "/generate"
        self.requests.append(body)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await anyio.sleep(0.01)
        self._now -= 1
        if self.dead:
            raise httpx2.ReadError("connection reset")
        tokens = [5, body["input_ids"][0] + 20, 7]
        ids = np.tile(np.array([3, 4], np.int32), (len(body["input_ids"]) + 3, TINY.layers, 1))
        answer = {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "stop"},
                **({"weight_version": self.version} if self.tells_version else {}),
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
                "routed_experts": base64.b64encode(ids.tobytes()).decode(),
            },
        }
        changed = self.change(answer, body)
        return changed if isinstance(changed, httpx2.Response) else httpx2.Response(200, json=changed)


@pytest.fixture
def servers():
    return {FIRST: FakeServer(), SECOND: FakeServer()}


@pytest.fixture
def engine(servers, tmp_path, monkeypatch):
    """Return a function that makes an engine of the servers with other settings."""

    def save(policy, folder, **_):
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(100))

    monkeypatch.setattr(weights, "saved_dtype", lambda source: None)
    monkeypatch.setattr(weights, "save_pretrained", save)

    async def answer(request):
        return await servers[f"http://{request.url.host}:{request.url.port}"].answer(request)

    made = []

    def make(addresses=(FIRST, SECOND), **settings):
        settings = EngineRequests(**{"weights": tmp_path / "weights", "patience": 0.3, **settings})
        made.append(HttpEngine(addresses, tmp_path, TINY, settings, transport=httpx2.MockTransport(answer)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def generate(engine, watch=None, version=0):
    engine.sync(POLICY, version)
    return engine.generate(PROMPTS, LENGTHS, KEYS, SAMPLING, watch=watch)


def check(generation, dropped=()):
    """Check that every sample that was not dropped has its own response."""
    responses = generation.responses
    assert np.flatnonzero(generation.dropped).tolist() == list(dropped)
    for sample in range(SAMPLES):
        if sample in dropped:
            assert not responses.mask[sample].any()
            continue
        expected = [*PROMPTS[sample], 5, PROMPTS[sample, 0] + 20, 7]
        assert responses.tokens[sample][responses.mask[sample]].tolist() == expected
        assert responses.response_mask[sample].sum() == 3
        assert (responses.expert_ids[sample, :6] == [3, 4]).all()
        assert responses.log_probs[sample, 3:6].tolist() == [-1.0] * 3
        assert responses.ended[sample]


def versions(generation):
    """Return the versions of the sampled tokens; no other token has one."""
    assert ((generation.version >= 0) == generation.responses.response_mask).all()
    return set(generation.version[generation.responses.response_mask].tolist())


def test_samples_go_to_all_servers_each_with_a_seed_of_its_own(engine, servers):
    generation = generate(engine(at_once=3))
    check(generation)
    assert generation.retried == generation.filled.sum() == 0
    requests = [request for server in servers.values() for request in server.requests]
    seeds = [request["sampling_params"]["sampling_seed"] for request in requests]
    assert len(set(seeds)) == len(requests) == SAMPLES
    assert all(0 <= seed < 2**31 for seed in seeds), "some engines take no more"
    for server in servers.values():
        assert server.most_at_once == 3, "a server has at most so many requests at a time"
    assert requests[0]["sampling_params"] | {"sampling_seed": 0} == {
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "stop_token_ids": [7],
        "no_stop_trim": True,
        "logit_bias": {"9": -1e9},
        "sampling_seed": 0,
    }
    assert requests[0]["return_logprob"]
    assert requests[0]["return_routed_experts"]


def test_samples_of_length_0_are_not_asked_for(engine, servers):
    one, lengths = engine(), np.where(np.arange(SAMPLES) == 4, 3, 0)
    one.sync(POLICY, 0)
    generation = one.generate(PROMPTS, lengths, KEYS, SAMPLING)
    assert generation.responses.mask.sum(1).tolist() == [6 if sample == 4 else 0 for sample in range(SAMPLES)]
    assert sum(len(server.requests) for server in servers.values()) == 1
    assert not generation.dropped.any()


def test_the_next_turn_of_a_sample_goes_to_the_same_server(engine, servers):
    """There its prefix may still be known. In between no server is told to forget it."""
    one = engine()
    generate(one)
    first = {address: [each["input_ids"] for each in server.requests] for address, server in servers.items()}
    for server in servers.values():
        server.requests.clear()
    order = np.arange(SAMPLES) % 3 > 0
    one.generate(np.pad(PROMPTS, ((0, 0), (0, 1))), np.where(order, 4, 0), KEYS, SAMPLING)
    for address, server in servers.items():
        assert all(request["input_ids"][:3] in first[address] for request in server.requests)
        assert len(server.loaded) == 1


def test_servers_that_take_keys_get_the_random_keys(engine, servers):
    servers[FIRST].info = {"takes_keys": True}
    check(generate(engine((FIRST,))))
    seeds = {request["input_ids"][0]: request for request in servers[FIRST].requests}
    sent = [seeds[PROMPTS[sample, 0]]["sampling_params"]["sampling_seed"] for sample in range(SAMPLES)]
    assert sent == seeds_of(KEYS)


def test_sync_lets_all_servers_load_a_version_once(engine, servers, tmp_path):
    one = engine()
    assert one.sync(POLICY, 5).bytes == 100
    assert one.sync(POLICY, 5) == Sent()
    one.sync(POLICY, 6)
    (own,) = (tmp_path / "weights").iterdir()
    for server in servers.values():
        paths = [body["model_path"] for body in server.loaded]
        assert paths == [str(own / f"version-{version}") for version in (5, 6)]
        assert len({body["weight_version"] for body in server.loaded}) == 2
    assert [path.name for path in own.iterdir()] == ["version-6"]
    generation = generate(one, version=6)
    check(generation)
    assert versions(generation) == {6}
    one.close()
    assert not list((tmp_path / "weights").iterdir())


def test_runs_do_not_take_each_others_weights(engine, servers, tmp_path):
    """Neither from the servers that they share, nor from the folder."""
    one, other = engine((FIRST,)), engine((FIRST,))
    check(generate(one, version=3))
    other.sync(POLICY, 3)
    generation = generate(one, version=3)
    check(generation)
    assert [body["weight_version"] for body in servers[FIRST].loaded] == [
        servers[FIRST].loaded[0]["weight_version"],
        servers[FIRST].loaded[1]["weight_version"],
        servers[FIRST].loaded[0]["weight_version"],
    ]
    other.close()
    assert len(list((tmp_path / "weights").iterdir())) == 1
    one.close()


def test_weights_in_memory_of_processes_that_are_gone_are_removed(tmp_path):
    alive, gone = (tmp_path / f"relibra-weights-{process}-ab" for process in (os.getpid(), 2**22 + 1))
    for folder in (alive, gone):
        (folder / "version-3").mkdir(parents=True)
    remove_left(tmp_path)
    assert alive.exists()
    assert not gone.exists()


def test_no_room_for_weights_names_the_setting(engine, servers, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_pretrained", full)
    one = engine()
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"version-1: No space left on device; --requests.weights names"
        ):
            one.sync(POLICY, 1)


def test_a_bad_answer_is_asked_for_again(engine, servers):
    lies = iter([True, False] * SAMPLES)

    def nan(answer, body):
        if body["input_ids"][0] == 4 and next(lies):
            answer["meta_info"]["output_token_logprobs"][0][0] = None
        return answer

    for server in servers.values():
        server.change = nan
    generation = generate(engine())
    check(generation)
    assert generation.retried == 1


@pytest.mark.parametrize("rule", ["stop", "drop"])
def test_a_sample_without_a_good_answer_stops_the_run_or_is_dropped(engine, servers, rule):
    def too_short(answer, body):
        if body["input_ids"][0] == 4:
            answer["meta_info"]["routed_experts"] = answer["meta_info"]["routed_experts"][:40]
        return answer

    for server in servers.values():
        server.change = too_short
    one = engine(bad_answers=rule, retries=2)
    if rule == "stop":
        message = r"http://\w+:\d: sample 3: layout 'sglang'.* \(after 3 attempts\)"
        with pytest.raises(EngineError, match=message):
            generate(one)
        return
    generation = generate(one)
    check(generation, dropped=[3])
    assert generation.retried == 2


def test_a_server_that_dies_costs_only_another_request(engine, servers):
    def die(answer, body):
        servers[FIRST].dead = True
        return httpx2.Response(503, text="shutting down")

    servers[FIRST].change = die
    generation = generate(engine(at_once=2))
    check(generation)
    assert 1 <= generation.retried <= 2
    assert len(servers[SECOND].requests) == SAMPLES


def test_a_server_that_comes_back_gets_the_weights_first(engine, servers, monkeypatch):
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    one, server = engine((FIRST,), patience=5.0), servers[FIRST]

    def restart(answer, body):
        # The new process has the weights from before the run.
        server.version, server.change = "default", lambda answer, body: answer
        return httpx2.Response(500, text="out of memory")

    server.change = restart
    generation = generate(one, version=8)
    check(generation)
    assert generation.retried >= 1
    first, again = server.loaded
    assert first == again


def test_a_server_that_was_down_gets_its_share_of_later_batches(engine, servers, monkeypatch):
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.05)
    two = engine()
    servers[SECOND].dead = True
    check(generate(two))
    servers[SECOND].dead = False
    check(generate(two, version=1))  # the server may come back at the end of this batch
    for server in servers.values():
        server.requests.clear()
    check(generate(two, version=2))
    assert [len(server.requests) for server in servers.values()] == [SAMPLES // 2] * 2


def test_a_server_with_weights_from_before_gets_the_newest_ones(engine, servers, monkeypatch):
    """It was started again between two batches, so no request has failed."""
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    one, server = engine((FIRST,), at_once=2), servers[FIRST]
    check(generate(one, version=4))
    server.version = "default"
    generation = generate(one, version=4)
    check(generation)
    assert generation.retried == 0, "it was asked before the first request"
    first, again = server.loaded
    assert first == again


def test_a_server_that_loses_its_weights_within_a_batch_gets_them_again(engine, servers, monkeypatch):
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    one, server = engine((FIRST,), at_once=2), servers[FIRST]

    def restart(answer, body):
        server.version, server.change = "default", lambda answer, body: answer
        answer["meta_info"]["weight_version"] = "default"
        return answer

    server.change = restart
    generation = generate(one, version=4)
    check(generation)
    assert 1 <= generation.retried <= 2
    first, again = server.loaded
    assert first == again


def test_a_server_that_was_down_during_sync_samples_only_with_the_new_weights(engine, servers, monkeypatch):
    """Also one that never tells its version."""
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    one, second = engine(at_once=2), servers[SECOND]
    second.tells_version = False
    check(generate(one, version=1))
    second.dead = True
    one.sync(POLICY, 2)
    second.dead = False
    requests = len(second.requests)
    generation = generate(one, version=2)
    check(generation)
    assert versions(generation) == {2}
    if len(second.requests) > requests:
        assert second.loaded[-1]["model_path"].endswith("version-2")


def test_servers_that_cannot_load_end_the_run_after_the_patience(engine, servers, monkeypatch):
    """They answer that they are healthy, so they are asked again and again."""
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    for server in servers.values():
        server.load_status = 500
    one = engine()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"no server has answered for 0.3 s: .*500 out of memory"):
            one.sync(POLICY, 1)


def test_a_busy_server_is_asked_again_and_keeps_its_weights(engine, servers, monkeypatch):
    monkeypatch.setattr("experiments.engines.servers.PAUSE_SECONDS", 0.01)
    busy = iter([True, True] + [False] * 100)
    servers[FIRST].change = lambda answer, body: httpx2.Response(429) if next(busy) else answer
    generation = generate(engine((FIRST,)))
    check(generation)
    assert generation.retried == 0
    assert len(servers[FIRST].loaded) == 1


def test_a_server_that_is_always_wrong_does_not_get_the_same_sample_again(engine, servers):
    def nan(answer, body):
        answer["meta_info"]["output_token_logprobs"][0][0] = None
        return answer

    servers[FIRST].change = nan
    check(generate(engine(at_once=2, retries=1)))
    asked = [request["input_ids"][0] for request in servers[FIRST].requests]
    assert len(set(asked)) == len(asked)


def test_another_model_behind_an_address_is_named(engine, servers):
    servers[SECOND].info = {"num_experts": 64}
    with pytest.raises(EngineError, match="http://second:2: another model, with num_experts=64, not 16"):
        engine().sync(POLICY, 1)


def test_a_closed_engine_ends_its_generation(engine, servers):
    one = engine(patience=30.0)
    one.sync(POLICY, 0)
    for server in servers.values():
        server.dead = True
    threading.Timer(0.5, one.close).start()
    with pytest.raises(EngineError, match="the engine was closed"):
        one.generate(PROMPTS, LENGTHS, KEYS, SAMPLING)


def test_a_batch_without_half_of_its_samples_ends_the_run(engine, servers):
    for server in servers.values():
        server.change = lambda answer, body: answer if body["input_ids"][0] < 5 else {"output_ids": []}
    with pytest.raises(EngineError, match="8 of 12 samples have no good answer; the last reason: http"):
        generate(engine(retries=0, bad_answers="drop"))


def test_no_server_is_an_error_with_addresses_and_seconds(engine, servers):
    one, start = engine(retries=5), time.monotonic()
    one.sync(POLICY, 0)
    for server in servers.values():
        server.dead = True
    message = (
        "no server has answered for 0.3 s: http://first:1: ConnectError: connection refused; http://second:2"
    )
    with pytest.raises(EngineError, match=message):
        generate(one)
    with pytest.raises(EngineError, match=message):
        engine().sync(POLICY, 1)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            httpx2.Response(400, text="input_ids: token 400 is\nnot known"),
            "/generate: 400 input_ids: token 400 is not",
        ),
        (httpx2.Response(200, text="<html>"), "an answer that is not JSON: <html>"),
    ],
)
def test_what_no_repetition_mends_stops_the_run(engine, servers, response, message):
    for server in servers.values():
        server.change = lambda answer, body: response
    with pytest.raises(EngineError, match=message):
        generate(engine(retries=0))


def test_a_server_that_cannot_load_weights_stops_the_run(engine, servers, monkeypatch):
    async def refuse(request):
        return httpx2.Response(200, json={"success": False, "message": "no such folder"})

    monkeypatch.setattr(servers[SECOND], "answer", refuse)
    with pytest.raises(EngineError, match=r"http://second:2: it does not load .*version-3: no such"):
        engine().sync(POLICY, 3)


def test_a_watch_sees_responses_as_they_end(engine):
    seen = []

    def look(ended, counts):
        seen.append((ended, counts()))
        return len(seen) < 3

    generation = generate(engine(at_once=2), Watch(16, look))
    check(generation)
    assert [ended.sum() for ended, _ in seen] == [1, 2, 3], "it is not called again after it returned False"
    for ended, counts in seen:
        responses = generation.responses
        replay = RoutingReplay(responses.expert_ids, responses.mask & ended[:, None])
        topology = Topology(
            num_nodes=1, ranks_per_node=1, num_experts=counts.sample_load.shape[2], replica_slots=0
        )
        expected = count_batch(replay, topology)
        jax.tree.map(np.testing.assert_array_equal, counts, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": ("localhost:30000",)}, "engine 'localhost:30000' must be an address such as http://host"),
        ({"engine": ("http://",)}, "engine 'http://' must be an address such as http://host"),
        ({"engine": ("http://host:999999",)}, "engine 'http://host:999999' must be an address"),
        ({"engine": (FIRST, FIRST)}, "engine 'http://first:1' is given 2 times"),
        ({"engine": (FIRST,)}, "engine=http://first:1 needs a model: servers load checkpoints"),
        ({"requests": EngineRequests(retries=1)}, r"engine is empty, so nothing uses EngineRequests\("),
        ({"staleness": 1}, "staleness=1 needs an engine"),
        ({"staleness": -1}, "staleness=-1 must be an integer of at least 0"),
    ],
)
def test_settings_of_engines_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Train(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wave_samples": 64}, "wave_samples=64 is for sampling without an engine"),
        ({"float8_above": 1.5}, "float8_above=1.5 is for sampling without an engine"),
        ({"rollout_dtype": "bfloat16"}, "rollout_dtype=bfloat16 is for sampling without an engine"),
        ({"staleness": 2, "algorithm": "dapo"}, "staleness=2 is not for algorithm=dapo"),
        (
            {"staleness": 1, "algorithm": "tppo", "window": 24, "response_tokens": 48},
            "staleness=1 is not for algorithm=tppo",
        ),
        (
            {
                "requests": EngineRequests(bad_answers="drop"),
                "algorithm": "tppo",
                "window": 24,
                "response_tokens": 48,
            },
            "requests.bad_answers=drop is not for window=",
        ),
    ],
)
def test_settings_that_are_not_for_servers_are_named(settings, message, tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    with pytest.raises(ValueError, match=message):
        Train(model=folder, engine=(FIRST,), **settings)


def test_settings_of_engines_are_saved_with_a_run(tmp_path):
    requests = EngineRequests(retries=5, weights=tmp_path / "weights")
    config = Train(model=make_checkpoint(tmp_path / "tiny"), engine=(FIRST, SECOND), requests=requests)
    save_config(config, tmp_path, Console(quiet=True))
    again = saved_config(tmp_path)
    assert again == config
    assert again.requests.weights == tmp_path / "weights"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at_once": 0}, "at_once=0 must be an integer of at least 1"),
        ({"retries": -1}, "retries=-1 must be an integer of at least 0"),
        ({"seconds": 0.0}, "seconds=0.0 must be positive and finite"),
        ({"bad_answers": "ignore"}, "bad_answers 'ignore' must be one of stop, drop"),
    ],
)
def test_requests_have_limits(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineRequests(**settings)
