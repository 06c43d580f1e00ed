"""``python -m experiments.bench_two_processes``: two real processes, a core each, run the layer under every contender.

Each process is one rank, pinned to one core and single-threaded; they talk through gloo on the loopback interface.
A step is forward and backward of a stack of layers over one batch's micro-batches. Contenders take turns; the table
gives medians and their ratios. What this shows is waiting that is real, at a scale of two ranks.
"""

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from relibra_jax.cli.parsing import run_program

SKEW = 1.5
"""The skew of the synthetic routing: two ranks of sixteen experts each even out what is milder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTwoProcesses:
    """Time two ranks of expert parallelism on two cores."""

    trace: Annotated[Path | None, tyro.conf.Positional] = None
    """A trace (.npz); else the one that RELIBRA_TRACE names, else none: synthetic routing is always measured."""
    micro_batches: int = 3
    samples_per_rank: int = 3
    layers: int = 4
    width: int = 256
    hidden: int = 512
    repeats: int = 7
    process: Annotated[tuple[int, int] | None, tyro.conf.arg(name="as-process")] = None
    """Number of this process and the port of process 0; given by the command to its own children."""


def launch(config: BenchTwoProcesses) -> None:
    """Start both processes; process 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "experiments.bench_two_processes",
                *sys.argv[1:],
                "--as-process",
                str(number),
                str(port),
            ]
        )
        for number in range(2)
    ]
    status = [child.wait() for child in children]
    if any(status):
        sys.exit(f"processes ended with {status}")


def measure(config: BenchTwoProcesses, number: int, port: int) -> None:
    """What one process does."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {number})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)

    from rich.console import Console
    from rich.table import Table

    from experiments.contenders import contenders
    from experiments.synthetic_traces import synthetic_trace
    from relibra_jax.cli.traces import read_trace
    from relibra_jax.execution.mesh import expert_mesh
    from relibra_jax.types import Topology

    console = Console(quiet=number > 0)
    console.print(
        f"jax {jax.__version__}, two processes, one core each; D={config.width}, F={config.hidden}, float32",
        highlight=False,
    )
    skewed = synthetic_trace(skew=SKEW)._replace(name=f"synthetic, Zipf {SKEW}")
    for trace in (read_trace(config.trace), skewed):
        topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=trace.num_experts, replica_slots=2)
        mesh = expert_mesh(topology)
        by_name = contenders(
            trace,
            topology,
            micro_batches=config.micro_batches,
            samples_per_rank=config.samples_per_rank,
            layers=config.layers,
        )
        steps = {name: _step(each, topology, mesh, config) for name, each in by_name.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(config.repeats + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                jax.block_until_ready(step())
                if turn:
                    times[name].append(time.perf_counter() - start)
        medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
        table = Table(title=f"{trace.name}: {config.layers} layers, 2 ranks", title_justify="left")
        for column in (
            "contender",
            "s a batch",
            "min to max",
            "static / it",
            "of balanced",
            "rows imbalance",
        ):
            table.add_column(column, justify="left" if column == "contender" else "right")
        for name, seconds in medians.items():
            load = by_name[name].rank_load
            table.add_row(
                name,
                f"{seconds:.2f}",
                f"{min(times[name]):.2f} to {max(times[name]):.2f}",
                f"{medians['static'] / seconds:.2f}",
                f"{medians['balanced'] / seconds:.1%}",
                f"{load.max((2, 3)).sum() / load.mean((2, 3)).sum():.3f}",
            )
        console.print(table)
        console.print_json(json.dumps({"trace": trace.name, "seconds": times}))


def _step(contender, topology, mesh, config: BenchTwoProcesses):
    """A compiled batch: every micro-batch forward and backward through the stack, gradients added up."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments.contenders import expert_weights
    from relibra_jax.execution import ExpertParallel, fetch_replicas, moe_layer, rank_sharding
    from relibra_jax.plan import home_layout

    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=contender.capacities)
    tokens = contender.expert_ids.shape[-2]
    rng = np.random.default_rng(0)

    def put(values, sharding):
        """The same values on every process, each keeping its own part."""
        values = np.asarray(values)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    everywhere = functools.partial(put, sharding=jax.NamedSharding(mesh, jax.P()))
    x = put(rng.normal(size=(2, tokens, config.width)).astype(np.float32), parallel.token_sharding)
    weights = expert_weights(topology.num_experts, config.width, config.hidden, config.layers)
    layouts = np.asarray(home_layout(contender.batch_plan.plan.home, topology))
    params = [
        {
            "experts": put(weights[layer][layouts[layer]], rank_sharding(mesh)),
            "router": everywhere(weights[layer, :, 0, :, 0].T),
        }
        for layer in range(config.layers)
    ]
    inputs = jax.tree.map(everywhere, (contender.expert_ids, contender.batch_plan.layer_plans()))

    def loss(params, x, expert_ids, plans):
        for layer, weights in enumerate(params):
            plan, ids = plans.layer(layer), expert_ids[layer]
            experts, x = fetch_replicas(weights["experts"], plan, x, parallel)
            normed = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            chosen = jnp.maximum(ids, 0)
            gates = jax.nn.softmax(jnp.take_along_axis(normed @ weights["router"], chosen, -1))
            x = x + moe_layer(normed, ids, gates, experts, plan, parallel)
        return (x**2).mean()

    @jax.jit
    def step(params, x, *batch):
        def micro_batch(total, one):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, *one)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(micro_batch, zeros, batch)[0]

    return lambda: step(params, x, *inputs)


def main(config: BenchTwoProcesses) -> None:
    """Start both processes, or be one of them.

    Args:
        config: the settings; ``process`` is None for the process that starts the others.
    """
    if config.process is None:
        launch(config)
    else:
        measure(config, *config.process)


if __name__ == "__main__":
    sys.exit(run_program(main, BenchTwoProcesses, description=__doc__))
