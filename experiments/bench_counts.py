"""``python -m experiments.bench_counts``: the memory and time of counting a large batch, sample by sample.

Samples arrive one after another, as in a rollout worker, with made-up routes. `relibra_jax.sample_counts` counts them
and takes some of their routes. Peaks are the measured memory of the process above what it had before; those of a larger
batch are computed: its counts and sampled routes, and the measured rest, which does not grow with samples.
"""

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.program import run_program
from relibra_jax import Batch, sample_counts
from relibra_jax.planning.routes import TOKENS
from relibra_jax.support.limits import check_integer

PARTS: Final = (4, 2, 1)
"""The divisors of the number of samples that are measured, one after another in one process."""


@dataclass(frozen=True, kw_only=True)
class BenchCounts:
    """Measure the memory and time of counting a batch."""

    samples: int = 82
    """The number of samples that are counted."""
    whole: int = 8192
    """The number of samples for which sizes are computed."""
    tokens: int = 16_384
    """The number of tokens of a sample."""
    layers: int = 61
    """The number of MoE layers."""
    experts: int = 384
    """The number of experts of a layer."""
    top_k: int = 8
    """The number of experts of a token."""


def main(config: BenchCounts) -> None:
    """Count a quarter, a half and all of the samples, and print a table.

    Args:
        config: the settings.

    Raises:
        ValueError: if a number is below 1, or there are fewer experts than a token has.
    """
    for name in ("samples", "whole", "tokens", "layers", "top_k"):
        check_integer(name, getattr(config, name), least=1)
    check_integer("experts", config.experts, least=config.top_k)
    columns = ("samples", "routes, GB", "counts, MB", "sampled routes, MB", "peak, MB", "CPU ns an id")
    table = Table(*columns, box=None)
    count_samples(config, 1)
    before, rest = _peak(), 0
    for part in PARTS:
        samples = max(config.samples // part, 1)
        seconds, counts = count_samples(config, samples)
        assert counts.routes is not None
        load, routes = (np.asarray(each).nbytes for each in (counts.sample_load, counts.routes.expert_ids))
        peak, ids = _peak() - before, samples * config.tokens * config.layers * config.top_k
        rest = max(rest, peak - load - routes)
        row = (ids * 2 / 1e9, load / 1e6, routes / 1e6, peak / 1e6, seconds / ids * 1e9)
        table.add_row(str(samples), *(f"{value:.1f}" for value in row))
    load, routes = (each * config.whole // samples for each in (load, routes))
    ids = config.whole * config.tokens * config.layers * config.top_k
    computed = (ids * 2 / 1e9, load / 1e6, routes / 1e6, (load + routes + rest) / 1e6)
    table.add_row(f"{config.whole} (computed)", *(f"{value:.1f}" for value in computed), "")
    Console(width=110).print(table)


def count_samples(config: BenchCounts, samples: int) -> tuple[float, Batch]:
    """Count some samples.

    Args:
        config: the settings.
        samples: the number of samples.

    Returns:
        The CPU seconds, without those that making routes takes, and the counts.
    """
    source = _Routes(config, samples)
    begin = time.process_time()
    counts = sample_counts(
        iter(source),
        layout="vllm",
        mask=np.ones((samples, config.tokens), bool),
        num_experts=config.experts,
        top_k=config.top_k,
        num_layers=config.layers,
        start=0,
        every=max(config.whole * config.tokens // TOKENS, 1) | 1,
    )
    return time.process_time() - begin - source.seconds, Batch(*counts)


class _Routes:
    """The made-up routes of samples, in uint16; one of them exists at a time."""

    def __init__(self, config: BenchCounts, samples: int):
        self.config, self.samples, self.seconds = config, samples, 0.0

    def __iter__(self) -> Iterator[np.ndarray]:
        config, rng = self.config, np.random.default_rng(0)
        for _ in range(self.samples):
            begin = time.process_time()
            stride = config.experts // config.top_k
            first = rng.integers(0, stride, (config.tokens, config.layers, 1), np.uint16)
            ids = first + np.arange(config.top_k, dtype=np.uint16) * np.uint16(stride)
            self.seconds += time.process_time() - begin
            yield ids


def _peak() -> int:
    """Return the most bytes of memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(run_program(main, BenchCounts, description=__doc__))
