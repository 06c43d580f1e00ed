"""What the compiled programs are measured by, and what is promised of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.h100 import h100_mesh
from experiments.aot.hlo import Program, Transfer
from experiments.aot.stack import Model, compile_step
from relibra_jax.capacity import Capacities, ExchangeSizes
from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.migration import migration_step, move_tables
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.types import Topology

type Way = Literal["ragged", "padded"]
type Phase = Literal["fetch", "refetch", "return"]

MODEL: Final = Model()
TOPOLOGY: Final = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
DEPTHS: Final = (2, 8)
EXPERT: Final = 3 * MODEL.width * MODEL.expert_width
"""Elements of one expert's weights."""
BUFFER: Final = TOPOLOGY.replica_slots * EXPERT * 2
"""Bytes of a replica buffer: the replicas of one rank and layer in bfloat16."""
MOST_BUFFERS: Final = 3
"""Weights, the next layer's prefetch, gradients."""
MOST_GROWTH: Final[Mapping[Way, float]] = {"ragged": 0.1, "padded": 0.25}
"""Buffers a further layer; a layer that kept one would add 1. How the padded way's buffers come to lie moves their sum
by up to one: unrolled, 2, 3, 4, 8 and 12 layers take 5.9, 6.4, 5.5, 6.9 and 5.9."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program."""

    way: Way
    scanned: bool
    layers: int
    replica_slots: int = TOPOLOGY.replica_slots

    @property
    def stack(self) -> str:
        """The stack that it is a variant of."""
        return f"{self.way}, {'scanned' if self.scanned else 'unrolled'}"


class Move(NamedTuple):
    """A collective that carries expert weights or their gradients."""

    phase: Phase
    times: float
    asynchronous: bool
    attention: int
    """Matrix products of attention, forward or backward, between its start and its done."""
    backward: int
    """Matrix products of the backward pass proper, recomputation not counted."""


class Measured(NamedTuple):
    """What the checks need to know about a program; small enough to send between processes."""

    temporary: int
    """Bytes."""
    moves: list[Move]
    gathered: int
    """Elements of the largest all-gather that is not a gradient's return."""


class Finding(NamedTuple):
    """A line of the table; ``good`` is None for figures that are stated without a promise."""

    stack: str
    promise: str
    found: str
    good: bool | None


CASES: Final = [
    Case(way=way, scanned=scanned, layers=layers, replica_slots=slots)
    for way in ("ragged", "padded")
    for scanned in (True, False)
    for layers in DEPTHS
    for slots in (0, TOPOLOGY.replica_slots)
]


def measure(case: Case) -> Measured:
    """Compile one program and read it."""
    topology = replace(TOPOLOGY, replica_slots=case.replica_slots)
    even = MODEL.tokens * MODEL.top_k
    rows = even * 33 // 32
    sizes = ExchangeSizes(pair=even // topology.num_ranks * 5 // 4, send=even, receive=rows)
    parallel = ExpertParallel(
        mesh=h100_mesh(topology),
        topology=topology,
        # As many exports as replicas on every rank: a rank that exports more holds that much more.
        capacities=Capacities(rows=rows, flat=sizes, node=None, local=sizes, exports=topology.replica_slots),
        exchange=case.way,
        fetch="ragged" if case.way == "ragged" else "reduce_scatter",
    )
    compiled = compile_step(MODEL, parallel, layers=case.layers, scanned=case.scanned)
    program, temporary = _read(compiled)
    moves, gathered = [], 0
    for transfer in program.transfers():
        phase = _phase(transfer)
        if _carries_experts(transfer):
            products = [one for one in transfer.between if program.is_gemm(one)]
            attention = sum("attention" in one.op_name for one in products)
            backward = sum("transpose(" in one.op_name and "rematted" not in one.op_name for one in products)
            moves.append(Move(phase, transfer.times, transfer.asynchronous, attention, backward))
        if transfer.kind == "all-gather" and not (_carries_experts(transfer) and phase == "return"):
            gathered = max(gathered, *(prod(shape) for _, shape in transfer.start.arrays))
    return Measured(temporary, moves, gathered)


def judge(measured: Mapping[Case, Measured]) -> Iterator[Finding]:
    """Hold the programs of all cases to what is promised."""
    for way in ("ragged", "padded"):
        for scanned in (True, False):
            deepest = Case(way=way, scanned=scanned, layers=DEPTHS[-1])
            yield from _judge_moves(deepest, measured[deepest])
            yield from _judge_memory(deepest, measured)


def _judge_moves(case: Case, found: Measured) -> Iterator[Finding]:
    by_phase = {
        phase: [move for move in found.moves if move.phase == phase]
        for phase in ("fetch", "refetch", "return")
    }
    times = [sum(move.times for move in moves) / case.layers for moves in by_phase.values()]
    yield Finding(
        case.stack,
        "one replica fetch, refetch and gradient return a layer",
        " + ".join(f"{count:g}" for count in times),
        times == [1, 1, 1],
    )
    yield Finding(
        case.stack,
        "no all-gather of home weights: none as large as an expert",
        f"{found.gathered / EXPERT:.3f} experts",
        found.gathered < EXPERT,
    )
    for phase, name in (
        ("fetch", "attention's"),
        ("refetch", "attention's"),
        ("return", "the backward pass's"),
    ):
        moves = by_phase[phase]
        beside = [move.backward if phase == "return" else move.attention for move in moves]
        beside = [count if move.asynchronous else 0 for move, count in zip(moves, beside, strict=True)]
        least = min(beside, default=0)
        yield Finding(
            case.stack,
            f"every {phase} encloses matrix products, {name}",
            f"{least} to {max(beside, default=0)}",
            least > 0,
        )


def _judge_memory(case: Case, measured: Mapping[Case, Measured]) -> Iterator[Finding]:
    extra = []
    for layers in DEPTHS:
        here, without = (
            measured[replace(case, layers=layers, replica_slots=slots)].temporary
            for slots in (case.replica_slots, 0)
        )
        extra.append((here - without) / BUFFER)
    promised = case.way == "ragged"
    yield Finding(
        case.stack,
        f"temporary memory of replicas: at most {MOST_BUFFERS} buffers of {BUFFER / 1e6:.1f} MB",
        ", ".join(f"{count:.2f} ({layers} layers)" for layers, count in zip(DEPTHS, extra, strict=True)),
        max(extra) <= MOST_BUFFERS if promised else None,
    )
    most = MOST_GROWTH[case.way]
    growth = (extra[-1] - extra[0]) / (DEPTHS[-1] - DEPTHS[0])
    yield Finding(
        case.stack,
        f"which does not grow with depth: less than {most} buffers a layer",
        f"{growth:.2f}",
        growth < most,
    )


def measure_migration() -> Measured:
    """The program that moves experts of one layer of a stacked leaf, as many as can move."""
    sharding = NamedSharding(h100_mesh(TOPOLOGY), PartitionSpec(None, *RANKS))
    ranks = (TOPOLOGY.num_nodes, TOPOLOGY.ranks_per_node, TOPOLOGY.home_slots)
    shape = (DEPTHS[-1], *ranks, 3, MODEL.width, MODEL.expert_width)
    leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    homes = np.arange(TOPOLOGY.num_experts)
    everywhere = move_tables(homes, np.roll(homes, TOPOLOGY.home_slots), TOPOLOGY)
    step: Any = migration_step(sharding, stacked=True)
    program, temporary = _read(step.lower(leaf, np.int32(0), everywhere).compile())
    gathered = (one.start.arrays for one in program.transfers() if one.kind == "all-gather")
    return Measured(
        temporary, [], max((prod(shape) for arrays in gathered for _, shape in arrays), default=0)
    )


def judge_migration(found: Measured) -> Iterator[Finding]:
    """Hold it to what is promised."""
    share = TOPOLOGY.home_slots * EXPERT * 2
    yield Finding("migration", "no all-gather", f"{found.gathered} elements", found.gathered == 0)
    yield Finding(
        "migration",
        "temporary memory, in a rank's share of one layer",
        f"{found.temporary / share:.2f}",
        None,
    )


def _read(compiled: jax.stages.Compiled) -> tuple[Program, int]:
    """The program and its temporary memory in bytes."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("this backend says neither what it compiled nor what memory that takes")
    return Program.parse(text), memory.temp_size_in_bytes


def _carries_experts(transfer: Transfer) -> bool:
    matrices = (3, MODEL.width, MODEL.expert_width)
    return any(shape[-3:] == matrices for _, shape in transfer.start.arrays)


def _phase(transfer: Transfer) -> Phase:
    """By the transformations that its name went through."""
    if "transpose(" not in transfer.op_name:
        return "fetch"
    return "refetch" if "rematted_computation" in transfer.op_name else "return"
