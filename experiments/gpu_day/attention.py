"""Attention inside packed samples on a GPU: our kernels, cuDNN's where it can, and XLA's loops over blocks."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts
from pallas_kernels.compare import check_close
from relibra_jax.models.packed_attention import packed_attention

SAMPLES: Final = (1, 4, 16)
"""The numbers of samples of equal length in a sequence. cuDNN gets them as the sequences of a batch."""


def measure_attention(tokens: int, *, rehearsal: bool = False) -> None:
    """Check attention and its gradients, and measure both, for one sequence of the heads of Qwen3-30B-A3B.

    Args:
        tokens: the number of tokens of the sequence.
        rehearsal: whether to measure XLA's loops once at a small size.
    """
    tokens, heads, key_heads, width = (64, 4, 2, 16) if rehearsal else (tokens, 32, 4, 128)
    keys = jax.random.split(jax.random.key(0), 4)
    query, gradient = (jax.random.normal(key, (1, tokens, heads, width), jnp.bfloat16) for key in keys[:2])
    key, value = (jax.random.normal(key, (1, tokens, key_heads, width), jnp.bfloat16) for key in keys[2:])
    names = ("xla",) if rehearsal else ("triton", "xla")
    packed = {name: jax.jit(functools.partial(packed_attention, implementation=name)) for name in names}
    for samples in SAMPLES:
        versions = dict(packed)
        if not rehearsal:
            versions["cuDNN"] = jax.jit(functools.partial(_in_batch, samples))
        programs = {
            name: jax.jit(functools.partial(_with_gradients, call)) for name, call in versions.items()
        }
        segments = jnp.asarray(np.arange(tokens)[None] * samples // tokens, jnp.int32)
        operands = query, key, value, segments, gradient
        expected = programs["xla"](*operands)
        errors = {name: check_close(name, run(*operands), expected).norm for name, run in programs.items()}
        runs: dict[Any, Callable[[], Any]] = {}
        for name, call in versions.items():
            runs[name, "forward"] = functools.partial(call, query, key, value, segments)
            runs[name, "with gradients"] = functools.partial(programs[name], *operands)
        readings = median_seconds(runs, 1 if rehearsal else 9, shortest=1e-4 if rehearsal else 0.02)
        # Two products of every visible pair forward, and five backward.
        products = tokens * (tokens / samples + 1) / 2 * heads * width * 2
        for (name, part), reading in readings.items():
            count = 2 if part == "forward" else 7
            print_facts(
                attention=name,
                part=part,
                tokens=tokens,
                samples=samples,
                norm=errors[name],
                milliseconds=reading.median * 1e3,
                teraflops=count * products / reading.median / 1e12,
            )


def _with_gradients(
    call: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, ...]:
    output, pull = jax.vjp(lambda *rows: call(*rows, segments), query, key, value)
    return output, *pull(gradient)


def _in_batch(samples: int, query: jax.Array, key: jax.Array, value: jax.Array, _: jax.Array) -> jax.Array:
    """Attend with cuDNN, with the samples as a batch."""
    rows = (x.reshape(samples, -1, *x.shape[2:]) for x in (query, key, value))
    output = jax.nn.dot_product_attention(*rows, is_causal=True, implementation="cudnn")
    return output.reshape(query.shape)
