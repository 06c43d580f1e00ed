"""Check the program that moves the experts of one layer of a stacked leaf, when all of them move."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import Finding, print_findings, read_compiled
from experiments.aot.h100 import h100_mesh
from experiments.aot.ways import EXPERT, MODEL, TOPOLOGY
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.migration import migration_step, move_tables

LAYERS = 8


class Migration(NamedTuple):
    """The measurements of the program."""

    temporary: int
    """The temporary memory in bytes."""
    gathered: int
    """The number of elements of its largest all-gather."""


def check_migration() -> None:
    """Compile and check the program."""
    print_findings(judge_migration(measure_migration()))


def measure_migration() -> Migration:
    """Compile the program and measure it."""
    sharding = NamedSharding(h100_mesh(TOPOLOGY), PartitionSpec(None, *RANKS))
    ranks = (TOPOLOGY.num_nodes, TOPOLOGY.ranks_per_node, TOPOLOGY.home_slots)
    shape = (LAYERS, *ranks, 3, MODEL.width, MODEL.expert_width)
    leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    homes = np.arange(TOPOLOGY.num_experts)
    tables = move_tables(homes, np.roll(homes, TOPOLOGY.home_slots), TOPOLOGY)
    step: Any = migration_step(sharding, stacked=True)
    program, temporary = read_compiled(step.lower(leaf, np.int32(0), tables).compile())
    gathered = (one.start.arrays for one in program.transfers() if one.kind == "all-gather")
    return Migration(temporary, max((prod(shape) for arrays in gathered for _, shape in arrays), default=0))


def judge_migration(measured: Migration) -> list[Finding]:
    """Check the measurements of the program."""
    share = TOPOLOGY.home_slots * EXPERT * 2
    memory = f"{measured.temporary / share:.2f}"
    return [
        Finding("migration", "no all-gather", f"{measured.gathered} elements", measured.gathered == 0),
        Finding("migration", "temporary memory, as a multiple of a rank's share of one layer", memory, None),
    ]
