"""``python -m experiments.bench_transformers``: compare the speed of generation with that of `transformers`, on CPUs.

Both read the same checkpoint of random weights in Hugging Face's format, compute in float32, get the same prompts of
equal length, all different, and sample at temperature 1. Runs alternate. Before they are timed, transformers computes
the log-probabilities of tokens that relibra_jax sampled, which must agree.

transformers runs in a process of its own, with the Python of ``--peer-python``: this project does not depend on it. It
runs with the settings that are fastest for each batch, which are searched first. relibra_jax runs as in ``python -m
experiments.run learn``, on 2 x 4 host devices, and on one device. It also returns log-probabilities and experts of all
tokens, and transformers does not.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.interleaving import alternating
from experiments.program import run_program
from experiments.rl.devices import host_devices
from experiments.rl.generation import Responses
from experiments.rl.policy import TINY
from experiments.rl.waves import generate_in_waves
from experiments.transformers_peer import (
    CORES,
    Case,
    Peer,
    Reading,
    equal_tokens,
    fastest_settings,
    generate,
    log_prob_difference,
    possible_choices,
    timed,
)
from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import ModelConfig, load_pretrained, make_model, save_pretrained
from relibra_jax.nnx import ExpertParallel
from relibra_jax.support.limits import check_integer

MODELS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "tiny": TINY,
        "wide": dataclasses.replace(
            TINY,
            width=256,
            heads=8,
            kv_heads=4,
            head_width=32,
            num_experts=32,
            gating=dataclasses.replace(TINY.gating, top_k=4),
            expert_width=256,
            vocabulary=4096,
        ),
    }
)
RANKS: Final = {"relibra_jax 2x4": (2, 4), "relibra_jax 1x1": (1, 1)}
"""The nodes, and the ranks of a node, with which relibra_jax runs."""
PEER: Final = "transformers"
TOLERANCE: Final = 1e-4
"""The largest difference between log-probabilities of both, at which they count as the same model."""

SEARCH_TOKENS: Final = 16
"""The largest number of tokens of a response in the search for the fastest settings of transformers."""


@dataclass(frozen=True, kw_only=True)
class BenchTransformers:
    """Compare the speed of generation with that of transformers."""

    peer_python: str = "python3"
    """The Python that has torch and transformers."""
    models: tuple[str, ...] = tuple(MODELS)
    """The names of the models: tiny or wide."""
    samples: tuple[int, ...] = (8, 64, 256)
    """The numbers of samples, multiples of 8; each with each length is a case."""
    prompt_tokens: int = 32
    """The number of tokens of a prompt."""
    response_tokens: tuple[int, ...] = (64,)
    """The largest numbers of tokens of a response; a token ends one with a probability of 1 in the vocabulary."""
    repeats: int = 5
    """The number of timed runs of each case; the table shows medians."""
    compiled: bool = False
    """Whether torch.compile is tried, too, which takes more than a minute for each case."""
    record: Path | None = None
    """The file to which the results are written, one more line of JSON for each case."""


class Sampler:
    """The generation of relibra_jax, from a checkpoint on the first devices."""

    def __init__(self, folder: Path, model: ModelConfig, ranks: tuple[int, int]):
        nodes, local = ranks
        topology = Topology(
            num_nodes=nodes, ranks_per_node=local, num_experts=model.num_experts, replica_slots=0
        )
        mesh = expert_mesh(topology, devices=jax.devices()[: nodes * local])
        self.parallel = ExpertParallel(mesh=mesh, topology=topology)
        self.policy = load_pretrained(folder, mesh, topology)

    def generate(self, case: Case, seed: int, temperature: float = 1.0) -> Responses:
        """Respond to the prompts of a case."""
        samples, length = case.prompts.shape
        return generate_in_waves(
            self.policy,
            case.prompts,
            np.full(samples, length),
            jax.random.split(jax.random.key(seed), samples),
            parallel=self.parallel,
            max_new_tokens=case.new_tokens,
            temperature=temperature,
            ends=(case.end,),
        )

    def likeliest(self, case: Case) -> list[list[int]]:
        """Return the responses of the most likely tokens."""
        tokens = np.asarray(self.generate(case, 0, temperature=0).tokens)
        return case.cut(tokens[:, case.prompts.shape[1] :].tolist())

    def timed(self, case: Case, seeds: Iterator[int]) -> Reading:
        """Time one run."""
        start, cpu_start = time.perf_counter(), time.process_time()
        responses = self.generate(case, next(seeds))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return Reading(seconds, cpu_seconds, int(responses.response_mask.sum()))


def measure(
    case: Case, samplers: Mapping[str, Sampler], peer: Peer, *, compiled: bool, repeats: int
) -> dict[str, Any]:
    """Compare both on one case.

    Args:
        case: the prompts, and the number of tokens.
        samplers: the samplers of relibra_jax, by name.
        peer: the process of transformers, with the same checkpoint.
        compiled: whether torch.compile is tried, too.
        repeats: the number of timed runs.

    Returns:
        What is written for the case.

    Raises:
        ValueError: if log-probabilities differ by more than `TOLERANCE`.
    """
    seeds = itertools.count()
    first: dict[str, float] = {}
    difference: dict[str, float] = {}
    for name, sampler in samplers.items():
        start = time.perf_counter()
        responses = sampler.generate(case, next(seeds))
        first[name] = time.perf_counter() - start
        difference[name] = log_prob_difference(peer, responses)
        if not difference[name] <= TOLERANCE:
            raise ValueError(
                f"{name}: log-probabilities differ by {difference[name]:.1e} from those of transformers, more than"
                f" {TOLERANCE}, so both do not run the same model"
            )
    run_peer = functools.partial(timed, peer, case, seeds)
    short = case._replace(new_tokens=min(case.new_tokens, SEARCH_TOKENS))
    run_short = functools.partial(timed, peer, short, seeds)
    settings, tried = fastest_settings(run_short, possible_choices(case, compiled=compiled))
    likeliest = generate(peer, case, None, settings)["tokens"]
    equal = {name: equal_tokens(sampler.likeliest(case), likeliest) for name, sampler in samplers.items()}
    runs = {
        **{name: functools.partial(sampler.timed, case, seeds) for name, sampler in samplers.items()},
        PEER: functools.partial(run_peer, settings),
    }
    readings = alternating(runs, repeats=repeats, warm_up=0)  # all have run before
    speeds = {name: sorted(reading.speed for reading in each) for name, each in readings.items()}
    return {
        "tokens_per_second": {name: round(statistics.median(each), 1) for name, each in speeds.items()},
        "lowest_and_highest": {
            name: [round(each[0], 1), round(each[-1], 1)] for name, each in speeds.items()
        },
        "tokens_per_cpu_second": {
            name: round(statistics.median(reading.tokens / reading.cpu_seconds for reading in each), 1)
            for name, each in readings.items()
        },
        "tokens": {name: [reading.tokens for reading in each] for name, each in readings.items()},
        "first_call_seconds": {name: round(seconds, 1) for name, seconds in first.items()},
        "settings": settings,
        "tried": [{**each, "tokens_per_second": round(each["tokens_per_second"], 1)} for each in tried],
        "log_prob_difference": {name: float(f"{each:.1e}") for name, each in difference.items()},
        "equal_greedy_tokens": {name: round(share, 4) for name, share in equal.items()},
    }


def main(config: BenchTransformers) -> None:
    """Measure all cases and print the table.

    Args:
        config: the settings.
    """
    for name in ("prompt_tokens", "repeats"):
        check_integer(name, getattr(config, name), least=1)
    devices = max(math.prod(ranks) for ranks in RANKS.values())
    for samples in config.samples:
        if samples < 1 or samples % devices:
            raise ValueError(f"samples={samples} must be a multiple of {devices}, the number of devices")
    for name in config.models:
        if name not in MODELS:
            raise ValueError(f"models: {name!r} must be one of {', '.join(MODELS)}")
    host_devices(devices)
    load = round(os.getloadavg()[0], 2)
    with Peer(config.peer_python) as peer:
        about = {
            "jax": jax.__version__,
            **peer.versions,
            "cores": CORES,
            "machine": platform.machine(),
            "load_before": load,
            "date": str(datetime.date.today()),
        }
        table = Table(
            title=f"sampled tokens/s, prompts of {config.prompt_tokens} tokens, medians of {config.repeats} runs;"
            f" {', '.join(f'{name} {value}' for name, value in about.items())}",
            title_justify="left",
        )
        headings = [name.replace("relibra_jax", "ours") for name in RANKS]
        for heading in ("model", "samples", "tokens", *headings, PEER, "its settings"):
            table.add_column(heading, justify="right")
        for name, samples, tokens, result in measurements(config, peer):
            case = {
                "model": name,
                "samples": samples,
                "prompt_tokens": config.prompt_tokens,
                "response_tokens": tokens,
            }
            if config.record:
                with config.record.open("a") as file:
                    print(json.dumps({**case, **result, **about}), file=file)
            speeds = [f"{speed:,.0f}" for speed in result["tokens_per_second"].values()]
            settings = " ".join(map(str, result["settings"].values()))
            table.add_row(name, str(samples), str(tokens), *speeds, settings)
    Console().print(table)


def measurements(config: BenchTransformers, peer: Peer) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Measure case by case, and yield its model, samples, tokens of a response, and what `measure` returns."""
    for name in config.models:
        model = MODELS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_checkpoint(model, Path(temporary) / name)
            peer.ask("load", folder=str(folder))
            samplers = {label: Sampler(folder, model, ranks) for label, ranks in RANKS.items()}
        for samples, tokens in itertools.product(config.samples, config.response_tokens):
            shape = (samples, config.prompt_tokens)
            prompts = np.random.default_rng(0).integers(0, model.vocabulary, shape, np.int32)
            case = Case(model, prompts, tokens)
            result = measure(case, samplers, peer, compiled=config.compiled, repeats=config.repeats)
            yield name, samples, tokens, result


def write_checkpoint(model: ModelConfig, folder: Path) -> Path:
    """Write a checkpoint of random weights in Hugging Face's format, and return its folder."""
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=model.num_experts, replica_slots=0)
    mesh = expert_mesh(topology, devices=jax.devices()[:1])
    save_pretrained(make_model(model, topology, mesh=mesh, key=jax.random.key(0)), folder)
    return folder


if __name__ == "__main__":
    sys.exit(run_program(main, BenchTransformers, description=__doc__))
