"""``python -m experiments.bench_layer``: measure the MoE layer, forward and backward, against common JAX layers.

relibra_jax's layer runs in two variants: its tables are prepared before the step, as for a batch, or inside it. Eight
host devices as 2x4 share this machine's cores, so the times compare total work, not waiting. The baselines keep experts
at their homes and drop no token:

- capacity-padded: every pair of source rank and expert has a lane, all lanes have the length of the longest, and a
  batched matmul computes the experts (as in Switch and GShard, with a capacity that drops no token);
- `ragged_dot`: lanes have the worst-case length, and the receiver sorts rows and calls `jax.lax.ragged_dot` three
  times.
"""

import dataclasses
import functools
import os
import sys

if __name__ == "__main__":  # before JAX is imported
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault(
        "NPROC", str(max(16, os.cpu_count() or 1))
    )  # two threads for each device, for the reason that `experiments.rl.devices` gives

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.contenders import ContenderBatch, contenders, expert_weights
from experiments.gpu_day.baselines import dense_mlp, ragged_mlp
from experiments.interleaving import interleaved
from experiments.layer_gradients import layer_gradients
from experiments.program import TraceName, run_program
from relibra_jax.contract.plan import home_layout
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.execution import (
    ExpertParallel,
    expert_mesh,
    prepare_layer,
    rank_sharding,
)
from relibra_jax.execution.mesh import RANKS
from relibra_jax.traces.read import read_trace

BEFORE, INSIDE = "prepared before the step", "prepared in the step"
REFERENCE = f"relibra_jax, relibra, {BEFORE}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchLayer:
    """Time one layer of one micro-batch on 2x4 host devices."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    samples_per_rank: int = 4
    """The mean number of samples of a rank."""
    width: int = 128
    """The model width D."""
    hidden: int = 256
    """The expert width F."""
    repeats: int = 5
    """The number of timed runs of each layer; the table shows medians."""


def padded_layer(x, ids, gates, experts, *, capacity: int, ranks: int):
    """Compute one rank's part of the capacity-padded layer, for ``x[t D]`` and home experts ``[H 3 D F]``.

    Args:
        x: the rank's tokens.
        ids: their expert ids, ``[t K]``.
        gates: the weights of the experts, ``[t K]``.
        experts: the rank's home experts.
        capacity: the length of a lane in rows.
        ranks: the number of ranks.
    """
    homes = len(experts)
    flat = jnp.where(ids == EMPTY, ranks * homes, ids).ravel()
    order = jnp.argsort(flat, stable=True)
    place = jnp.arange(flat.size) - jnp.searchsorted(flat[order], flat[order])
    lane = jnp.zeros(flat.size, jnp.int32).at[order].set(flat[order] * capacity + place.astype(jnp.int32))
    sent = (
        jnp.zeros((ranks * homes * capacity, x.shape[1]))
        .at[lane]
        .set(jnp.repeat(x, ids.shape[1], 0), mode="drop")
    )
    lanes = sent.reshape(ranks, homes, capacity, -1)
    there = jax.lax.all_to_all(lanes, RANKS, 0, 0, tiled=True).swapaxes(0, 1).reshape(homes, -1, x.shape[1])
    out = dense_mlp(there, experts[:, 0], experts[:, 1], experts[:, 2])
    lanes = out.reshape(homes, ranks, capacity, -1).swapaxes(0, 1)
    back = jax.lax.all_to_all(lanes, RANKS, 0, 0, tiled=True).reshape(-1, x.shape[1])
    copies = back.at[lane].get(mode="fill", fill_value=0).reshape(*ids.shape, -1)
    return (copies * gates[..., None]).sum(1)


def ragged_dot_layer(x, ids, gates, experts, *, ranks: int):
    """Compute one rank's part of the layer on `jax.lax.ragged_dot`, whose buffers have the worst-case size."""
    homes = len(experts)
    capacity = len(x) * min(ids.shape[1], homes)
    rank = jnp.where(ids == EMPTY, ranks, ids // homes).ravel()
    order = jnp.argsort(rank, stable=True)
    place = jnp.arange(rank.size) - jnp.searchsorted(rank[order], rank[order])
    lane = jnp.zeros(rank.size, jnp.int32).at[order].set(rank[order] * capacity + place.astype(jnp.int32))
    sent = jnp.zeros((ranks * capacity, x.shape[1])).at[lane].set(jnp.repeat(x, ids.shape[1], 0), mode="drop")
    which = jnp.full(ranks * capacity, homes).at[lane].set(ids.ravel() % homes, mode="drop")

    def exchange(rows):
        lanes = rows.reshape(ranks, capacity, *rows.shape[1:])
        return jax.lax.all_to_all(lanes, RANKS, 0, 0, tiled=True).reshape(rows.shape)

    there, group = exchange(sent), exchange(which)
    sort = jnp.argsort(group, stable=True)
    sizes = jnp.zeros(homes, jnp.int32).at[group].add(1, mode="drop")
    out = ragged_mlp(there[sort], experts, sizes)
    back = exchange(jnp.zeros_like(out).at[sort].set(out))
    copies = back.at[lane].get(mode="fill", fill_value=0).reshape(*ids.shape, -1)
    return (copies * gates[..., None]).sum(1)


def baseline_step(layer, mesh, arguments):
    """Return a function that runs a baseline forward and backward over the mesh.

    Args:
        layer: a function that computes one rank's part of the layer.
        mesh: the device mesh.
        arguments: the tokens, expert ids, gates and home experts.
    """
    token, rank = jax.P(RANKS), jax.P(*RANKS)

    def on_rank(x, ids, gates, experts):
        return layer(x[0], ids[0], gates[0], experts[0, 0])[None]

    specs = (token, token, token, rank)
    sharded = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=token)

    @jax.jit
    def step(x, ids, gates, experts):
        out, pull = jax.vjp(lambda x, gates, experts: sharded(x, ids, gates, experts), x, gates, experts)
        return out, *pull(out)

    return lambda: step(*arguments)


def relibra_step(batch: ContenderBatch, topology: Topology, mesh, arguments, *, prepared: bool):
    """Return a function that runs relibra_jax's layer forward and backward, without hiding the fetch of replicas.

    Args:
        batch: the batch under a planner.
        topology: the expert-parallel group.
        mesh: the mesh of the group.
        arguments: the tokens, expert ids, gates and home experts.
        prepared: whether the layer's tables are prepared before the step instead of inside it.
    """
    # The flat path has one exchange between all ranks, like the baselines.
    parallel = ExpertParallel(mesh=mesh, topology=topology, capacities=batch.capacities, path="flat")
    x, ids, gates, experts = arguments
    plan = batch.batch_plan.micro_batch(0).layer(0)

    @jax.jit
    def step(x, ids, gates, experts, layer):
        layer = layer if prepared else prepare_layer(ids, layer, parallel)
        return layer_gradients(x, gates, experts, ids=ids, layer=layer, parallel=parallel)

    layer = jax.jit(prepare_layer, static_argnums=2)(ids, plan, parallel) if prepared else plan
    return lambda: step(x, ids, gates, experts, layer)


def main(config: BenchLayer) -> None:
    """Check that all layers compute the same outputs, time them, and print the table.

    Args:
        config: the settings.
    """
    trace = read_trace(config.trace)
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=trace.num_experts, replica_slots=2)
    mesh = expert_mesh(topology)
    by_name = contenders(trace, topology, micro_batches=1, samples_per_rank=config.samples_per_rank, layers=1)
    ids = by_name["static"].expert_ids[0, 0]
    x = np.random.default_rng(0).normal(size=(*ids.shape[:-1], config.width)).astype(np.float32)
    weights = expert_weights(topology.num_experts, config.width, config.hidden, 1)[0]

    def arguments(batch: ContenderBatch):
        layout = np.asarray(home_layout(batch.batch_plan.plan.home[0], topology))
        tokens = (x, ids, np.full(ids.shape, 1 / ids.shape[-1], np.float32))
        by_token = jax.NamedSharding(mesh, jax.P(RANKS))
        return *jax.device_put(tokens, by_token), jax.device_put(weights[layout], rank_sharding(mesh))

    static_arguments, relibra_arguments = arguments(by_name["static"]), arguments(by_name["relibra"])
    copies = (ids.reshape(8, -1, 1) == np.arange(topology.num_experts)).sum(1)
    padded = functools.partial(padded_layer, capacity=int(copies.max()), ranks=8)
    runs = {
        f"relibra_jax, {name}, {when}": relibra_step(by_name[name], topology, mesh, inputs, prepared=prepared)
        for name, inputs in (("relibra", relibra_arguments), ("static", static_arguments))
        for when, prepared in ((BEFORE, True), (INSIDE, False))
    }
    runs |= {
        "capacity-padded batched matmul": baseline_step(padded, mesh, static_arguments),
        "ragged_dot, worst-case buffers": baseline_step(
            functools.partial(ragged_dot_layer, ranks=8), mesh, static_arguments
        ),
    }
    outputs = {name: np.asarray(run()[0]) for name, run in runs.items()}
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs[REFERENCE], rtol=1e-3, atol=1e-4, err_msg=name)
    # A baseline leaves caches and pages cold for whatever runs next, so each one is timed alone.
    baselines = [{name: runs.pop(name)} for name in list(runs) if not name.startswith("relibra_jax")]
    seconds: dict[str, float] = {}
    for group in (runs, *baselines):
        seconds |= interleaved(group, repeats=config.repeats)
    table = Table(
        title=f"{trace.name}: one layer, 2x4 host devices on {os.cpu_count()} cores, {copies.sum()} token copies,"
        f" D={config.width}, F={config.hidden}, forward and backward",
        title_justify="left",
    )
    table.add_column("layer")
    for column in ("ms", "/ the first"):
        table.add_column(column, justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value * 1e3:.0f}", f"{value / seconds[REFERENCE]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, BenchLayer, description=__doc__))
