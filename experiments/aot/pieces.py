"""The check of layers that dispatch tokens in two pieces with the exchange of GPUs: what crosses while experts run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import jax

from experiments.aot.bytes import count_sent, group_axes, transfer_content
from experiments.aot.checks import phase_of
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, judge_bytes, print_findings, read_compiled
from experiments.aot.hlo import Program
from experiments.aot.stack import compile_step
from experiments.aot.ways import MODEL, parallel_of
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.routing.sizes import round_capacity

PROGRAM: Final = "auto, two pieces, scanned"
PIECES: Final = 2
LAYERS: Final = 2
KERNELS: Final = {"forward": 2, "backward": 3}
"""The kernels of the experts of one piece."""


class Crossing(NamedTuple):
    """An exchange of tokens between nodes."""

    direction: Literal["forward", "backward"]
    out: bool
    """Whether tokens, or the gradients of outputs, go to the experts; they come back otherwise."""
    kernels: int
    """The number of kernels of experts that run meanwhile."""


def check_pieces() -> None:
    """Compile and check a stack whose layers dispatch tokens in two pieces."""
    parallel = parallel_in_pieces()
    program, _ = read_compiled(compile_step(MODEL, parallel, layers=LAYERS, scanned=True))
    sent = count_sent(program.transfers(), parallel.mesh.shape)
    bytes_sent = judge_bytes(PROGRAM, sent, expected_sent(MODEL, parallel, layers=LAYERS))
    print_findings([*judge_crossings(crossings(program, parallel.mesh.shape)), bytes_sent])


def parallel_in_pieces() -> ExpertParallel:
    """Return the settings of the stack, with buffers of half the size."""
    parallel = parallel_of("auto")
    sizes = parallel.capacities
    assert sizes is not None
    tokens = {name: getattr(sizes, name) for name in ("rows", "flat", "node", "local")}
    halves = jax.tree.map(lambda size: round_capacity(size // PIECES), tokens)
    return replace(parallel, pieces=PIECES, capacities=replace(sizes, **halves))


def crossings(program: Program, mesh_axes: Mapping[str, int]) -> Iterator[Crossing]:
    """Yield the exchanges of tokens between nodes, on a mesh with axes of these sizes."""
    for transfer in program.transfers():
        axes, _ = group_axes(transfer.start, mesh_axes)
        if axes != "node" or transfer_content(transfer) != "tokens":
            continue
        phase = phase_of(transfer)
        # Gradients of outputs travel as the outputs did, in the scope of combine.
        out = ("dispatch" in transfer.op_name) == (phase != "return")
        kernels = sum(map(program.is_kernel, transfer.between)) if transfer.asynchronous else 0
        yield Crossing("forward" if phase == "fetch" else "backward", out, kernels)


def judge_crossings(found: Iterable[Crossing]) -> Iterator[Finding]:
    """Check that pieces cross beside experts in both directions.

    Args:
        found: the exchanges of tokens between nodes.
    """
    every = list(found)
    for direction, kernels in KERNELS.items():
        for out in (True, False):
            beside = [one.kernels for one in every if (one.direction, one.out) == (direction, out)]
            name = "crosses to the experts" if out else "returns between nodes"
            yield Finding(
                PROGRAM,
                f"{direction}: a piece {name} beside the {kernels} kernels of the other piece",
                f"{sum(count >= kernels for count in beside)} of {len(beside)} exchanges",
                any(count >= kernels for count in beside),
            )
