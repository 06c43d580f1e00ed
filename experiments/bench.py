"""``make bench``: planning time beside its peers, medians of runs that take turns in one process."""

import platform
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.peers import numpy_rebalance, python_rebalance
from relibra_jax.planning.eplb import rebalance_experts
from relibra_jax.planning.planner import PLANNERS
from relibra_jax.types import Topology

console = Console()
EPLB_ARGS = (288, 8, 4, 32)
BATCH = Topology(num_nodes=4, ranks_per_node=8, num_experts=128, replica_slots=2)
MICRO_BATCHES, LAYERS = 32, 94


def interleaved(runs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each run; all are called in turn, after one round to compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def bench_rebalance() -> None:
    """`rebalance_experts` at DeepSeek-V3's size against a NumPy port and EPLB's own loop structure."""
    load = np.random.default_rng(0).zipf(1.3, (58, 256)).clip(0, 100_000)
    device_load = jnp.asarray(load)
    jitted = jax.jit(lambda load: rebalance_experts(load, *EPLB_ARGS).physical_to_logical)
    np.testing.assert_array_equal(jitted(device_load), numpy_rebalance(load, *EPLB_ARGS))
    seconds = interleaved(
        {
            "relibra_jax, jit": lambda: jitted(device_load),
            "NumPy, all layers at a time": lambda: numpy_rebalance(load, *EPLB_ARGS),
            "Python loops, as EPLB": lambda: python_rebalance(load, *EPLB_ARGS),
        },
        repeats=9,
    )
    table = Table(
        title="rebalance_experts: 58 layers x 256 experts, 288 slots, 32 ranks", title_justify="left"
    )
    for name in ("implementation", "ms", "µs a layer", "times ours"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    ours = next(iter(seconds.values()))
    for name, value in seconds.items():
        table.add_row(name, f"{value * 1e3:.2f}", f"{value * 1e6 / 58:.1f}", f"{value / ours:.1f}")
    console.print(table)


def bench_planners() -> None:
    """Every planner on a whole batch of Qwen3-235B's shape."""
    shape = (MICRO_BATCHES, LAYERS, BATCH.num_nodes, BATCH.ranks_per_node, BATCH.num_experts)
    rng = np.random.default_rng(0)
    popular = rng.permuted(np.tile(1 / np.arange(1, 129) ** 0.8, (LAYERS, 1)), axis=-1)
    share = popular[None, :, None, None] * rng.lognormal(0, 0.6, (MICRO_BATCHES, LAYERS, 1, 1, 128))
    tokens = 2048 * 8 * share / share.sum(-1, keepdims=True)
    load = jnp.asarray(rng.poisson(np.broadcast_to(tokens, shape)), jnp.int32)
    runs = {}
    for name, row in PLANNERS.items():
        state = row.planner.init(BATCH, LAYERS, key=jax.random.key(0))
        update = jax.jit(row.planner.update)
        runs[name] = lambda update=update, state=state: update(load, state, BATCH)
    seconds = interleaved(runs, repeats=5)
    table = Table(
        title=f"a batch: {LAYERS} layers x {MICRO_BATCHES} micro-batches x 128 experts on 4 nodes x 8 ranks",
        title_justify="left",
    )
    for name in ("planner", "ms a batch", "µs a layer and micro-batch"):
        table.add_column(name, justify="left" if name == "planner" else "right")
    for name, value in seconds.items():
        table.add_row(name, f"{value * 1e3:.1f}", f"{value * 1e6 / (LAYERS * MICRO_BATCHES):.1f}")
    console.print(table)


if __name__ == "__main__":
    console.print(
        f"jax {jax.__version__} on {jax.devices()[0].platform}, {platform.processor() or platform.machine()}"
    )
    bench_rebalance()
    bench_planners()
