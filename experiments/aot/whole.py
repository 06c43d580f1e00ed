"""Whole published models: an update or a recompute of a run, compiled for a cluster of described H100s.

    make aot-full                                  # all programs of the table that fit, a quarter of an hour
    python -m experiments.aot.whole --model Qwen3-30B-A3B --nodes 4 --tokens 8192 --shard-dense

The programs are those of `experiments.rl.step`, which a run compiles. An update pushes residents, scans micro-batches
of packed sequences with recorded routing, returns the residents' gradients, clips, and takes an AdamW step. A recompute
scans the same micro-batches for the log-probabilities of their tokens, without residents. With ``--live`` both route
live, as in a warm-up and in a recompute that records the routing. Weights are float32, the computation is in bfloat16,
and everything runs as `relibra_jax.execution.ExpertParallel` chooses on such nodes. The largest memory of a device is
XLA's own figure (`memory_analysis`). No GPU is needed or used.
"""

import dataclasses
import functools
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import read_compiled
from experiments.aot.gpus import GPUS, described_devices
from experiments.aot.stack import FAST_COMPILATION, with_shardings
from experiments.model_memory import PUBLISHED
from experiments.rl.devices import FSDP, copies_of_group
from experiments.rl.optimizer import make_optimizer
from experiments.rl.policy import Agent, make_agent
from experiments.rl.step import Clip, TrainingBatch, recompute, update
from relibra_jax.contract.types import Assignment, BatchPlan, Plan, Topology
from relibra_jax.execution import OVERLAP_OPTIONS, ExpertParallel, prepare_layers
from relibra_jax.execution.memory import HOST, to_host
from relibra_jax.execution.mesh import RANKS, expert_mesh
from relibra_jax.models import ModelConfig
from relibra_jax.models.hf_config import model_config
from relibra_jax.models.language_model import model_maker
from relibra_jax.nnx import PreparedBatch, SequencePacking
from relibra_jax.nnx.host_state import on_device
from relibra_jax.nnx.prepared import by_group
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes

UNEVEN: Final = 1.1
"""The rows of the busiest rank over the mean, as buffers have room for."""
MOST_GB: Final = 75.0
"""The memory of an H100 that a program may take, in GB; the rest of the 80 GB is for the runtime."""
VISITED: Final = 0.95
"""The share of a rank's tokens that visit a node, for the busiest pair of nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """Compile a program of a published model, and print its memory on a device."""

    program: Literal["update", "recompute"] = "update"
    """The program to compile."""
    model: str | None = None
    """The published model. None compiles all of `PROGRAMS`, whatever the other settings are."""
    layers: int | None = None
    """The number of layers. None for all."""
    nodes: int = 4
    """The number of nodes of an expert-parallel group."""
    ranks: int = 8
    """The number of ranks of a node."""
    data: int = 1
    """The number of data-parallel copies of the group."""
    fsdp: int = 1
    """The number of further copies, over which experts are sharded along the model width."""
    shard_dense: bool = False
    """Whether dense parameters are sharded over the ranks of a group and ``fsdp``."""
    moments: str = "float32"
    """The dtype of AdamW's moments."""
    state_memory: str = "device"
    """The memory of parameters and moments."""
    batch_memory: str = HOST
    """The memory of samples, routes and tables."""
    activation_memory: str = "device"
    """The memory in which the inputs of layers wait for the backward pass."""
    tokens: int = 8192
    """The number of tokens of a rank in a micro-batch, one packed sequence."""
    micro_batches: int = 2
    """The number of micro-batches of a group."""
    replica_slots: int = 1
    """The number of replica slots of a rank."""
    resident_slots: int = 0
    """The number of resident slots of a rank."""
    live: bool = False
    """Whether the program routes live, with experts at home. The settings of slots are then not used."""
    record: Path | None = None
    """A file to which the result is added, a line of JSON."""


_SMALL: Final = Whole(model="Qwen3-30B-A3B", shard_dense=True)
PROGRAMS: Final = (
    dataclasses.replace(_SMALL, shard_dense=False),
    _SMALL,
    dataclasses.replace(_SMALL, nodes=2, tokens=32768),
    dataclasses.replace(_SMALL, model="GLM-4.5-Air", moments="bfloat16"),
    Whole(model="Qwen3-235B-A22B", fsdp=4, shard_dense=True, tokens=16384, resident_slots=1),
)
"""The programs of the table in docs/guides/rl-run.md that fit."""


class Memory(NamedTuple):
    """The memory of a device for a compiled program in GB (1e9 bytes), without that of the host."""

    arguments: float
    temporary: float
    outputs: float
    """Outputs that no donated argument holds."""

    @property
    def peak(self) -> float:
        """All of it at the same time."""
        return sum(self)


def compile_program(setting: Whole) -> tuple[jax.stages.Compiled, Memory, float]:
    """Compile the program; return it with its memory and the seconds that took."""
    assert setting.model is not None
    config = dataclasses.replace(
        model_config(PUBLISHED[setting.model]),
        dtype="bfloat16",
        activation_memory=setting.activation_memory,
    )
    if setting.layers is not None:
        config = dataclasses.replace(config, layers=setting.layers)
    topology = Topology(
        num_nodes=setting.nodes,
        ranks_per_node=setting.ranks,
        num_experts=config.num_experts,
        replica_slots=0 if setting.live else setting.replica_slots,
        resident_slots=0 if setting.live else setting.resident_slots,
    )
    copies = copies_of_group(setting.data, setting.fsdp)
    devices = described_devices(
        GPUS["H100"], nodes=setting.data * setting.fsdp * setting.nodes, gpus_per_node=setting.ranks
    )
    mesh = expert_mesh(topology, devices=devices, **copies)
    parallel = ExpertParallel(
        mesh=mesh,
        topology=topology,
        capacities=None if setting.live else capacities_of(config, topology, setting.tokens),
        across_nodes=False,
        implementation="mosaic",
    )
    if not setting.live:
        parallel = parallel.with_striping(config.top_k)
    fsdp_axis = FSDP if FSDP in copies else None
    make = model_maker(config, topology, mesh, fsdp_axis=fsdp_axis, shard_dense=setting.shard_dense)
    tx = make_optimizer(1e-5, 1e-5, 0, critic_rate=None, moments=setting.moments)

    def build() -> tuple[Agent, nnx.Optimizer]:
        agent = make_agent(make(nnx.Rngs(0)), mesh, critic=False)
        return agent, nnx.Optimizer(agent, tx, wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(build))
    state = with_shardings(shapes, mesh)
    batch, samples, batch_load = batch_shapes(config, parallel, setting)

    def recompute_of(state: Any, batch: PreparedBatch, samples: TrainingBatch, _: Any) -> Any:
        state, batch, samples = _in_memory(setting, state, batch, samples)
        agent, _ = nnx.merge(graph, state)
        return recompute(on_device(agent), batch, samples, temperature=1.0, record=setting.live)

    def update_of(state: Any, batch: PreparedBatch, samples: TrainingBatch, load: jax.Array) -> Any:
        state, batch, samples = _in_memory(setting, state, batch, samples)
        agent, optimizer = nnx.merge(graph, state)
        metrics = update(agent, optimizer, batch, samples, load, clip=Clip(), balance=0.01)
        return nnx.state((agent, optimizer)), metrics

    begin = time.perf_counter()
    options = {**OVERLAP_OPTIONS, **FAST_COMPILATION}
    if setting.program == "recompute":
        program = jax.jit(recompute_of, compiler_options=options)
    else:
        # Results in host memory keep the shardings that they are computed with.
        outputs = None
        if setting.state_memory != HOST:
            outputs = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
        program = jax.jit(update_of, donate_argnums=0, out_shardings=outputs, compiler_options=options)
    compiled = program.lower(state, batch, samples, batch_load).compile()
    seconds = time.perf_counter() - begin
    return compiled, memory_of(compiled, host_gb(setting, state, batch, samples)), seconds


def capacities_of(config: ModelConfig, topology: Topology, tokens: int) -> Capacities:
    """Return the buffer sizes of a rank with ``tokens`` tokens, for a plan that is balanced within `UNEVEN`."""
    copies = tokens * config.top_k
    rows = int(copies * UNEVEN)
    visits = int(tokens * VISITED)
    nodes, local = topology.num_nodes, topology.ranks_per_node
    to_rank, inside = (int(1.25 * rows / ranks) for ranks in (topology.num_ranks, local))
    push = None
    if topology.resident_slots:
        each = config.moe_layers * topology.resident_slots
        push = PushSizes(exports=each + 2, pair=each * local, own=1)
    return Capacities(
        rows=rows,
        flat=ExchangeSizes(pair=to_rank, own=to_rank, send=copies, receive=rows),
        node=ExchangeSizes(pair=visits, own=visits, send=nodes * visits, receive=nodes * visits),
        local=ExchangeSizes(pair=inside, own=inside, send=rows, receive=rows),
        exports=2 * -(-topology.replica_slots // 2),
        export_copies=topology.replica_slots,
        push=push,
    )


def batch_shapes(
    config: ModelConfig, parallel: ExpertParallel, setting: Whole
) -> tuple[PreparedBatch, TrainingBatch, jax.ShapeDtypeStruct]:
    """Return the shapes of a prepared batch, its samples on the ranks, and its load."""
    mesh, topology, layers = parallel.mesh, parallel.topology, config.moe_layers
    groups, micro_batches = parallel.num_ranks // topology.num_ranks, setting.micro_batches
    sequences = (micro_batches, parallel.num_ranks, setting.tokens)

    def shape(size: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def tokens(dtype: Any, *rest: int) -> Any:
        return shape((*sequences, *rest), dtype, None, *parallel.token_spec)

    ids = tokens(jnp.uint8, layers, config.top_k)
    samples = TrainingBatch(
        tokens=tokens(jnp.int32),
        mask=tokens(jnp.bool_),
        expert_ids=None if setting.live else ids,
        weights=tokens(jnp.float32),
        advantages=tokens(jnp.float32),
        old_log_probs=tokens(jnp.float32),
        packing=SequencePacking(tokens(jnp.int32), tokens(jnp.int32)),
    )
    batch_load = shape((layers, topology.num_experts), jnp.int32)
    if setting.live:
        return PreparedBatch(None, parallel), samples, batch_load
    all_ranks = (groups * micro_batches, layers, *parallel.ranks)
    slots = shape((*all_ranks, topology.slots), jnp.int32)
    load = shape((*all_ranks, topology.num_experts), jnp.int32)
    assignment = Assignment(shape((groups * micro_batches, *parallel.ranks, 8), jnp.int32))
    plan = BatchPlan(assignment, load, Plan(slots, shape((layers, topology.num_experts), jnp.int32), slots))
    prepare = functools.partial(prepare_layers, parallel=parallel)
    tables = jax.eval_shape(
        lambda ids, plan: prepare(ids, by_group(plan.layer_plans(), parallel)),
        jax.ShapeDtypeStruct(ids.shape, jnp.int32),
        plan,
    )

    def over_ranks(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return shape(leaf.shape, leaf.dtype, None, None, *parallel.data_axes, *RANKS)

    plan_of_ranks = tables.slot_expert
    tables = jax.tree.map(over_ranks, tables._replace(slot_expert=None))
    slot_expert = shape(plan_of_ranks.shape, plan_of_ranks.dtype, None, None, *parallel.data_axes)
    return PreparedBatch(plan, parallel, tables._replace(slot_expert=slot_expert)), samples, batch_load


def _in_memory(
    setting: Whole, state: Any, batch: PreparedBatch, samples: TrainingBatch
) -> tuple[Any, PreparedBatch, TrainingBatch]:
    """Move a program's arguments to host memory, under jit, if the setting has them there.

    Described devices have no memories, so their arguments cannot be declared there. XLA counts the arguments as those
    of the device; `host_gb` is what has to be taken off.
    """
    if setting.state_memory == HOST:
        state = jax.tree.map_with_path(
            lambda path, leaf: to_host(leaf) if _is_trained(path, leaf) else leaf, state
        )
    if setting.batch_memory == HOST:
        batch = PreparedBatch(batch.batch_plan, batch.parallel, to_host(batch.layers()))
        samples = to_host(samples)
    return state, batch, samples


def host_gb(setting: Whole, state: Any, batch: PreparedBatch, samples: TrainingBatch) -> float:
    """Return the size of a program's arguments in host memory, for a device, in GB."""
    leaves = [leaf for path, leaf in jax.tree.leaves_with_path(state) if _is_trained(path, leaf)]
    leaves = leaves if setting.state_memory == HOST else []
    if setting.batch_memory == HOST:
        leaves += jax.tree.leaves((batch.layers(), samples))
    sizes = (math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    return sum(sizes) / 1e9


def _is_trained(path: Any, leaf: Any) -> bool:
    """Return whether a variable is a parameter or a moment, which `relibra_jax.nnx.host_state.put_on_host` moves."""
    return bool(leaf.ndim) and "home" not in jax.tree_util.keystr(path)


def memory_of(compiled: jax.stages.Compiled, on_host: float) -> Memory:
    """Return the memory of a device for a compiled program, ``on_host`` GB of whose arguments are the host's."""
    memory = compiled.memory_analysis()
    assert memory is not None
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments, temporary, outputs = (
        size / 1e9 for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes, kept)
    )
    return Memory(arguments - on_host, temporary, outputs)


def compile_and_measure(setting: Whole) -> float:
    """Compile, print one line, add it to the record, and return the memory of a device in GB."""
    compiled, memory, seconds = compile_program(setting)
    program, _ = read_compiled(compiled)
    collectives = Counter(transfer.kind for transfer in program.transfers())
    result = {
        **{name: value for name, value in dataclasses.asdict(setting).items() if name != "record"},
        **{f"{name}_gb": round(value, 1) for name, value in memory._asdict().items()},
        "peak_gb": round(memory.peak, 1),
        "compile_seconds": round(seconds),
        "collectives": dict(collectives),
    }
    line = json.dumps(result)
    print(line, flush=True)
    if setting.record is not None:
        with setting.record.open("a") as file:
            file.write(line + "\n")
    return memory.peak


def main(setting: Whole) -> int:
    """Compile one program or all; return 1 if one of them takes more memory than `MOST_GB`."""
    settings = [setting]
    if setting.model is None:
        settings = [dataclasses.replace(each, record=setting.record) for each in PROGRAMS]
    return int(max(map(compile_and_measure, settings)) > MOST_GB)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Whole, prog="python -m experiments.aot.whole")))
