"""``python -m experiments.bench``: time planning against baselines; medians of alternating runs in one process."""

import dataclasses
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.interleaving import interleaved
from experiments.program import run_program
from experiments.reference_solvers import numpy_rebalance, python_rebalance, solve_replication
from relibra_jax.contract.planner import Placement, PlanRequest
from relibra_jax.contract.replay import assigned_load
from relibra_jax.contract.types import BALANCE, BatchPlan, Plan, Price, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.models import MODELS
from relibra_jax.planning.assignment import Assign, assign_samples
from relibra_jax.planning.baselines.eplb import rebalance_experts
from relibra_jax.planning.batch import Batch
from relibra_jax.planning.plan_batch import plan_batch
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.planning.routes import Routes
from relibra_jax.planning.sample_packing import pack_samples

console = Console()
EPLB_ARGS = (288, 8, 4, 32)
BATCH = Topology(num_nodes=4, ranks_per_node=8, num_experts=128, replica_slots=2)
WITH_RESIDENTS = dataclasses.replace(BATCH, resident_slots=1)
MICRO_BATCHES, LAYERS = 32, 94
COST = CostModel(cluster=CLUSTERS["h100"], model=MODELS["qwen3-235b-a22b"], striped=True).price(BATCH)


def bench_rebalance() -> None:
    """Time `rebalance_experts` at DeepSeek-V3's size against a NumPy port and EPLB's own loop structure."""
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
    for name in ("implementation", "ms", "µs per layer", "x relibra_jax"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    relibra_seconds = next(iter(seconds.values()))
    for name, value in seconds.items():
        table.add_row(name, f"{value * 1e3:.2f}", f"{value * 1e6 / 58:.1f}", f"{value / relibra_seconds:.1f}")
    console.print(table)


def bench_planners() -> None:
    """Time every planner on a batch of Qwen3-235B's shape, with and without sample assignment, and an exact solver."""
    replay_load, tokens = sample_loads(1024, LAYERS, BATCH.num_experts)
    load = assigned_load(replay_load, pack_samples(tokens, BATCH, num_micro_batches=MICRO_BATCHES))
    runs: dict[str, Callable[[], Any]] = {name: planner_run(PLANNERS[name], load, BATCH) for name in PLANNERS}
    home = runs["relibra"]()[0].home
    replicate = jax.jit(replicate_experts, static_argnums=2)
    by_expert = load.sum((2, 3))
    request, placement = PlanRequest(load), Placement.without_residents(home, BATCH)
    runs["relibra, replication only"] = lambda: replicate(request, placement, BATCH)
    planner, key = PLANNERS["relibra"].planner, jax.random.key(0)
    state = planner.init(BATCH, LAYERS, key=key)

    def joint(
        batch: Batch, topology: Topology, cost: Price, assign: Assign | None = assign_samples
    ) -> tuple[BatchPlan, Any]:
        return plan_batch(
            batch, planner, state, topology, stages=MICRO_BATCHES, assign=assign, key=key, cost=cost
        )

    counts = Batch(replay_load, tokens)
    batch = counts._replace(routes=sample_tokens(replay_load, tokens, top_k=8))
    runs["relibra, samples assigned"] = lambda: joint(counts, BATCH, BALANCE)
    runs["relibra, minimising time"] = lambda: joint(batch, BATCH, COST, assign=None)
    runs["relibra, minimising time, samples assigned"] = lambda: joint(batch, BATCH, COST)
    runs["relibra, minimising time, one resident slot"] = lambda: joint(batch, WITH_RESIDENTS, COST)
    seconds = interleaved(runs, repeats=3)
    rows = LAYERS * MICRO_BATCHES
    table = _table(
        f"a batch: {LAYERS} layers x {MICRO_BATCHES} micro-batches x 128 experts on 4 nodes x 8 ranks",
        "planner",
        "ms per batch",
        "µs per layer and micro-batch",
    )
    for name, value in seconds.items():
        table.add_row(name, f"{value * 1e3:.1f}", f"{value * 1e6 / rows:.1f}")
    domains = np.take_along_axis(np.asarray(by_expert[0]), np.argsort(home, -1), -1).reshape(LAYERS, 4, 8, 4)[
        :2
    ]
    start = time.perf_counter()
    for domain in domains.reshape(-1, 8, 4):
        solve_replication(domain, BATCH.replica_slots)
    solver_seconds = (time.perf_counter() - start) / len(domains)
    table.add_row("mixed-integer program, replication only", "", f"{solver_seconds * 1e6:.0f}")
    console.print(table)
    console.print(
        f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


def bench_compilation() -> None:
    """Time the compilation of planning and sample assignment, for a small model and for Qwen3-235B's shape."""
    table = _table("compilation of relibra", "size", "objective", "compile, s", "compile, CPU s", "run, ms")
    jax.config.update("jax_enable_compilation_cache", False)
    small = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1)
    for topology, layers, micro_batches, samples, in_time in (
        (small, 4, 4, 256, False),
        (small, 4, 4, 256, True),
        (BATCH, LAYERS, MICRO_BATCHES, 1024, False),
        (WITH_RESIDENTS, LAYERS, MICRO_BATCHES, 1024, True),
    ):
        planner = relibra()
        state = planner.init(topology, layers, key=jax.random.key(0))

        def plan(batch, state, key, cost, topology=topology, planner=planner, micro_batches=micro_batches):
            options = {"stages": micro_batches, "assign": assign_samples, "key": key, "cost": cost}
            return plan_batch(batch, planner, state, topology, **options)

        load, tokens = sample_loads(samples, layers, topology.num_experts)
        routes = sample_tokens(load, tokens, top_k=8) if in_time else None
        arguments = (Batch(load, tokens, routes), state, jax.random.key(0), COST if in_time else BALANCE)
        start, cpu_start = time.perf_counter(), time.process_time()
        compiled = jax.jit(plan).lower(*arguments).compile()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        (run,) = interleaved({"plan": lambda: compiled(*arguments)}, repeats=3).values()  # noqa: B023
        size = f"{layers} layers x {micro_batches} micro-batches x {topology.num_experts} experts"
        kind = f"time, {topology.resident_slots} resident slots" if in_time else "balance"
        parts = (f"{seconds:.1f}", f"{cpu_seconds:.1f}", f"{run * 1e3:.0f}")
        table.add_row(f"{size} on {topology.num_ranks} ranks", kind, *parts)
    console.print(table)


def bench_growth() -> None:
    """Time ReLibra's planning for several numbers of layers, micro-batches and ranks."""
    table = _table(
        "relibra at several sizes",
        "layers x micro-batches x experts on ranks",
        "ms per batch",
        "µs per layer and micro-batch",
    )
    large = Topology(num_nodes=64, ranks_per_node=8, num_experts=512, replica_slots=2)
    for topology, layers, micro_batches in (
        (BATCH, LAYERS // 2, MICRO_BATCHES),
        (BATCH, LAYERS, MICRO_BATCHES // 2),
        (BATCH, LAYERS, MICRO_BATCHES),
        (BATCH, LAYERS, 2 * MICRO_BATCHES),
        (large, 4, MICRO_BATCHES),
    ):
        samples, _ = sample_loads(16 * micro_batches, layers, topology.num_experts)
        by_micro_batch = samples.reshape(micro_batches, 16, layers, -1).sum(1)
        load = jnp.zeros(
            (micro_batches, layers, topology.num_nodes, topology.ranks_per_node, topology.num_experts),
            jnp.int32,
        )
        load = load.at[:, :, 0, 0].set(by_micro_batch)
        (value,) = interleaved(
            {"relibra": planner_run(PLANNERS["relibra"], load, topology)}, repeats=3
        ).values()
        size = f"{layers} x {micro_batches} x {topology.num_experts} on {topology.num_ranks}"
        table.add_row(size, f"{value * 1e3:.0f}", f"{value * 1e6 / layers / micro_batches:.0f}")
    console.print(table)


def sample_loads(samples: int, layers: int, experts: int) -> tuple[jax.Array, jax.Array]:
    """Draw synthetic ``sample_load[B L E]`` and ``tokens[B]``.

    An expert's popularity is a Zipf factor, times one of the sample's domain (of eight), times one of the sample
    itself.

    Args:
        samples: the number of samples B.
        layers: the number of MoE layers L.
        experts: the number of logical experts E of a layer.
    """
    rng = np.random.default_rng(0)
    popular = rng.permuted(np.tile(1 / np.arange(1, experts + 1) ** 0.8, (layers, 1)), axis=-1)
    domain_share, domain = rng.lognormal(0, 0.8, (8, layers, experts)), rng.integers(8, size=samples)
    tokens = rng.lognormal(6.5, 0.6, samples).astype(np.int32)
    load = np.empty((samples, layers, experts), np.int32)
    for sample in range(samples):
        share = popular * domain_share[domain[sample]] * rng.lognormal(0, 0.4, (layers, experts))
        load[sample] = rng.poisson(8 * tokens[sample] * share / share.sum(-1, keepdims=True))
    return jnp.asarray(load), jnp.asarray(tokens)


def sample_tokens(load: jax.Array, tokens: jax.Array, *, top_k: int) -> Routes:
    """Draw routes of 16,384 tokens, with experts drawn without replacement in proportion to the sample's loads.

    Args:
        load: the token copies of each sample, ``[B L E]``.
        tokens: the length of each sample, in tokens.
        top_k: the number of experts of a token.
    """
    rng = np.random.default_rng(1)
    length = np.asarray(tokens, float)
    sample = np.sort(rng.choice(len(length), 16_384, p=length / length.sum()))
    popular = np.log(np.asarray(load, np.float32) + 1e-3)
    ids = np.stack(
        [
            np.argpartition(-popular[one] - rng.gumbel(size=popular[one].shape), top_k, -1)[:, :top_k]
            for one in sample
        ]
    )
    return Routes(jnp.asarray(ids, jnp.uint8), jnp.asarray(sample, jnp.int32))


def planner_run(entry: PlannerEntry, load: jax.Array, topology: Topology) -> Callable[[], tuple[Plan, Any]]:
    """Return a function that runs one update of a planner and compiles it in its first call.

    Args:
        entry: the planner.
        load: the token copies by the rank that holds them, ``[M L N G E]``.
        topology: the expert-parallel group.
    """
    state = entry.planner.init(topology, load.shape[1], key=jax.random.key(0))
    return lambda: entry.planner.update(PlanRequest(load), state, topology)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Time planning against baselines."""


def main(options: Bench) -> None:
    """Time compilation and planning, and print the tables.

    Args:
        options: none so far. The command line refuses all others.
    """
    console.print(
        f"jax {jax.__version__} on {jax.devices()[0].platform}, {os.cpu_count()} cores, {platform.machine()}"
    )
    bench_compilation()
    bench_rebalance()
    bench_planners()
    bench_growth()


if __name__ == "__main__":
    sys.exit(run_program(main, Bench))
