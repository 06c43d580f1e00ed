"""Bytes between the two nodes in one update, found in three ways.

- *sent*: what the loopback interface received while an update ran, headers and acknowledgements included, and whatever
  else used it meanwhile;
- *program*: the operands of the compiled collectives, as often as they run;
- *needed*: the rows and experts that the plan makes cross, without what pads lanes to the longest.

All three are of both directions together. One rank is one node here.
"""

import math
import re
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np

from experiments.aot.hlo import Program
from experiments.contenders import ContenderBatch
from relibra_jax.plan import resident_experts
from relibra_jax.token_split import source_quota
from relibra_jax.types import EMPTY, Topology

FLOAT: Final = 4
"""Bytes of a number: everything is float32."""
CROSSINGS: Final = 4
"""How often a row crosses: dispatch and combine, forward and backward. There is no rematerialisation, with which it is
six times."""
_ALONE: Final = re.compile(r"replica_groups=(\{\{0\},\{1\}\}|mesh\[[^\]]*\] \{'local'\})")
"""Groups of one rank each: nothing leaves them."""
_SENT: Final = {"all-to-all": 0.5, "all-gather": 0.5, "all-reduce": 1, "reduce-scatter": 1}
"""The part of a collective's result that each of two devices sends. Of a sum it sends half of the terms, and then the
half that it has summed."""
_SIZES: Final = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "f64": 8, "s64": 8}


class Needed(NamedTuple):
    """Bytes that the plan makes cross in one update."""

    rows: int
    """Token copies (flat path) or tokens (hierarchical path)."""
    replicas: int
    """Weights of replicas to the other node and their gradients back, in every micro-batch."""
    residents: int
    """Weights of residents to the other node and their gradients back, once."""


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise ValueError("/proc/net/dev has no line of the loopback interface")


def program_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that the collectives of a compiled program send between two devices."""
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
    """Bytes that the plan makes cross.

    Args:
        contender: the batch as the contender runs it.
        topology: the contender's topology, of one rank a node.
        hierarchical: whether a token crosses once, and not every copy of it.
        width: D.
        hidden: F.
    """
    if hierarchical:
        crossing = np.asarray(contender.visits)
    else:
        pairs = jax.vmap(jax.vmap(lambda plan: source_quota(plan, topology).sum(-1)))
        crossing = np.asarray(pairs(contender.batch_plan.layer_plans()))
    crossing = crossing.reshape(-1, topology.num_ranks, topology.num_ranks)
    rows = int(crossing.sum() - crossing.trace(axis1=1, axis2=2).sum())
    plan, there_and_back = contender.batch_plan.plan, 2 * 3 * width * hidden * FLOAT
    replicas = int((np.asarray(plan.slot_expert)[..., topology.held_slots :] != EMPTY).sum())
    residents = int((np.asarray(resident_experts(plan, topology)) != EMPTY).sum())
    return Needed(rows * CROSSINGS * width * FLOAT, replicas * there_and_back, residents * there_and_back)
