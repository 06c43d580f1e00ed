"""``python -m experiments.bench_sampler``: measure the tokens per second of generation, and the time of a step.

A newly initialised tiny policy responds on host devices. A token ends its response with a probability of 1 in 257, so
many long responses end before the last step. Runs of different lengths alternate, and so do runs with one prefill for
all responses of a prompt and runs that run the prompt of every response.
"""

import functools
import platform
import sys
from dataclasses import dataclass

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.interleaving import interleaved
from experiments.program import run_program
from experiments.rl.devices import host_devices
from experiments.rl.policy import TINY
from experiments.rl.waves import generate_in_waves
from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import make_model
from relibra_jax.nnx import ExpertParallel


@dataclass(frozen=True, kw_only=True)
class BenchSampler:
    """Measure the speed of generation."""

    samples: int = 256
    """The number of samples."""
    responses_per_prompt: int = 8
    """The number of samples of each prompt."""
    wave_samples: int | None = None
    """The number of samples that are generated together. None for all."""
    prompt_tokens: int = 24
    """The number of tokens of a prompt."""
    response_tokens: tuple[int, ...] = (4, 64, 256)
    """The largest numbers of tokens of a response; one run for each."""
    repeats: int = 5
    """The number of timed runs of each length; the table shows medians."""


def main(config: BenchSampler) -> None:
    """Time generation and print the table.

    Args:
        config: the settings.
    """
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=TINY.num_experts, replica_slots=0)
    mesh = expert_mesh(topology, devices=host_devices(topology.num_ranks))
    policy = make_model(TINY, topology, mesh=mesh, key=jax.random.key(0))
    per_prompt = config.responses_per_prompt
    prompts = np.random.default_rng(0).integers(
        0, 256, (config.samples // per_prompt, config.prompt_tokens), np.int32
    )
    run = functools.partial(
        generate_in_waves,
        policy,
        np.repeat(prompts, per_prompt, axis=0),
        np.full(config.samples, config.prompt_tokens),
        jax.random.split(jax.random.key(1), config.samples),
        parallel=ExpertParallel(mesh=mesh, topology=topology),
        wave_samples=config.wave_samples,
    )
    runs = {
        (room, shared): functools.partial(run, max_new_tokens=room, responses_per_prompt=shared)
        for room in config.response_tokens
        for shared in dict.fromkeys((1, per_prompt))
    }
    sampled = {name: int(call().response_mask.sum()) for name, call in runs.items()}
    table = Table(
        title=f"tiny: {config.samples} samples, {per_prompt} of each prompt, prompts of {config.prompt_tokens},"
        f" wave_samples={config.wave_samples}, 2 x 4 host devices, {platform.machine()}, jax {jax.__version__};"
        f" medians of {config.repeats} runs",
        title_justify="left",
    )
    for name in ("longest response", "responses per prefill", "tokens sampled", "tokens/s", "ms per token"):
        table.add_column(name, justify="right")
    for (room, shared), seconds in interleaved(runs, repeats=config.repeats).items():
        tokens = sampled[room, shared]
        table.add_row(
            str(room), str(shared), f"{tokens:,}", f"{tokens / seconds:,.0f}", f"{1e3 * seconds / room:.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, BenchSampler, description=__doc__))
