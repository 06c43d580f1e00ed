"""The check of layers whose replicas are late (`relibra_jax.execution.late_replicas`): what runs beside their fetch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from experiments.aot.bytes import count_sent, transfer_content
from experiments.aot.checks import phase_of
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.findings import Finding, judge_bytes, print_findings, read_compiled
from experiments.aot.hlo import Program
from experiments.aot.stack import compile_step
from experiments.aot.ways import MODEL, parallel_of

PROGRAM: Final = "auto, late replicas, scanned"
LAYERS: Final = 2
KERNELS: Final = {False: 2, True: 3}
"""The kernels of the home experts in the forward pass, and in the backward pass."""


class Beside(NamedTuple):
    """What runs between the start and the done of an exchange that fetches replicas."""

    backward: bool
    """Whether it is in the backward pass, which fetches replicas again."""
    attention: int
    """The number of matrix products of attention."""
    kernels: int
    """The number of kernels of experts."""


def check_late() -> None:
    """Compile and check a stack whose replicas are late."""
    parallel = replace(parallel_of("auto"), late_replicas=True)
    program, _ = read_compiled(compile_step(MODEL, parallel, layers=LAYERS, scanned=True))
    sent = count_sent(program.transfers(), parallel.mesh.shape)
    bytes_sent = judge_bytes(PROGRAM, sent, expected_sent(MODEL, parallel, layers=LAYERS))
    print_findings([*judge_fetches(fetches(program)), bytes_sent])


def fetches(program: Program) -> Iterator[Beside]:
    """Yield the exchanges that fetch replicas, without those that return their gradients."""
    for transfer in program.transfers():
        phase = phase_of(transfer)
        # The return of pieces is inside the gradient of the experts, which computes them again.
        returns = phase == "return" or "transpose(jvp(replica_fetch" in transfer.op_name
        if transfer_content(transfer) == "replicas" and not returns:
            between = transfer.between if transfer.asynchronous else ()
            products = sum(program.is_gemm(one) and "attention" in one.op_name for one in between)
            yield Beside(phase == "refetch", products, sum(map(program.is_kernel, between)))


def judge_fetches(found: Iterable[Beside]) -> Iterator[Finding]:
    """Check that nothing waits for the exchanges of a fetch.

    Args:
        found: the exchanges that fetch replicas.
    """
    every = list(found)
    for backward, kernels in KERNELS.items():
        own = [one for one in every if one.backward is backward]
        name = "backward" if backward else "forward"
        yield Finding(
            PROGRAM,
            f"{name}: the pieces of exports are scattered beside attention",
            f"{max((one.attention for one in own), default=0)} matrix products",
            any(one.attention for one in own),
        )
        yield Finding(
            PROGRAM,
            f"{name}: the replicas arrive beside the {kernels} kernels of home experts",
            f"{max((one.kernels for one in own), default=0)} kernels",
            any(one.kernels >= kernels for one in own),
        )
