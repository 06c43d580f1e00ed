"""The measurements and checks of compiled stacks of layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, NamedTuple

from experiments.aot.bytes import Sent, count_sent, group_axes, sent_bytes, transfer_content
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, judge_bytes, print_findings, read_compiled
from experiments.aot.hlo import RowPasses, Transfer
from experiments.aot.stack import compile_step
from experiments.aot.ways import EXPERT, MODEL, TOPOLOGY, Way, capacities_of, parallel_of
from relibra_jax.execution.exchange import UPDATES

type Phase = Literal["fetch", "refetch", "return"]

DEPTHS: Final = (2, 8)
BUFFER: Final = TOPOLOGY.replica_slots * EXPERT * 2
"""The bytes of a replica buffer, which has the replicas of one rank and layer in bfloat16."""
STACKS: Final[tuple[tuple[Way, bool], ...]] = (
    ("auto", False),
    ("auto", True),
    ("padded", True),
    ("ragged", True),
)
"""The compiled stacks: exchange settings and whether they are scanned. Only the default is unrolled too."""
EXCHANGES: Final[Mapping[Way, int]] = {"auto": 2, "padded": 2, "ragged": 1}
"""The number of collectives of one replica fetch; the padded fetch exchanges pieces twice."""
MOST_PASSES: Final[Mapping[Way, RowPasses]] = {
    "auto": RowPasses(27, 14.5, 0),
    "padded": RowPasses(16, 10, 0),
    "ragged": RowPasses(15, 6, 0),
}
"""The most rows that a layer moves in its three passes, in multiples of the rows that experts compute. Where lanes are
fitted, a row is read from its lane and from the rows that a rank keeps, and one of both is dropped."""
GATES_ALONE: Final[Mapping[Way, float]] = {"auto": 3, "padded": 3, "ragged": 5}
"""The most exchanges of gates in a layer beside which no rows are gathered and no products run: those that deal tokens
inside nodes, in three passes, and those that follow their rows through a ragged exchange, in two."""
MOST_BUFFERS: Final = 3.5
"""The largest number of replica buffers: weights, the next layer's prefetch, and gradients; and gaps between buffers of
other sizes, which differ between programs with and without replicas."""
MOST_GROWTH: Final = 0.1
"""The largest growth in buffers per additional layer; a layer that kept its buffer would add 1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program to compile."""

    way: Way
    scanned: bool
    layers: int
    replica_slots: int = TOPOLOGY.replica_slots

    @property
    def stack(self) -> str:
        """The name of the stack of which it is a variant."""
        return stack_name(self.way, self.scanned)


class Move(NamedTuple):
    """A collective that sends expert weights or their gradients."""

    phase: Phase
    times: float
    asynchronous: bool
    attention: int
    """The number of matrix products of attention, forward or backward, between its start and its done."""
    backward: int
    """The number of matrix products of the backward pass, without the recomputation."""
    sent: int
    """The bytes that a device sends in one execution."""

    @property
    def overlapped(self) -> int:
        """The number of matrix products that overlap with it; 0 if it is not asynchronous."""
        products = self.backward if self.phase == "return" else self.attention
        return products if self.asynchronous else 0


class Measured(NamedTuple):
    """The measurements of a program; small enough to send between processes."""

    temporary: int
    """The temporary memory in bytes."""
    moves: list[Move]
    gathered: int
    """The number of elements of the largest all-gather."""
    sent: Sent
    """The counted bytes that a device sends."""
    expected: Sent
    """The bytes that a device should send."""
    passes: RowPasses
    """The rows that a layer moves, in multiples of the rows of its experts."""
    gates_alone: float
    """The exchanges of gates in a layer beside which no rows are gathered and no products run."""
    updates: int | None
    """The least number of updates of a ragged exchange for each pair of ranks; None without such exchanges."""
    kernels: tuple[float, float]
    """The number of kernels of a layer's experts in the forward pass, and after it."""


def stack_name(way: Way, scanned: bool) -> str:
    """Return the name of a stack."""
    return f"{way}, {'scanned' if scanned else 'unrolled'}"


def stack_cases(way: Way, scanned: bool) -> list[Case]:
    """Return the programs of a stack: shallow and deep, with and without replica slots."""
    return [
        Case(way=way, scanned=scanned, layers=layers, replica_slots=slots)
        for layers in DEPTHS
        for slots in (0, TOPOLOGY.replica_slots)
    ]


def check_stack(way: Way, scanned: bool) -> None:
    """Compile and check the programs of a stack."""
    print_findings(judge(way, scanned, {case: measure(case) for case in stack_cases(way, scanned)}))


def measure(case: Case) -> Measured:
    """Compile one program and measure it."""
    parallel = parallel_of(case.way, replica_slots=case.replica_slots)
    compiled = compile_step(MODEL, parallel, layers=case.layers, scanned=case.scanned)
    program, temporary = read_compiled(compiled)
    transfers = list(program.transfers())
    moves, gathered, gates_alone = [], 0, 0.0
    for transfer in transfers:
        if transfer_content(transfer) == "replicas":
            products = [one for one in transfer.between if program.is_gemm(one)]
            attention = sum("attention" in one.op_name for one in products)
            backward = sum("transpose(" in one.op_name and "rematted" not in one.op_name for one in products)
            _, ranks = group_axes(transfer.start, parallel.mesh.shape)
            moves.append(
                Move(
                    phase_of(transfer),
                    transfer.times,
                    transfer.asynchronous,
                    attention,
                    backward,
                    round(sent_bytes(transfer, ranks)),
                )
            )
        if transfer_content(transfer) == "gates":
            beside = any(
                program.is_kernel(one) or program.is_gemm(one) or program.gathers(one, MODEL.width)
                for one in transfer.between
            )
            gates_alone += 0 if beside else transfer.times / case.layers
        if transfer.kind == "all-gather":
            gathered = max(gathered, *(prod(shape) for _, shape in transfer.start.arrays))
    sent = count_sent(transfers, parallel.mesh.shape)
    assert parallel.capacities is not None
    rows = case.layers * parallel.capacities.rows
    passes = RowPasses(*(moved / rows for moved in program.row_passes(MODEL.width)))
    updates = [
        prod(transfer.operands[2][1]) // parallel.topology.ranks_per_node
        for transfer in transfers
        if transfer.kind == "ragged-all-to-all"
    ]
    expected = expected_sent(MODEL, parallel, layers=case.layers)
    fewest = min(updates, default=None)
    forward, after = (
        sum(times for op_name, times in program.kernels() if ("transpose(" in op_name) is backward)
        / case.layers
        for backward in (False, True)
    )
    return Measured(temporary, moves, gathered, sent, expected, passes, gates_alone, fewest, (forward, after))


def judge(way: Way, scanned: bool, measured: Mapping[Case, Measured]) -> Iterator[Finding]:
    """Check the programs of a stack.

    Args:
        way: the exchange settings of the stack.
        scanned: whether the stack is scanned.
        measured: the measurements of the stack's cases.
    """
    deepest = Case(way=way, scanned=scanned, layers=DEPTHS[-1])
    yield from _judge_moves(deepest, measured[deepest])
    yield judge_bytes(deepest.stack, measured[deepest].sent, measured[deepest].expected)
    yield from _judge_exchange(deepest, measured[deepest])
    yield _judge_kernels(deepest, measured[deepest].kernels)
    yield from _judge_memory(deepest, measured)


def _judge_kernels(case: Case, kernels: tuple[float, float]) -> Finding:
    """Check that the repeated forward pass of a checkpointed layer runs no experts, whose results nothing reads."""
    return Finding(
        case.stack,
        "experts of a layer: two kernels forward and three backward, none in the repeated forward pass",
        " + ".join(f"{count:g}" for count in kernels),
        kernels == (2, 3),
    )


def _judge_exchange(case: Case, measured: Measured) -> Iterator[Finding]:
    most, passes = MOST_PASSES[case.way], measured.passes
    yield Finding(
        case.stack,
        f"a layer gathers at most {most.read:g} times the rows of experts, writes {most.written:g} and copies"
        f" {most.copied:g}",
        ", ".join(f"{moved:.2f}" for moved in passes),
        all(moved <= limit for moved, limit in zip(passes, most, strict=True)),
    )
    yield Finding(
        case.stack,
        f"at most {GATES_ALONE[case.way]} exchanges of gates in a layer run beside no gather of rows or product",
        f"{measured.gates_alone:g}",
        measured.gates_alone <= GATES_ALONE[case.way],
    )
    if measured.updates is not None:
        yield Finding(
            case.stack,
            f"ragged exchanges have at least {UPDATES} updates for each pair of ranks",
            f"{measured.updates}",
            measured.updates >= UPDATES,
        )


def _judge_moves(case: Case, measured: Measured) -> Iterator[Finding]:
    by_phase = {
        phase: [move for move in measured.moves if move.phase == phase]
        for phase in ("fetch", "refetch", "return")
    }
    times = [sum(move.times for move in moves) / case.layers for moves in by_phase.values()]
    exchanges = EXCHANGES[case.way]
    yield Finding(
        case.stack,
        "one replica fetch, refetch and gradient return per layer"
        + ("" if exchanges == 1 else f", in {exchanges} exchanges each"),
        " + ".join(f"{count:g}" for count in times),
        times == [exchanges] * 3,
    )
    yield Finding(
        case.stack,
        "no all-gather of home weights: none as large as an expert",
        f"{measured.gathered / EXPERT:.3f} experts",
        measured.gathered < EXPERT,
    )
    for phase, name in (
        ("fetch", "attention"),
        ("refetch", "attention"),
        ("return", "the backward pass"),
    ):
        overlapped = [move.overlapped for move in by_phase[phase]]
        hidden = sum(move.times for move in by_phase[phase] if move.overlapped) / case.layers
        yield Finding(
            case.stack,
            f"every {phase} overlaps with matrix products of {name}"
            + ("" if exchanges == 1 else ", in at least one of its exchanges"),
            f"{hidden:g} of {exchanges} exchanges,"
            f" {min(overlapped, default=0)} to {max(overlapped, default=0)} products",
            hidden >= 1,
        )
    yield _judge_fetch(case, by_phase["fetch"])


def _judge_fetch(case: Case, moves: list[Move]) -> Finding:
    experts, exposed = (
        sum(move.times * move.sent for move in moves if not (move.overlapped and only_exposed))
        / (case.layers * 2 * EXPERT)
        for only_exposed in (False, True)
    )
    slots = case.replica_slots
    exports = capacities_of(replace(TOPOLOGY, replica_slots=slots), case.layers).exports
    return Finding(
        case.stack,
        f"a rank sends at most its {exports} exports and R = {slots} experts per fetch, however hot one is",
        f"{experts:.2f} experts, {exposed:.2f} of them without overlap",
        experts <= exports + slots,
    )


def _judge_memory(case: Case, measured: Mapping[Case, Measured]) -> Iterator[Finding]:
    extra = []
    for layers in DEPTHS:
        with_replicas, without = (
            measured[replace(case, layers=layers, replica_slots=slots)].temporary
            for slots in (case.replica_slots, 0)
        )
        extra.append((with_replicas - without) / BUFFER)
    yield Finding(
        case.stack,
        f"temporary memory of replicas: at most {MOST_BUFFERS} buffers of {BUFFER / 1e6:.1f} MB",
        ", ".join(f"{count:.2f} ({layers} layers)" for layers, count in zip(DEPTHS, extra, strict=True)),
        max(extra) <= MOST_BUFFERS,
    )
    growth = (extra[-1] - extra[0]) / (DEPTHS[-1] - DEPTHS[0])
    yield Finding(
        case.stack,
        f"its growth with depth: less than {MOST_GROWTH} buffers per layer",
        f"{growth:.2f}",
        growth < MOST_GROWTH,
    )


def phase_of(transfer: Transfer) -> Phase:
    """Return the phase of a transfer, from the JAX transformations in its name.

    In a backward pass, `jax.checkpoint` names what it repeats ``rematted_computation``; what
    `relibra_jax.models.layer_scan.scan_layers` repeats is a forward pass of its own, ``jvp()``.
    """
    _, backward, inside = transfer.op_name.partition("transpose(")
    if not backward:
        return "fetch"
    return "refetch" if "rematted_computation" in inside or "/jvp(" in inside else "return"
