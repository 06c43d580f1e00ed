"""``python -m experiments.bench_attention``: compare attention in blocks with attention over all pairs of tokens.

Measures the time and the temporary memory of a forward and a backward pass on one device, for whole sequences and for
sequences that hold several samples. The runs of all kinds alternate.
"""

import functools
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.interleaving import interleaved
from experiments.program import run_program
from relibra_jax.models.packed_attention import packed_attention


@dataclass(frozen=True, kw_only=True)
class BenchAttention:
    """Measure attention."""

    tokens: tuple[int, ...] = (2048, 4096)
    """The numbers of tokens of a sequence."""
    blocks: tuple[int, ...] = (256, 512)
    """The numbers of tokens of a block."""
    samples: int = 8
    """The number of samples of a packed sequence, whose lengths are random."""
    heads: int = 4
    """The number of heads."""
    width: int = 64
    """The width of a head."""
    longest: int = 8192
    """The largest number of tokens for which programs run; for more they are only compiled, and only in blocks."""
    repeats: int = 5
    """The number of timed runs; the table shows medians."""


def over_pairs(query, key, value, segments):
    """Attend with the scores of all pairs of tokens, and a mask for packed sequences."""
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


def main(config: BenchAttention) -> None:
    """Measure all kinds of attention and print the table.

    Args:
        config: the settings.
    """
    device = jax.devices()[0]
    title = f"forward and backward, {config.heads} heads of {config.width}, float32, {device.device_kind}"
    table = Table(title=f"{title}; medians of {config.repeats} alternating runs", title_justify="left")
    for name in ("tokens", "samples", "attention", "temporary MB", "ms"):
        table.add_column(name, justify="left" if name == "attention" else "right")
    for tokens in config.tokens:
        for samples in (1, config.samples):
            for row in measure(config, tokens, samples):
                table.add_row(f"{tokens:,}", str(samples), *row)
    Console().print(table)


def measure(config: BenchAttention, tokens: int, samples: int) -> list[tuple[str, str, str]]:
    """Return the name, the temporary memory and the time of each kind of attention."""
    rng = np.random.default_rng(0)
    shape = (4, 1, tokens, config.heads, config.width)
    query, key, value, weight = jnp.asarray(rng.normal(size=shape), jnp.float32)
    ends = np.sort(rng.choice(tokens, samples - 1, replace=False))
    segments = jnp.asarray(np.searchsorted(ends, np.arange(tokens), side="right")[None], jnp.int32)
    args = (query, key, value, None if samples == 1 else segments, weight)

    def compiled(attend: Any) -> Any:
        def loss(query, key, value, segments, weight):
            return (attend(query, key, value, segments) * weight).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*args).compile()

    run = tokens <= config.longest
    kinds: dict[str, Any] = {"all pairs": over_pairs} if run else {}
    kinds |= {
        f"blocks of {block}": functools.partial(packed_attention, block=block) for block in config.blocks
    }
    programs = {name: compiled(attend) for name, attend in kinds.items()}
    runs = {name: functools.partial(program, *args) for name, program in programs.items()}
    seconds = interleaved(runs, repeats=config.repeats) if run else {}
    return [
        (
            name,
            f"{program.memory_analysis().temp_size_in_bytes / 1e6:,.1f}",
            f"{1e3 * seconds[name]:,.0f}" if run else "",
        )
        for name, program in programs.items()
    ]


if __name__ == "__main__":
    sys.exit(run_program(main, BenchAttention, description=__doc__))
