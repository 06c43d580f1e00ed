"""Runs whose responses come from servers in other processes."""

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from test_rl_processes import run

from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.http import HttpEngine
from experiments.engines.protocol import Sampling
from experiments.engines.servers import EngineError
from experiments.engines.settings import EngineRequests
from experiments.examples.tiny_checkpoint import make_checkpoint
from experiments.rl.configs import Train
from experiments.rl.generation import Watch
from experiments.rl.metrics_log import read_metrics
from experiments.rl.train import run_train
from experiments.rl.trainer import Trainer
from relibra_jax import Topology
from relibra_jax.models import load_pretrained, save_pretrained
from relibra_jax.models.hf_config import load_config
from relibra_jax.nnx import ExpertParallel, expert_mesh

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]
SETTINGS = {
    "task": "count",
    "warmup_steps": 1,
    "steps": 2,
    "prompts": 8,
    "responses_per_prompt": 4,
    "prompt_tokens": 80,
    "response_tokens": 12,
    "evaluation_batches": 0,
    "anneal_steps": 20,
    "micro_batches": 2,
    "epochs": 1,
}
SMALLEST_BATCH = {"prompts": 4, "responses_per_prompt": 2, "micro_batches": 1}
SGLANG = "RELIBRA_SGLANG_JAX"
"""The variable that names the Python of an environment with sglang-jax; docs/guides/rollout-engines.md builds one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(command, port, seconds=300, **environment):
    """Start a server, wait until it answers, and end it afterwards."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    try:
        end = time.monotonic() + seconds
        while True:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < end, "the server does not answer"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def own_server(folder, samples, *options):
    port = free_port()
    command = [sys.executable, "-m", "experiments.serve", "--model", str(folder), "--port", str(port)]
    command += ["--samples", str(samples), "--wait-seconds", "1", *options]
    with serving(command, port) as process:
        yield f"http://127.0.0.1:{port}", process


def learned(metrics):
    names = ("policy/loss", "policy/gradient_norm", "response/tokens", "reward/mean")
    return [[line[name] for name in names] for line in metrics if line["kind"] == "learn"]


def test_a_run_with_a_server_learns_what_a_run_alone_learns(folder, tmp_path):
    alone = Train(model=folder, out=tmp_path / "alone", **SETTINGS)
    with own_server(folder, 32, "--nodes", "2", "--ranks-per-node", "4") as (address, _):
        served = dataclasses.replace(alone, engine=(address,), out=tmp_path / "served")
        runs = [run_train(config, Console(quiet=True)) for config in (served, alone)]
    metrics = [list(read_metrics(run / "seed-0" / "metrics.jsonl")) for run in runs]
    np.testing.assert_allclose(*map(learned, metrics), rtol=1e-5, atol=1e-7)
    for line in metrics[0]:
        if line["kind"] == "learn":
            assert line["rollout/retried"] == line["rollout/dropped"] == 0
            assert line["mismatch/log_prob"] < 1e-5
            assert (
                line["rollout/staleness"] == line["rollout/staleness_max"] == line["rollout/continued"] == 0
            )


def test_a_run_learns_while_a_server_samples_up_to_two_batches_ahead(folder, tmp_path):
    """No token is lost. Whether updates interrupt responses is a matter of time."""
    with own_server(folder, 1) as (address, _):
        config = Train(
            model=folder,
            out=tmp_path / "run",
            engine=(address,),
            staleness=2,
            requests=EngineRequests(at_once=1),
            **{**SETTINGS, **SMALLEST_BATCH, "steps": 4, "response_tokens": 48},
        )
        run = run_train(config, Console(quiet=True))
    learning = [line for line in read_metrics(run / "seed-0" / "metrics.jsonl") if line["kind"] == "learn"]
    assert len(learning) == 4
    assert learning[0]["rollout/staleness_max"] == 0
    assert 1 <= max(line["rollout/staleness_max"] for line in learning) <= 2
    for line in learning:
        assert line["policy/gradient_norm"] > 0
        assert line["rollout/retried"] == line["rollout/dropped"] == line["rollout/filled_share"] == 0
        # All tokens have log-probabilities, of weights that few updates have changed since.
        assert line["mismatch/log_prob_quantiles"][-1] < 1


def test_a_server_that_is_ended_does_not_finish_its_batch(folder):
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=16, replica_slots=0)
    policy = load_pretrained(folder, expert_mesh(topology, devices=jax.devices()[:1]), topology)
    prompts, lengths = np.full((2, 4), 5, np.int32), np.full(2, 4, np.int32)
    keys, config = jax.random.split(jax.random.key(0)), load_config(folder)
    # The most likely token is never the end here, so that the batch is long.
    sampling = Sampling(4096, 0.0, 1.0, (2,), 1, np.ones(config.vocabulary, bool))
    with own_server(folder, 2) as (address, process):
        engine = HttpEngine((address,), folder, config, EngineRequests(retries=0))
        engine.sync(policy, 0)

        def end():
            time.sleep(15)
            process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            process.wait(120)
            return time.monotonic() - start

        with ThreadPoolExecutor(1) as background:
            seconds = background.submit(end)
            with pytest.raises(EngineError, match="/generate: 503 the server is ending"):
                engine.generate(prompts, lengths, keys, sampling)
            assert seconds.result() < 10
        engine.close()


def test_a_server_killed_within_a_batch_costs_other_requests_alone(folder):
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=16, replica_slots=0)
    mesh, config = expert_mesh(topology, devices=jax.devices()[:1]), load_config(folder)
    policy = load_pretrained(folder, mesh, topology)
    prompts = np.random.default_rng(0).integers(3, 300, (16, 16)).astype(np.int32)
    lengths, keys = np.full(16, 16, np.int32), jax.random.split(jax.random.key(0), 16)
    sampling = Sampling(8, 1.0, 1.0, (2,), 1, np.ones(config.vocabulary, bool))
    with own_server(folder, 2) as (first, process), own_server(folder, 2) as (second, _):
        engine = HttpEngine((first, second), folder, config, EngineRequests(at_once=2))
        engine.sync(policy, 3)

        def kill(*_):
            process.send_signal(signal.SIGKILL)
            return False

        generation = engine.generate(prompts, lengths, keys, sampling, watch=Watch(1, kill))
        engine.close()
    assert process.returncode == -signal.SIGKILL
    assert not generation.dropped.any()
    assert generation.retried <= 2 * EngineRequests().retries
    embedded = EmbeddedEngine(
        lambda: policy, ExpertParallel(mesh=mesh, topology=topology), wave_samples=None, float8=None
    )
    desired = embedded.generate(prompts, lengths, keys, sampling).responses
    np.testing.assert_array_equal(generation.responses.tokens, desired.tokens)


def test_a_run_without_its_server_saves_its_state(folder, tmp_path):
    with own_server(folder, 32, "--nodes", "2", "--ranks-per-node", "4") as (address, process):
        config = Train(
            model=folder,
            out=tmp_path / "run",
            engine=(address,),
            requests=EngineRequests(patience=2.0),
            **{**SETTINGS, "checkpoint_every": 100},
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(
            EngineError, match=rf"no server has answered for 2 s: {address}.*saved step 1; resume"
        ):
            run_train(config, Console(quiet=True))
    assert (tmp_path / "run" / "seed-0" / "checkpoints" / "1").is_dir()


@pytest.mark.skipif(SGLANG not in os.environ, reason=f"{SGLANG} names no Python with sglang-jax")
def test_a_run_learns_from_sglang_jax(tmp_path):
    """It has no way to take weights over HTTP, so it is started again on the folder of the trained ones."""
    # Its attention needs heads of 128.
    folder = make_checkpoint(tmp_path / "first", head_width=128)
    config = Train(model=folder, **{**SETTINGS, "warmup_steps": 0})
    trainer = Trainer(config, 0)
    for step in range(config.steps):
        port = free_port()
        command = [os.environ[SGLANG], "-u", "-m", "sgl_jax.launch_server", "--model-path", str(folder)]
        command += [
            "--device",
            "cpu",
            "--tp-size",
            "1",
            "--dtype",
            "float32",
            "--attention-backend",
            "native",
        ]
        command += ["--nnodes", "1", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--port", str(port)]
        command += [
            "--mem-fraction-static",
            "0.1",
            "--max-total-tokens",
            "4096",
            "--max-running-requests",
            "4",
        ]
        command += ["--page-size", "1", "--chunked-prefill-size", "-1", "--disable-overlap-schedule"]
        command += ["--disable-precompile", "--skip-server-warmup", "--disable-radix-cache"]
        command += ["--enable-return-routed-experts", "--random-seed", "3"]
        with serving(command, port, JAX_PLATFORMS="cpu", XLA_FLAGS="", HF_HUB_OFFLINE="1"):
            trainer.sampler.engine = HttpEngine(
                (f"http://127.0.0.1:{port}",), folder, config.model_config, EngineRequests(), sends=False
            )
            metrics = trainer.learn()
        assert metrics["mismatch/log_prob_quantiles"][-1] < 1e-4
        # Our router would choose the same experts for every token that the engine has run.
        assert metrics["routing/changed_share"] <= config.samples / metrics["batch/tokens"]
        folder = tmp_path / f"step-{step}"
        save_pretrained(trainer.state.agent.policy, folder, source=config.model)


def test_two_processes_with_a_server_learn_what_one_learns(folder, tmp_path):
    """Each process asks for half of the samples, and keeps their routes."""
    options = [["--" + name.replace("_", "-"), str(value)] for name, value in SETTINGS.items()]
    command = ["-m", "experiments.run", "learn", "--model", folder, *itertools.chain.from_iterable(options)]
    with own_server(folder, 32, "--nodes", "2", "--ranks-per-node", "4") as (address, _):
        for processes, staleness in ((1, 0), (2, 0), (2, 1)):
            out = tmp_path / f"{processes}-{staleness}"
            options = ["--out", out, "--engine", address, "--staleness", staleness, "--plan-ahead", 1]
            options += ["--seeds", 0]
            ended = run(processes, *options, command=command)
            assert [status for *_, status in ended] == [0] * processes, ended[0][1] + ended[-1][1]
    one, two, stale = [
        list(read_metrics(tmp_path / name / "seed-0" / "metrics.jsonl")) for name in ("1-0", "2-0", "2-1")
    ]
    np.testing.assert_allclose(learned(one), learned(two), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(learned(one)[0], learned(stale)[0], rtol=1e-4, atol=1e-6)
    assert [line["rollout/staleness_max"] for line in stale if line["kind"] == "learn"] == [0, 1]
