"""The rate of XLA's ragged all-to-all on a GPU, for different numbers of updates into which rows are cut.

Layers give XLA one update for each slot, and empty ones, whose blocks should share the rows: the same rate as if the
rows were cut evenly. With one GPU, all rows stay on it: the rate is that of XLA's kernel, and not of a link.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.operations import random_array
from experiments.gpu_day.timing import median_seconds
from experiments.ladder.facts import print_facts
from relibra_jax.execution.exchange import UPDATES, Lanes, updates

PIECES: Final = (1, 8, 32, 128)
"""The compared numbers of even pieces."""
AS_LAYERS: Final = f"1, padded to {UPDATES}"
"""The name of the exchange of all rows in one update beside empty ones, as layers make them."""


def measure_pieces(*, rehearsal: bool = False) -> None:
    """Measure the rate at which rows are received, and check that they are right.

    Args:
        rehearsal: whether to only cut lanes, since CPUs have no ragged exchange.

    Raises:
        ValueError: if a row arrives at a wrong place.
    """
    rows, width = (64, 64) if rehearsal else (16384, 2048)
    x, count = random_array(rows, width), rows - 3
    runs: dict[int | str, Lanes] = {pieces: cut(count, pieces) for pieces in PIECES}
    runs[AS_LAYERS] = updates(jax.tree.map(lambda leaf: leaf[None], cut(count, 1)))
    if rehearsal:
        print_facts(sent={name: each.sent.tolist() for name, each in runs.items()})
        return
    exchange = _exchange()
    calls = {name: functools.partial(exchange, x, each) for name, each in runs.items()}
    for name, call in calls.items():
        result = call()
        if (result[:count] != x[:count]).any() or result[count:].any():
            raise ValueError(f"pieces={name}: the received rows differ from those that were sent")
    for pieces, reading in median_seconds(calls, 9, shortest=0.01).items():
        print_facts(
            pieces=pieces,
            milliseconds=reading.median * 1e3,
            gigabytes_per_second=x.nbytes / reading.median / 1e9,
        )


def cut(count: int, pieces: int) -> Lanes:
    """Return the updates of ``count`` rows that stay in their places, cut into even pieces."""
    ends = np.arange(1, pieces + 1) * count // pieces
    starts = jnp.asarray(np.concatenate([[0], ends[:-1]]), jnp.int32)
    counts = jnp.asarray(ends, jnp.int32) - starts
    return Lanes(counts, counts, starts, starts, starts, starts)


def _exchange():
    mesh = jax.make_mesh((1,), ("ranks",), devices=jax.devices()[:1])

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("ranks"), check_vma=False)
    def run(x, runs):
        return jax.lax.ragged_all_to_all(
            x,
            jnp.zeros_like(x),
            runs.send_start,
            runs.sent,
            runs.peer_receive_start,
            runs.received,
            axis_name="ranks",
        )

    return run
