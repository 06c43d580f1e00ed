"""What compiled updates are measured by, and what is promised of them: residents travel once an update, and layers
only follow tables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from experiments.aot.bytes import Sent, count_sent, what_is_sent
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, judge_bytes, read_compiled
from experiments.aot.hlo import Program
from experiments.aot.update import compile_updates
from experiments.aot.ways import EXPERT, MODEL, TOPOLOGY, Way, capacities_of, parallel_of

LAYERS: Final = 4
MICRO_BATCHES: Final = 3
RESIDENT_SLOTS: Final = 2
CHUNK_BYTES: Final = 40_000_000
"""Small enough for a push to go in two parts."""
RESIDENTS: Final = LAYERS * RESIDENT_SLOTS * EXPERT
"""Elements of a rank's residents."""
PROMISED_BYTES: Final = 2 + 4 + 2
"""Of each: bfloat16 weight, float32 accumulator, and the bfloat16 gradient of one micro-batch."""
MOST_EXTRA: Final = PROMISED_BYTES * RESIDENTS
EXCHANGES: Final = 3
"""Collectives of a push, or of a return: inside the home's node, between nodes, inside the other node."""


class Batch(NamedTuple):
    """One program: a batch of updates."""

    way: Way
    updates: int
    resident_slots: int = RESIDENT_SLOTS

    @property
    def name(self) -> str:
        """The program's lines in the table."""
        return f"{self.updates} update{'' if self.updates == 1 else 's'}, {self.way}"

    @property
    def layer_runs(self) -> int:
        """How often a run of the program runs a layer."""
        return self.updates * MICRO_BATCHES * LAYERS


BATCHES: Final = [
    Batch("hierarchical padded", 1, resident_slots=0),
    Batch("hierarchical padded", 1),
    Batch("auto", 2),
    Batch("auto", 3),
]


class InLayers(NamedTuple):
    """What runs inside the loops over layers, forward and backward."""

    loops: int
    """Loops over layers."""
    pushes: int
    """Collectives that push residents or return their gradients."""
    preparations: int
    """Instructions that prepare layers, and sorts."""
    inner: dict[float, int]
    """Loops inside a layer, counted by their trips."""


class MeasuredBatch(NamedTuple):
    """What the checks need to know about a program."""

    temporary: int
    """Bytes."""
    pushes: dict[str, float]
    """How many collectives of the push, and of the return, a run executes."""
    layers: InLayers
    sent: Sent
    """Bytes that a device sends, counted."""
    expected: Sent
    """Bytes that it should send."""


def measure_batch(batch: Batch) -> MeasuredBatch:
    """Compile one program and read it."""
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
        what: sum(one.times for one in transfers if what_is_sent(one) == what) for what in ("push", "return")
    }
    expected = expected_sent(
        MODEL, parallel, layers=LAYERS, micro_batches=MICRO_BATCHES, updates=batch.updates
    )
    layers = look_into_layers(program, batch.layer_runs)
    return MeasuredBatch(temporary, pushes, layers, count_sent(transfers, parallel.topology), expected)


def look_into_layers(program: Program, layer_runs: int) -> InLayers:
    """What runs inside the loops whose bodies run ``layer_runs`` times, those over layers."""
    # A loop inside one that runs as often is a loop of a layer, not over layers.
    bodies = [loop.body for loop in program.loops() if loop.times == layer_runs and loop.trips == LAYERS]
    inside = program.reached_from(bodies)
    instructions = [one for name in inside for one in program.computations[name]]
    return InLayers(
        loops=len(bodies),
        pushes=sum(what_is_sent(one) in ("push", "return") for one in program.transfers(inside)),
        preparations=sum(one.opcode == "sort" or "prepare_layer" in one.op_name for one in instructions),
        inner=dict(Counter(loop.trips for loop in program.loops(inside))),
    )


def judge_batches(measured: Mapping[Batch, MeasuredBatch]) -> Iterator[Finding]:
    """Hold the programs of all batches to what is promised."""
    for batch, found in measured.items():
        if not batch.resident_slots:
            continue
        yield judge_bytes(batch.name, found.sent, found.expected)
        yield _judge_pushes(batch, found)
        yield from _judge_layers(batch, found.layers)
        without = measured.get(batch._replace(resident_slots=0))
        if without is not None:
            yield _judge_memory(batch, found.temporary - without.temporary)
        before = measured.get(batch._replace(updates=batch.updates - 1))
        if before is not None:
            more = found.temporary - before.temporary
            yield Finding(
                batch.name, "no more temporary memory than with an update less", f"{more} bytes", more <= 0
            )


def _judge_pushes(batch: Batch, found: MeasuredBatch) -> Finding:
    # A push goes in chunks of bfloat16 residents, a return in chunks of the homes' float32 gradients.
    sizes = {"push": 2 * RESIDENTS, "return": 4 * LAYERS * TOPOLOGY.home_slots * EXPERT}
    chunks = {what: -(-size // CHUNK_BYTES) for what, size in sizes.items()}
    wanted = {what: EXCHANGES * count * batch.updates for what, count in chunks.items()}
    said = ", ".join(f"{what} {times:g} in {chunks[what]} chunks" for what, times in found.pushes.items())
    return Finding(
        batch.name,
        "residents are pushed, and their gradients return, once an update, in three exchanges a chunk; none in a layer",
        f"{said}; {found.layers.pushes} in layers",
        found.pushes == wanted and not found.layers.pushes,
    )


def _judge_layers(batch: Batch, layers: InLayers) -> Iterator[Finding]:
    yield Finding(
        batch.name,
        "layers contain no sort and nothing of prepare_layer",
        f"{layers.preparations} instructions in {layers.loops} loops over layers",
        layers.loops == 2 and not layers.preparations,
    )
    # Gradients of exports are added to those of homes and of residents, one after the other.
    allowed = {capacities_of(TOPOLOGY, LAYERS).exports: 2}
    yield Finding(
        batch.name,
        "nor loops, but two that add replicas' gradients to those of homes and residents",
        ", ".join(f"{count} of {trips:g} trips" for trips, count in layers.inner.items()) or "none",
        layers.inner == allowed,
    )


def _judge_memory(batch: Batch, extra: int) -> Finding:
    return Finding(
        batch.name,
        f"temporary memory of residents: at most {PROMISED_BYTES} bytes a parameter (weight 2, accumulator 4, a"
        f" micro-batch's gradient 2), {MOST_EXTRA / 1e6:.0f} MB",
        f"{extra / 1e6:.0f} MB, {extra / RESIDENTS:.2f} bytes a parameter",
        extra <= MOST_EXTRA,
    )
