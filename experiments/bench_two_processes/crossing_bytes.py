"""The bytes between the two nodes in one update, determined in three ways.

- *sent*: the bytes that the loopback interface received during an update, including headers, acknowledgements and the
  traffic of other programs;
- *program*: the operands of the compiled collectives, times the number of their executions;
- *needed*: the rows and experts that cross under the plan, without the padding of lanes.

All three are sums over both directions. A node has one rank.
"""

import math
import re
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np

from experiments.aot.hlo import Program
from experiments.contenders import ContenderBatch
from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.routing.split import source_quota

FLOAT: Final = 4
"""The bytes of a number; all arrays are float32."""
CROSSINGS: Final = 4
"""The number of crossings of a row per layer: dispatch and combine, forward and backward. With rematerialisation, which
is not used here, it would be six."""
_ALONE: Final = re.compile(r"replica_groups=(\{\{0\},\{1\}\}|mesh\[[^\]]*\] \{'local'\})")
"""Replica groups of one rank each, which send nothing."""
_SENT: Final = {"all-to-all": 0.5, "all-gather": 0.5, "all-reduce": 1, "reduce-scatter": 1}
"""The fraction of a collective's result that each of two devices sends. For an all-reduce it sends half of the terms,
and then the half that it has summed."""
_SIZES: Final = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "f64": 8, "s64": 8}


class Needed(NamedTuple):
    """The bytes that cross in one update under a plan."""

    rows: int
    """The bytes of token copies (flat path) or tokens (hierarchical path)."""
    replicas: int
    """The bytes of replicas' weights to the other node and of their gradients back, over all micro-batches."""
    residents: int
    """The bytes of residents' weights to the other node and of their gradients back, once per update."""


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has received since the machine started.

    Raises:
        ValueError: if ``/proc/net/dev`` has no line for the loopback interface.
    """
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise ValueError("/proc/net/dev has no line for the loopback interface lo")


def program_bytes(program: jax.stages.Compiled) -> int:
    """Count the bytes that the collectives of a compiled program send between two devices."""
    total = 0.0
    for transfer in Program.parse(program.as_text() or "").transfers():
        if _ALONE.search(transfer.start.attributes):
            continue
        result = sum(math.prod(sizes) * _SIZES[dtype] for dtype, sizes in transfer.start.arrays)
        total += transfer.times * 2 * _SENT[transfer.kind] * result
    return round(total)


def needed_bytes(
    contender: ContenderBatch, topology: Topology, *, hierarchical: bool, width: int, hidden: int
) -> Needed:
    """Count the bytes that cross in one update under a plan.

    Args:
        contender: the batch with its plan.
        topology: the topology of the plan, with one rank per node.
        hierarchical: whether a token crosses once instead of once per copy.
        width: the model width D.
        hidden: the expert width F.
    """
    if hierarchical:
        crossing = np.asarray(contender.visits)
    else:
        pairs = jax.vmap(jax.vmap(lambda plan: source_quota(plan, topology).sum(-1)))
        crossing = np.asarray(pairs(contender.batch_plan.layer_plans()))
    crossing = crossing.reshape(-1, topology.num_ranks, topology.num_ranks)
    rows = int(crossing.sum() - crossing.trace(axis1=1, axis2=2).sum())
    plan, round_trip = contender.batch_plan.plan, 2 * 3 * width * hidden * FLOAT
    replicas = int((np.asarray(plan.slot_expert)[..., topology.held_slots :] != EMPTY).sum())
    residents = int((np.asarray(resident_experts(plan, topology)) != EMPTY).sum())
    return Needed(rows * CROSSINGS * width * FLOAT, replicas * round_trip, residents * round_trip)
