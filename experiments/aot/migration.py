"""The program that moves experts of one layer of a stacked leaf, as many as can move."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.findings import Finding, read_compiled
from experiments.aot.h100 import h100_mesh
from experiments.aot.ways import EXPERT, MODEL, TOPOLOGY
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.migration import migration_step, move_tables

LAYERS = 8


class Migration(NamedTuple):
    """What the checks need to know about the program."""

    temporary: int
    """Bytes."""
    gathered: int
    """Elements of its largest all-gather."""


def measure_migration() -> Migration:
    """Compile the program and read it."""
    sharding = NamedSharding(h100_mesh(TOPOLOGY), PartitionSpec(None, *RANKS))
    ranks = (TOPOLOGY.num_nodes, TOPOLOGY.ranks_per_node, TOPOLOGY.home_slots)
    shape = (LAYERS, *ranks, 3, MODEL.width, MODEL.expert_width)
    leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    homes = np.arange(TOPOLOGY.num_experts)
    everywhere = move_tables(homes, np.roll(homes, TOPOLOGY.home_slots), TOPOLOGY)
    step: Any = migration_step(sharding, stacked=True)
    program, temporary = read_compiled(step.lower(leaf, np.int32(0), everywhere).compile())
    gathered = (one.start.arrays for one in program.transfers() if one.kind == "all-gather")
    return Migration(temporary, max((prod(shape) for arrays in gathered for _, shape in arrays), default=0))


def judge_migration(found: Migration) -> list[Finding]:
    """Hold it to what is promised."""
    share = TOPOLOGY.home_slots * EXPERT * 2
    memory = f"{found.temporary / share:.2f}"
    return [
        Finding("migration", "no all-gather", f"{found.gathered} elements", found.gathered == 0),
        Finding("migration", "temporary memory, in a rank's share of one layer", memory, None),
    ]
