"""The measurements and checks of compiled updates: one push of residents per update, layers that only read tables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from experiments.aot.bytes import Sent, count_sent, transfer_content
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, judge_bytes, print_findings, read_compiled
from experiments.aot.hlo import Program
from experiments.aot.update import compile_updates
from experiments.aot.ways import EXPERT, MODEL, TOPOLOGY, Way, capacities_of, parallel_of

LAYERS: Final = 4
MICRO_BATCHES: Final = 3
RESIDENT_SLOTS: Final = 2
CHUNK_BYTES: Final = 40_000_000
"""The size of a chunk in bytes, small enough that a push needs two chunks."""
RESIDENTS: Final = LAYERS * RESIDENT_SLOTS * EXPERT
"""The number of elements of a rank's residents."""
ALLOWED_BYTES: Final = 2 + 4 + 2
"""The bytes per element: bfloat16 weight, float32 accumulator, and the bfloat16 gradient of one micro-batch."""
MOST_EXTRA: Final = ALLOWED_BYTES * RESIDENTS
"""The largest temporary memory of residents in bytes."""
EXCHANGES: Final = 3
"""The number of collectives of a push or of a return: inside the home's node, between nodes, inside the other node."""


class Batch(NamedTuple):
    """One program to compile: a batch of updates."""

    way: Way
    updates: int
    resident_slots: int = RESIDENT_SLOTS

    @property
    def name(self) -> str:
        """The name of the program in the table."""
        return f"{self.updates} update{'' if self.updates == 1 else 's'}, {self.way}"

    @property
    def layer_runs(self) -> int:
        """The number of layer executions in one run of the program."""
        return self.updates * MICRO_BATCHES * LAYERS


BATCHES: Final = [
    Batch("hierarchical padded", 1, resident_slots=0),
    Batch("hierarchical padded", 1),
    Batch("auto", 2),
    Batch("auto", 3),
]


class InLayers(NamedTuple):
    """The instructions inside the loops over layers, forward and backward."""

    loops: int
    """The number of loops over layers."""
    pushes: int
    """The number of collectives that push residents or return their gradients."""
    preparations: int
    """The number of sorts and of instructions that prepare layers."""
    inner: dict[float, int]
    """The number of loops inside a layer, by their number of iterations."""


class MeasuredBatch(NamedTuple):
    """The measurements of a program."""

    temporary: int
    """The temporary memory in bytes."""
    pushes: dict[str, float]
    """The number of executed collectives of pushes and of returns."""
    layers: InLayers
    sent: Sent
    """The counted bytes that a device sends."""
    expected: Sent
    """The bytes that it should send."""


def check_updates(way: Way) -> None:
    """Compile and check the programs of a way."""
    print_findings(judge_batches({batch: measure_batch(batch) for batch in BATCHES if batch.way == way}))


def measure_batch(batch: Batch) -> MeasuredBatch:
    """Compile one program and measure it."""
    parallel = parallel_of(batch.way, resident_slots=batch.resident_slots, layers=LAYERS)
    compiled = compile_updates(
        MODEL,
        parallel,
        layers=LAYERS,
        micro_batches=MICRO_BATCHES,
        updates=batch.updates,
        chunk_bytes=CHUNK_BYTES,
    )
    program, temporary = read_compiled(compiled)
    transfers = list(program.transfers())
    pushes = {
        content: sum(one.times for one in transfers if transfer_content(one) == content)
        for content in ("push", "return")
    }
    expected = expected_sent(
        MODEL, parallel, layers=LAYERS, micro_batches=MICRO_BATCHES, updates=batch.updates
    )
    layers = look_into_layers(program, batch.layer_runs)
    return MeasuredBatch(temporary, pushes, layers, count_sent(transfers, parallel.mesh.shape), expected)


def look_into_layers(program: Program, layer_runs: int) -> InLayers:
    """Find the instructions inside the loops over layers, whose bodies run ``layer_runs`` times."""
    # A loop whose body runs as often but with other trips is inside a layer, not over layers.
    bodies = [loop.body for loop in program.loops() if loop.times == layer_runs and loop.trips == LAYERS]
    inside = program.reached_from(bodies)
    instructions = [one for name in inside for one in program.computations[name]]
    return InLayers(
        loops=len(bodies),
        pushes=sum(transfer_content(one) in ("push", "return") for one in program.transfers(inside)),
        preparations=sum(one.opcode == "sort" or "prepare_layer" in one.op_name for one in instructions),
        inner=dict(Counter(loop.trips for loop in program.loops(inside))),
    )


def judge_batches(measured: Mapping[Batch, MeasuredBatch]) -> Iterator[Finding]:
    """Check the programs of all batches.

    Args:
        measured: the measurements of every program.
    """
    for batch, program in measured.items():
        if not batch.resident_slots:
            continue
        yield judge_bytes(batch.name, program.sent, program.expected)
        yield _judge_pushes(batch, program)
        yield from _judge_layers(batch, program.layers)
        without = measured.get(batch._replace(resident_slots=0))
        if without is not None:
            yield _judge_memory(batch, program.temporary - without.temporary)
        before = measured.get(batch._replace(updates=batch.updates - 1))
        if before is not None:
            growth = program.temporary - before.temporary
            yield Finding(
                batch.name,
                "no more temporary memory than with one update less",
                f"{growth} bytes",
                growth <= 0,
            )


def _judge_pushes(batch: Batch, measured: MeasuredBatch) -> Finding:
    # A push sends chunks of bfloat16 residents, and a return sends chunks of the homes' float32 gradients.
    sizes = {"push": 2 * RESIDENTS, "return": 4 * LAYERS * TOPOLOGY.home_slots * EXPERT}
    chunks = {name: -(-size // CHUNK_BYTES) for name, size in sizes.items()}
    expected = {name: EXCHANGES * count * batch.updates for name, count in chunks.items()}
    result = ", ".join(
        f"{name} {times:g} in {chunks[name]} chunks" for name, times in measured.pushes.items()
    )
    return Finding(
        batch.name,
        "residents are pushed and their gradients return once per update, in 3 exchanges per chunk; none in a layer",
        f"{result}; {measured.layers.pushes} in layers",
        measured.pushes == expected and not measured.layers.pushes,
    )


def _judge_layers(batch: Batch, layers: InLayers) -> Iterator[Finding]:
    yield Finding(
        batch.name,
        "layers contain no sort and no instruction of prepare_layer",
        f"{layers.preparations} instructions in {layers.loops} loops over layers",
        layers.loops == 2 and not layers.preparations,
    )
    # The gradients of exports are added one by one to those of homes and of residents.
    allowed = {capacities_of(TOPOLOGY, LAYERS).exports: 2}
    yield Finding(
        batch.name,
        "layers contain only two loops, which add replicas' gradients to those of homes and residents",
        ", ".join(f"{count} of {trips:g} iterations" for trips, count in layers.inner.items()) or "none",
        layers.inner == allowed,
    )


def _judge_memory(batch: Batch, extra: int) -> Finding:
    return Finding(
        batch.name,
        f"temporary memory of residents: at most {ALLOWED_BYTES} bytes per parameter (weight 2, accumulator 4,"
        f" gradient of a micro-batch 2), {MOST_EXTRA / 1e6:.0f} MB",
        f"{extra / 1e6:.0f} MB, {extra / RESIDENTS:.2f} bytes per parameter",
        extra <= MOST_EXTRA,
    )
