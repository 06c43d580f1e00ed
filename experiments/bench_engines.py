"""``python -m experiments.bench_engines --model FOLDER --engine URL``: compare engines on one checkpoint.

Measures the sampled tokens per second of the sampler in this process and of servers, with the same prompts, and the
time in which the servers get new weights. Runs alternate. All of them share the cores of this machine if the servers
run here.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.http import HttpEngine
from experiments.engines.protocol import EngineError, RolloutEngine, Sampling
from experiments.engines.settings import EngineRequests
from experiments.interleaving import interleaved
from experiments.program import run_program
from experiments.rl.devices import host_devices
from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import LanguageModel, ModelConfig, load_pretrained
from relibra_jax.models.hf_config import load_config
from relibra_jax.nnx import ExpertParallel


@dataclass(frozen=True, kw_only=True)
class BenchEngines:
    """Measure engines."""

    model: Path
    """The folder of the checkpoint that the servers serve."""
    engine: tuple[str, ...]
    """The addresses of the servers; each is measured alone."""
    nodes: int = 1
    """The number of nodes of the sampler in this process."""
    ranks_per_node: int = 1
    """The number of ranks of a node of it."""
    samples: tuple[int, ...] = (8, 64)
    """The numbers of samples; one run for each."""
    prompt_tokens: int = 32
    """The number of tokens of a prompt."""
    response_tokens: int = 64
    """The largest number of tokens of a response."""
    repeats: int = 3
    """The number of timed runs; the table shows medians."""


def main(config: BenchEngines) -> None:
    """Time the engines and print the table.

    Args:
        config: the settings.
    """
    devices = host_devices(config.nodes * config.ranks_per_node)
    engines: dict[str, RolloutEngine] = {}
    sizes = load_config(config.model)
    topology = Topology(
        num_nodes=config.nodes,
        ranks_per_node=config.ranks_per_node,
        num_experts=sizes.num_experts,
        replica_slots=0,
    )
    mesh = expert_mesh(topology, devices=devices)
    policy = load_pretrained(config.model, mesh, topology)
    parallel = ExpertParallel(mesh=mesh, topology=topology)
    engines["this process"] = EmbeddedEngine(lambda: policy, parallel, wave_samples=None, float8=None)
    sync = {"this process": "0"}
    for address in config.engine:
        engines[address], sync[address] = _connect(address, config.model, sizes, policy)
    engines["this process"].sync(policy, 0)
    table = Table(title=f"medians of {config.repeats} alternating runs", title_justify="left")
    for column in ("samples", "engine", "tokens", "tokens/s", "sync s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for samples in config.samples:
        runs = {
            name: functools.partial(_tokens, engine, config, sizes, samples)
            for name, engine in engines.items()
        }
        tokens = {name: run() for name, run in runs.items()}
        seconds = interleaved(runs, repeats=config.repeats)
        for name in engines:
            rate = tokens[name] / seconds[name]
            table.add_row(str(samples), name, f"{tokens[name]:,}", f"{rate:,.0f}", sync[name])
    Console().print(table)
    for engine in engines.values():
        engine.close()


def _connect(address: str, model: Path, sizes: ModelConfig, policy: LanguageModel) -> tuple[HttpEngine, str]:
    """Return a server as an engine, and the seconds in which it takes weights, sent for the second time.

    A server that takes no weights over HTTP is measured with those that it was started with.
    """
    engine = HttpEngine((address,), model, sizes, EngineRequests())
    try:
        engine.sync(policy, 0)
        return engine, f"{engine.sync(policy, 1).seconds:.2f}"
    except EngineError as error:
        engine.close()
        Console(stderr=True).print(f"{error}", highlight=False)
        engine = HttpEngine((address,), model, sizes, EngineRequests(), sends=False)
        engine.sync(policy, 0)
        return engine, "takes none"


def _tokens(engine: RolloutEngine, config: BenchEngines, sizes: Any, samples: int) -> int:
    """Sample responses to random prompts; return the number of sampled tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, sizes.vocabulary, (samples, config.prompt_tokens)).astype(np.int32)
    lengths = np.full(samples, config.prompt_tokens, np.int32)
    keys = jax.random.split(jax.random.key(0), samples)
    allowed = np.ones(sizes.vocabulary, bool)
    sampling = Sampling(config.response_tokens, 1.0, 1.0, ends=(2,), pad=0, allowed=allowed)
    generation = engine.generate(prompts, lengths, keys, sampling)
    return int(generation.responses.response_mask.sum())


if __name__ == "__main__":
    sys.exit(run_program(main, BenchEngines, description=__doc__))
