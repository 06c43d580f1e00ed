"""Whole published models: the programs of a run, compiled for a cluster of described H100s.

    make aot-full                                  # the programs of `PROGRAMS`, half an hour
    python -m experiments.aot.whole --model Qwen3-30B-A3B --nodes 4 --tokens 8192 --shard-dense

The programs are those of `experiments.rl.step`, which a run compiles. An update pushes residents, scans micro-batches
of packed sequences with recorded routing, returns the residents' gradients, clips, and takes an AdamW step. A recompute
scans the same micro-batches for the log-probabilities of their tokens, without residents. With ``--live`` both route
live, as in a warm-up and in a recompute that records the routing. ``prefill`` and ``decode`` are the prompt pass and
the decoding steps of a wave (`experiments.aot.whole_generation`). Weights are float32, the computation is in bfloat16,
and everything runs as `relibra_jax.execution.ExpertParallel` chooses on such nodes. The memory of a device is XLA's own
count (`memory_analysis`): arguments, temporaries and outputs. No GPU is needed or used.
"""

import dataclasses
import functools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.bytes import count_by_kind
from experiments.aot.findings import read_compiled
from experiments.aot.gpus import GPUS, described_devices
from experiments.aot.hlo import Program
from experiments.aot.modelled_bytes import compare_bytes
from experiments.aot.stack import FAST_COMPILATION, with_shardings
from experiments.aot.whole_generation import decode_wave, prompt_shapes, run_prompts, state_shapes
from experiments.model_memory import PUBLISHED, RunSizes, memory_by_stage
from experiments.rl.devices import FSDP, copies_of_group
from experiments.rl.generation import DecodingState, PaddedPrompts
from experiments.rl.optimizer import make_optimizer
from experiments.rl.policy import Agent, make_agent
from experiments.rl.step import Clip, TrainingBatch, recompute, update
from relibra_jax.contract.types import Assignment, BatchPlan, Plan, Topology
from relibra_jax.execution import OVERLAP_OPTIONS, ExpertParallel, prepare_layers
from relibra_jax.execution.memory import HOST, to_host
from relibra_jax.execution.mesh import RANKS, expert_mesh
from relibra_jax.models import LanguageModel, ModelConfig
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
GENERATION_PROGRAMS: Final[tuple[Literal["prefill", "decode"], ...]] = ("prefill", "decode")
TRAINING: Final = ("tokens", "micro_batches", "replica_slots", "resident_slots")
"""The settings that change nothing in programs of generation."""
GENERATION: Final = ("samples", "responses", "prompt_tokens", "response_tokens")
"""The settings that change nothing in updates and recomputes."""
COMPILER_OPTIONS: Final = {**OVERLAP_OPTIONS, **FAST_COMPILATION}
VISITED: Final = 0.95
"""The share of a rank's tokens that visit a node, for the busiest pair of nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """Compile a program of a published model, and print its memory on a device."""

    program: Literal["update", "recompute", "prefill", "decode"] = "update"
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
    samples: int = 32
    """The number of samples of a rank in a wave of generation."""
    responses: int = 8
    """The number of responses of a prompt, which a rank runs once for all of them."""
    prompt_tokens: int = 2048
    """The largest number of tokens of a prompt."""
    response_tokens: int = 8192
    """The largest number of tokens of a response."""
    record: Path | None = None
    """A file to which the result is added, a line of JSON."""


_SMALL: Final = Whole(model="Qwen3-30B-A3B", shard_dense=True)
_LARGE: Final = Whole(model="Qwen3-235B-A22B", fsdp=4, shard_dense=True, tokens=16384, resident_slots=1)
PROGRAMS: Final = (
    dataclasses.replace(_SMALL, shard_dense=False),
    _SMALL,
    dataclasses.replace(_SMALL, nodes=2, tokens=32768),
    dataclasses.replace(_SMALL, model="GLM-4.5-Air", moments="bfloat16"),
    _LARGE,
    dataclasses.replace(_LARGE, fsdp=1, data=5, state_memory=HOST, activation_memory=HOST),
    dataclasses.replace(_SMALL, program="recompute"),
    dataclasses.replace(_SMALL, live=True),
    *(dataclasses.replace(_SMALL, program=program) for program in GENERATION_PROGRAMS),
    *(dataclasses.replace(_LARGE, program=program, samples=16) for program in GENERATION_PROGRAMS),
)
"""The largest programs of the tables in docs/guides/rl-run.md, of each kind and size of model."""


class Memory(NamedTuple):
    """The memory of a device for a compiled program in GB (1e9 bytes), without that of the host."""

    arguments: float
    temporary: float
    outputs: float
    """Outputs that no donated argument holds."""
    beside: float
    """AdamW's moments, if the program does not have them: they stay on the device unless a run moves them away."""

    @property
    def peak(self) -> float:
        """The memory of the program, as XLA's ``peak_memory_in_bytes`` says too."""
        return self.arguments + self.temporary + self.outputs

    @property
    def run(self) -> float:
        """The memory of a run while the program runs."""
        return self.peak + self.beside


class Cluster(NamedTuple):
    """A model on described GPUs, without its arrays."""

    config: ModelConfig
    """The sizes of the model."""
    parallel: ExpertParallel
    """The mesh and the settings of layers that replay a plan."""
    make: Callable[[nnx.Rngs], LanguageModel]
    """A function of random keys that makes the model."""


class Lowered(NamedTuple):
    """A program before it is compiled."""

    program: Any
    """The function under jit."""
    arguments: tuple[Any, ...]
    """The shapes and shardings of its arguments."""
    on_host: int = 0
    """The bytes of the arguments of a device that lie in host memory."""


def compile_program(setting: Whole) -> tuple[jax.stages.Compiled, Memory, float]:
    """Compile the program; return it with its memory and the seconds that took."""
    cluster = cluster_of(setting)
    build = generation_program if setting.program in GENERATION_PROGRAMS else training_program
    begin = time.perf_counter()
    lowered = build(setting, cluster)
    compiled = lowered.program.lower(*lowered.arguments).compile()
    seconds = time.perf_counter() - begin
    return compiled, memory_of(compiled, setting, lowered.on_host), seconds


def whole_config(setting: Whole) -> ModelConfig:
    """Return the sizes of a setting's model."""
    assert setting.model is not None
    config = dataclasses.replace(
        model_config(PUBLISHED[setting.model]),
        dtype="bfloat16",
        activation_memory=setting.activation_memory,
    )
    return config if setting.layers is None else dataclasses.replace(config, layers=setting.layers)


def topology_of(setting: Whole, config: ModelConfig) -> Topology:
    """Return the expert-parallel group of a setting."""
    return Topology(
        num_nodes=setting.nodes,
        ranks_per_node=setting.ranks,
        num_experts=config.num_experts,
        replica_slots=0 if setting.live else setting.replica_slots,
        resident_slots=0 if setting.live else setting.resident_slots,
    )


def cluster_of(setting: Whole) -> Cluster:
    """Return the model of a setting on its described GPUs."""
    config = whole_config(setting)
    topology = topology_of(setting, config)
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
    return Cluster(config, parallel, make)


def training_program(setting: Whole, cluster: Cluster) -> Lowered:
    """Return an update, or a recompute."""
    config, parallel, make = cluster
    mesh = parallel.mesh
    tx = make_optimizer(1e-5, 1e-5, 0, critic_rate=None, moments=setting.moments)

    def build() -> tuple[Agent, nnx.Optimizer]:
        agent = make_agent(make(nnx.Rngs(0)), mesh, critic=False)
        return agent, nnx.Optimizer(agent, tx, wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(build))
    state = with_shardings(shapes, mesh)
    arguments = (state, *batch_shapes(config, parallel, setting))
    on_host = bytes_on_host(setting, *arguments[:3])

    def recompute_of(state: Any, batch: PreparedBatch, samples: TrainingBatch, _: Any) -> Any:
        state, batch, samples = _in_memory(setting, state, batch, samples)
        agent, _ = nnx.merge(graph, state)
        return recompute(on_device(agent, mesh), batch, samples, temperature=1.0, record=setting.live)

    def update_of(state: Any, batch: PreparedBatch, samples: TrainingBatch, load: jax.Array) -> Any:
        state, batch, samples = _in_memory(setting, state, batch, samples)
        agent, optimizer = nnx.merge(graph, state)
        metrics = update(agent, optimizer, batch, samples, load, clip=Clip(), balance=0.01)
        return nnx.state((agent, optimizer)), metrics

    if setting.program == "recompute":
        program = jax.jit(recompute_of, compiler_options=COMPILER_OPTIONS)
        return Lowered(program, arguments, on_host)
    # Results in host memory keep the shardings that they are computed with.
    outputs = None
    if setting.state_memory != HOST:
        outputs = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    program = jax.jit(update_of, donate_argnums=0, out_shardings=outputs, compiler_options=COMPILER_OPTIONS)
    return Lowered(program, arguments, on_host)


def generation_program(setting: Whole, cluster: Cluster) -> Lowered:
    """Return the prompt pass of a wave, or its decoding steps."""
    parallel = cluster.parallel.live
    graph, shapes = nnx.split(nnx.eval_shape(lambda: cluster.make(nnx.Rngs(0))))
    weights = with_shardings(shapes, parallel.mesh)
    prompts = prompt_shapes(parallel, samples=setting.samples, prompt_tokens=setting.prompt_tokens)

    def prefill_of(weights: Any, prompts: PaddedPrompts) -> Any:
        return run_prompts(
            *(nnx.merge(graph, weights), prompts, parallel),
            responses=setting.responses,
            new_tokens=setting.response_tokens,
        )

    def decode_of(weights: Any, state: DecodingState, lengths: jax.Array, until: jax.Array) -> Any:
        return decode_wave(nnx.merge(graph, weights), state, lengths, until, parallel)

    if setting.program == "prefill":
        return Lowered(jax.jit(prefill_of, compiler_options=COMPILER_OPTIONS), (weights, prompts))
    state = state_shapes(jax.eval_shape(prefill_of, weights, prompts)[1], parallel)
    until = jax.ShapeDtypeStruct((), jnp.int32, sharding=prompts.lengths.sharding)
    program = jax.jit(decode_of, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    return Lowered(program, (weights, state, prompts.lengths, until))


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
    of the device; `bytes_on_host` is what has to be taken off.
    """
    if setting.state_memory == HOST:
        state = jax.tree.map_with_path(
            lambda path, leaf: to_host(leaf) if _is_trained(path, leaf) else leaf, state
        )
    if setting.batch_memory == HOST:
        plan = None if setting.live else batch.batch_plan
        batch = PreparedBatch(plan, batch.parallel, to_host(batch.layers()))
        samples = to_host(samples)
    return state, batch, samples


def bytes_on_host(setting: Whole, state: Any, batch: PreparedBatch, samples: TrainingBatch) -> int:
    """Return the bytes of a program's arguments in host memory, for a device."""
    leaves = [leaf for path, leaf in jax.tree.leaves_with_path(state) if _is_trained(path, leaf)]
    leaves = leaves if setting.state_memory == HOST else []
    if setting.batch_memory == HOST:
        leaves += jax.tree.leaves((batch.layers(), samples))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _is_trained(path: Any, leaf: Any) -> bool:
    """Return whether a variable is a parameter or a moment, which `relibra_jax.nnx.host_state.put_on_host` moves."""
    return bool(leaf.ndim) and "home" not in jax.tree_util.keystr(path)


def memory_of(compiled: jax.stages.Compiled, setting: Whole, on_host: int) -> Memory:
    """Return the memory of a device for a compiled program, ``on_host`` bytes of whose arguments are the host's."""
    memory = compiled.memory_analysis()
    assert memory is not None
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    beside = 0 if setting.program == "update" or setting.state_memory == HOST else moments_of(setting)
    sizes = (memory.argument_size_in_bytes - on_host, memory.temp_size_in_bytes, kept, beside)
    return Memory(*(size / 1e9 for size in sizes))


def sizes_of(setting: Whole) -> RunSizes:
    """Return the sizes of the run whose program a setting compiles, for `experiments.model_memory`."""
    assert setting.model is not None
    config = whole_config(setting)
    return RunSizes(
        config=config,
        topology=topology_of(setting, config),
        fsdp=setting.fsdp,
        shard_dense=setting.shard_dense,
        moments=setting.moments,
        micro_batches=setting.micro_batches,
        sequences=1,
        length=setting.tokens,
        rows=int(UNEVEN * setting.tokens * config.top_k),
        samples=setting.samples,
        columns=setting.prompt_tokens + setting.response_tokens,
        prompt_tokens=setting.prompt_tokens,
        responses=setting.responses,
        live=setting.live,
        state_memory=setting.state_memory,
        batch_memory=setting.batch_memory,
    )


def moments_of(setting: Whole) -> int:
    """Return the bytes of AdamW's moments on a device."""
    return memory_by_stage(sizes_of(setting))["backward"]["moments"]


def bytes_of(program: Program, setting: Whole) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Count what a device sends in an update or a recompute, and what the cost model prices, in GB.

    Returns:
        The bytes sent by content, kind of collective and network; the bytes priced by content and network; and the
        contents whose bytes sent are not near those priced.
    """
    config, parallel, _ = cluster_of(setting)
    by_kind = count_by_kind(program.transfers(), parallel.mesh.shape)
    sent: Counter = Counter()
    for (content, _, axes), size in by_kind.items():
        sent[content, axes] += size
    sizes = {"tokens": setting.tokens, "micro_batches": setting.micro_batches}
    updates = int(setting.program == "update")
    # Only plans have a price.
    compared = [] if setting.live else compare_bytes(dict(sent), config, parallel, **sizes, updates=updates)
    return (
        {" ".join(key): round(size / 1e9, 3) for key, size in sorted(by_kind.items())},
        {f"{each.content} {each.axes}": round(each.priced / 1e9, 3) for each in compared},
        [f"{each.content} ({each.axes})" for each in compared if not each.good],
    )


def compile_and_measure(setting: Whole) -> bool:
    """Compile, print one line, and add it to the record.

    Returns:
        Whether the program fits a device during a run, and sends about what the cost model prices.
    """
    compiled, memory, seconds = compile_program(setting)
    program, _ = read_compiled(compiled)
    collectives = Counter(transfer.kind for transfer in program.transfers())
    left_out = {"record", *(TRAINING if setting.program in GENERATION_PROGRAMS else GENERATION)}
    result = {
        **{name: value for name, value in dataclasses.asdict(setting).items() if name not in left_out},
        **{f"{name}_gb": round(value, 1) for name, value in memory._asdict().items()},
        "peak_gb": round(memory.peak, 1),
        "run_gb": round(memory.run, 1),
        "compile_seconds": round(seconds),
        "collectives": dict(collectives),
    }
    outside: list[str] = []
    if setting.program not in GENERATION_PROGRAMS:
        result["sent_gb"], result["priced_gb"], outside = bytes_of(program, setting)
    line = json.dumps(result)
    print(line, flush=True)
    if setting.record is not None:
        with setting.record.open("a") as file:
            file.write(line + "\n")
    if outside:
        print(f"sends other bytes than the cost model prices: {', '.join(outside)}", flush=True)
    return memory.run <= MOST_GB and not outside


def main(setting: Whole) -> int:
    """Compile one program or all; return 1 if one of them does not fit, or sends other bytes than are priced."""
    settings = [setting]
    if setting.model is None:
        settings = [dataclasses.replace(each, record=setting.record) for each in PROGRAMS]
    good = [compile_and_measure(each) for each in settings]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Whole, prog="python -m experiments.aot.whole")))
