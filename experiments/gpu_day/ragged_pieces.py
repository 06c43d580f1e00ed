"""The rate of XLA's ragged all-to-all on a GPU, for different numbers of pieces into which a lane is cut.

With one GPU, all rows stay on it: the rate is that of XLA's kernel, and not of a link.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp

from experiments.gpu_day.operations import random_array
from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts
from relibra_jax.execution.exchange import cut_lanes

PIECES: Final = (1, 8, 32, 128)
"""The compared numbers of pieces."""


def measure_pieces(*, rehearsal: bool = False) -> None:
    """Measure the rate at which rows are received, and check that they are right.

    Args:
        rehearsal: whether to only cut lanes, since CPUs have no ragged exchange.

    Raises:
        ValueError: if a row arrives at a wrong place.
    """
    rows, width = (64, 64) if rehearsal else (16384, 2048)
    x, count = random_array(rows, width), jnp.array([rows - 3], jnp.int32)
    runs = {pieces: functools.partial(_exchange(pieces), x, count) for pieces in PIECES}
    if rehearsal:
        print_facts(pieces=[cut_lanes(jnp.zeros(1, jnp.int32), count, each)[1].tolist() for each in PIECES])
        return
    for pieces, run in runs.items():
        result = run()
        if (result[: rows - 3] != x[: rows - 3]).any() or result[rows - 3 :].any():
            raise ValueError(f"pieces={pieces}: the received rows differ from those that were sent")
    for pieces, reading in median_seconds(runs, 9, shortest=0.01).items():
        print_facts(
            pieces=pieces,
            milliseconds=reading.median * 1e3,
            gigabytes_per_second=x.nbytes / reading.median / 1e9,
        )


def _exchange(pieces: int):
    mesh = jax.make_mesh((1,), ("ranks",), devices=jax.devices()[:1])

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("ranks"), check_vma=False)
    def run(x, count):
        start, counts = cut_lanes(jnp.zeros_like(count), count, pieces)
        return jax.lax.ragged_all_to_all(
            x, jnp.zeros_like(x), start, counts, start, counts, axis_name="ranks"
        )

    return run
