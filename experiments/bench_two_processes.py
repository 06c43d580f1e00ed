"""``python -m experiments.bench_two_processes``: two real processes, a core each, run the layer under every contender.

Each process is one rank, pinned to one core and single-threaded; they talk through gloo on the loopback interface.
A step is forward and backward of a stack of layers over one batch's micro-batches. Contenders take turns; the table
gives medians and their ratios. What this shows is waiting that is real, at a scale of two ranks.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

SKEW = 1.5
"""Of the skewed synthetic routing: two ranks of sixteen experts each even out what is milder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
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


def launch(config: Parallel) -> None:
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


def measure(config: Parallel, number: int, port: int) -> None:
    """What one process does."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {number})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)

    from rich.console import Console
    from rich.table import Table

    from experiments.synthetic_traces import synthetic_trace
    from relibra_jax.cli.traces import read_trace
    from experiments.contenders import contenders
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
        works = contenders(
            trace,
            topology,
            micro_batches=config.micro_batches,
            samples_per_rank=config.samples_per_rank,
            layers=config.layers,
        )
        steps = {name: _step(work, topology, mesh, config) for name, work in works.items()}
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
            load = jax.device_get(works[name].plan.quota).sum(-1)
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


def _step(work, topology, mesh, config: Parallel):
    """A compiled batch: every micro-batch forward and backward through the stack, gradients added up."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments.contenders import expert_weights
    from relibra_jax.execution.mesh import rank_sharding
    from relibra_jax.execution.moe import ExpertParallel, fetch_replicas, moe_layer
    from relibra_jax.plan import home_layout
    from relibra_jax.types import Plan

    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=work.sizes)
    top_k, tokens = work.expert_ids.shape[-1], work.expert_ids.shape[-2]
    rng = np.random.default_rng(0)
    everywhere = jax.NamedSharding(mesh, jax.P())

    def over_ranks(values):
        """The same values on every process, each keeping its own part."""
        return jax.make_array_from_callback(values.shape, rank_sharding(mesh), lambda index: values[index])

    x = over_ranks(rng.normal(size=(1, 2, tokens, config.width)).astype(np.float32))
    weights = expert_weights(topology.num_experts, config.width, config.hidden, config.layers)
    layouts = np.asarray(home_layout(work.plan.home, topology))
    params = [
        {
            "experts": over_ranks(weights[layer][layouts[layer]]),
            "router": jnp.asarray(weights[layer, :, 0, :, 0].T),
        }
        for layer in range(config.layers)
    ]
    params = [
        {**layer, "router": jax.device_put(np.asarray(layer["router"]), everywhere)} for layer in params
    ]
    inputs = jax.device_put(
        (
            work.expert_ids,
            *map(np.asarray, (work.plan.slot_expert, work.plan.home, work.plan.quota, work.load)),
        ),
        everywhere,
    )

    def loss(params, x, ids, slot_expert, home, quota, load):
        for layer, weights in enumerate(params):
            plan = Plan(slot_expert[layer], home[layer], quota[layer])
            experts, x = fetch_replicas(weights["experts"], plan, x, parallel)
            normed = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            chosen = jnp.maximum(ids[layer], 0)
            gates = jax.nn.softmax(jnp.take_along_axis(normed @ weights["router"], chosen, -1))
            gates = gates.reshape(*x.shape[:-1], top_k)
            x = x + moe_layer(normed, ids[layer], gates, experts, plan, load[layer], parallel)
        return (x**2).mean()

    @jax.jit
    def step(params, x, ids, slot_expert, home, quota, load):
        def micro_batch(total, xs):
            ids, slot_expert, quota, load = xs
            grads = jax.grad(loss)(params, x, ids, slot_expert, home, quota, load)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(micro_batch, zeros, (ids, slot_expert, quota, load))[0]

    return lambda: step(params, x, *inputs)


if __name__ == "__main__":
    arguments = tyro.cli(Parallel, description=__doc__)
    if arguments.process is None:
        launch(arguments)
    else:
        measure(arguments, *arguments.process)
