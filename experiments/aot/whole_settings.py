"""The settings of `experiments.aot.whole`, and what follows from them: the model, its cluster, the sizes of a run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from flax import nnx

from experiments.aot.gpus import GPUS, described_devices
from experiments.aot.stack import FAST_COMPILATION
from experiments.published import PUBLISHED
from experiments.rl.devices import FSDP, copies_of_group
from experiments.step_memory import RunSizes, memory_by_stage
from relibra_jax.contract.types import Topology
from relibra_jax.cost.hop_rows import visit_share
from relibra_jax.execution import OVERLAP_OPTIONS, ExpertParallel
from relibra_jax.execution.memory import HOST
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.models import LanguageModel, ModelConfig
from relibra_jax.models.hf_config import model_config
from relibra_jax.models.language_model import model_maker
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes

UNEVEN: Final = 1.1
"""The rows of the busiest rank over the mean, as buffers have room for."""
GENERATION_PROGRAMS: Final[tuple[Literal["prefill", "decode"], ...]] = ("prefill", "decode")
COMPILER_OPTIONS: Final = {**OVERLAP_OPTIONS, **FAST_COMPILATION}
VISITED: Final = 0.95
"""The share of a rank's tokens that visit a node, for the busiest pair of several nodes."""


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
    gather_once: bool = False
    """Whether experts are gathered over ``fsdp`` once, and not in every micro-batch."""
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
        gather_once=setting.gather_once,
        implementation="mosaic",
        attention_implementation="triton",
    )
    if not setting.live:
        parallel = parallel.with_striping(config.top_k)
    fsdp_axis = FSDP if FSDP in copies else None
    make = model_maker(config, topology, mesh, fsdp_axis=fsdp_axis, shard_dense=setting.shard_dense)
    return Cluster(config, parallel, make)


def capacities_of(config: ModelConfig, topology: Topology, tokens: int) -> Capacities:
    """Return the buffer sizes of a rank with ``tokens`` tokens, for a plan that is balanced within `UNEVEN`."""
    copies = tokens * config.top_k
    rows = int(copies * UNEVEN)
    nodes, local = topology.visited.num_nodes, topology.ranks_per_node
    visits = int(tokens * VISITED)
    if topology.num_nodes == 1:
        visits = int(1.25 * UNEVEN * tokens * visit_share(topology, config.top_k, of_ranks=True))
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


def sizes_of(setting: Whole) -> RunSizes:
    """Return the sizes of the run whose program a setting compiles, for `experiments.step_memory`."""
    assert setting.model is not None
    config = whole_config(setting)
    return RunSizes(
        config=config,
        topology=topology_of(setting, config),
        fsdp=setting.fsdp,
        gather_once=setting.gather_once,
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
