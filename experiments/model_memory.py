"""``python -m experiments.model_memory``: compute the memory that reinforcement learning needs on each rank.

`experiments.step_memory` counts the bytes. Here are the table of what published models need, and the check of a run
before it starts.
"""

import dataclasses
import functools
import sys
from typing import Final

from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.program import run_program
from experiments.published import PUBLISHED
from experiments.step_memory import RunSizes, host_bytes, memory_by_stage, rank_gigabytes, rank_parameters
from relibra_jax.contract.types import Topology
from relibra_jax.execution.memory import HOST
from relibra_jax.models import ModelConfig
from relibra_jax.models.hf_config import model_config
from relibra_jax.models.load_checks import memory_of_a_device
from relibra_jax.support.limits import check_memory

LARGEST: Final = 3
"""The number of items and of settings that an error names."""
RANKS: Final = (8, 16, 32, 64, 128)


def num_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count the parameters of all routed experts, and all other parameters."""
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=config.num_experts, replica_slots=0)
    experts = config.moe_layers * config.num_experts * config.expert_size
    return experts, rank_parameters(RunSizes(config=config, topology=topology)).all - experts


def check_training_memory(name: str, sizes: RunSizes, mesh: Mesh) -> None:
    """Raise an error if a run needs more memory than a rank's device has, or the host of this process.

    Args:
        name: the name of the run's model, for the error message.
        sizes: the sizes of the run.
        mesh: the device mesh.

    Raises:
        ValueError: under the conditions of `check_host` and `check_device`.
    """
    check_host(name, sizes, ranks=len(mesh.local_devices))
    check_device(name, sizes, ranks=mesh.size, memory=memory_of_a_device(mesh))


def check_host(name: str, sizes: RunSizes, *, ranks: int) -> None:
    """Raise ValueError if this machine has too little memory for what ``ranks`` ranks of a run keep on the host."""
    check_memory(f"{name}: what {ranks} ranks keep in host memory", ranks * host_bytes(sizes))


def check_device(name: str, sizes: RunSizes, *, ranks: int, memory: int | float) -> None:
    """Raise an error if a run needs more memory than the device of a rank has.

    Args:
        name: the name of the run's model, for the error message.
        sizes: the sizes of the run.
        ranks: the number of ranks of the run.
        memory: the memory of a device, in bytes.

    Raises:
        ValueError: if it does. The message has the largest items, and the settings that would reduce it most.
    """
    available, required = memory / 1e9, rank_gigabytes(sizes)
    if required <= available:
        return
    stage, items = max(memory_by_stage(sizes).items(), key=lambda stage: sum(stage[1].values()))
    largest = sorted(items.items(), key=lambda item: -item[1])[:LARGEST]
    parts = ", ".join(f"{item} {size / 1e9:.1f}" for item, size in largest)
    smaller = {setting: rank_gigabytes(other) for setting, other in _smaller(sizes).items()}
    best = sorted(smaller.items(), key=lambda entry: entry[1])[:LARGEST]
    settings = ", ".join(f"{setting} ({size:.1f})" for setting, size in best if size < 0.99 * required)
    advice = f"; it would need less with {settings}" if settings else ""
    raise ValueError(
        f"{name}: the {stage} stage needs {required:.1f} GB on each of {ranks} ranks ({parts}), but a device has"
        f" {available:.1f} GB{advice}"
    )


def _smaller(sizes: RunSizes) -> dict[str, RunSizes]:
    """Return sizes that may need less memory, by the setting that a run would change. Each changes one setting."""
    replace = functools.partial(dataclasses.replace, sizes)
    others = {
        "moments=bfloat16": replace(moments="bfloat16"),
        "shard_dense=True": replace(shard_dense=True),
        "batch_memory=pinned_host": replace(batch_memory=HOST),
        "state_memory=pinned_host": replace(state_memory=HOST),
        "gather_once=False": replace(gather_once=False),
        "activation_memory=pinned_host": replace(
            config=dataclasses.replace(sizes.config, activation_memory=HOST)
        ),
    }
    ranks = sizes.topology.num_ranks
    if sizes.config.width % (2 * sizes.fsdp) == 0:
        name = f"fsdp={2 * sizes.fsdp} on {2 * sizes.fsdp * ranks} devices"
        others[name] = replace(fsdp=2 * sizes.fsdp)
    if sizes.reference_memory == "device":
        others["reference.memory=pinned_host"] = replace(reference_memory=HOST)
    if sizes.sequences > 1:
        parts = sizes.sequences
        others[f"micro_batches={parts * sizes.micro_batches}"] = replace(
            micro_batches=parts * sizes.micro_batches, sequences=1
        )
    if sizes.samples > 1:
        others["wave_samples at one sample a rank"] = replace(samples=1)
    if sizes.live and sizes.chunk_tokens > 1:
        half = sizes.chunk_tokens // 2
        others[f"chunk_tokens={half}"] = replace(chunk_tokens=half)
    if sizes.topology.resident_slots:
        others["resident_slots=0"] = replace(topology=dataclasses.replace(sizes.topology, resident_slots=0))
    return others


def published_sizes(config: ModelConfig, ranks: int, *, shard_dense: bool) -> RunSizes:
    """Return the sizes of a run without its tokens, on nodes of 8 ranks."""
    topology = Topology(
        num_nodes=ranks // 8, ranks_per_node=8, num_experts=config.num_experts, replica_slots=0
    )
    return RunSizes(config=config, topology=topology, shard_dense=shard_dense)


def table_row(config: ModelConfig, *, shard_dense: bool) -> list[str]:
    """Return the GB of a rank for each number of `RANKS`; empty where experts do not divide evenly over ranks."""
    return [
        f"{rank_gigabytes(published_sizes(config, ranks, shard_dense=shard_dense)):.0f}"
        if config.num_experts % ranks == 0
        else ""
        for ranks in RANKS
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Compute the memory that published models need on each rank."""


def main(options: ModelMemory) -> None:
    """Compute and print the table.

    Args:
        options: none so far. The command line refuses all others.
    """
    table = Table("model", "parameters", "all but experts", *map(str, RANKS), box=box.MARKDOWN)
    for name, fields in PUBLISHED.items():
        config = model_config(fields)
        experts, others = num_parameters(config)
        for shard_dense in (False, True):
            where = "sharded" if shard_dense else "on every rank"
            row = table_row(config, shard_dense=shard_dense)
            table.add_row(name, f"{(experts + others) / 1e9:.1f} B", f"{others / 1e9:.1f} B, {where}", *row)
    print("GB per rank, by the number of ranks")
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(run_program(main, ModelMemory))
