"""Compile training steps for 2 nodes x 4 H100 and hold the programs to what the design promises.

    make aot

Layers are prepared before: their tables are arguments. Stacks of layers run the same plans in two ways: as
`relibra_jax.execution.ExpertParallel` chooses on such nodes, scanned and unrolled, and with padded exchanges of tokens
and replicas. Each is compiled with R = 2 replica slots and with none, 2 and 8 layers deep, experts in the Hopper
kernels. Then whole optimizer updates with residents, several micro-batches and several updates; the program that
migrates experts; and the kernels by themselves, at the shapes of named models, those of Triton for a GPU of each
family. No GPU is needed, and none is used: this shows schedules, buffers, bytes and what the assembler made of the
kernels, not that ragged exchanges and kernels compute what they should.
``XLA_FLAGS=--xla_dump_to=DIR`` keeps the programs.
"""

import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor

from rich.console import Console
from rich.table import Table

from experiments.aot import checks, kernels, migration, triton_kernels, update_checks


def main() -> int:
    start = time.monotonic()
    # For the workers: a GPU that happens to be here is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA compiles one program on one core, mostly; the largest go first.
    cases = sorted(checks.CASES, key=lambda case: (case.scanned, -case.layers, -case.replica_slots))
    context = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), 4)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        batches: list[Future] = [
            pool.submit(update_checks.measure_batch, batch) for batch in update_checks.BATCHES
        ]
        futures: list[Future] = [pool.submit(checks.measure, case) for case in cases]
        of_migration = pool.submit(migration.measure_migration)
        of_kernels: list[Future] = [
            pool.submit(kernels.compile_kernels, case) for case in kernels.KERNEL_CASES
        ]
        of_triton: list[Future] = [
            pool.submit(triton_kernels.compile_triton, case) for case in triton_kernels.TRITON_CASES
        ]
        measured = dict(zip(cases, (future.result() for future in futures), strict=True))
        updates = dict(zip(update_checks.BATCHES, (future.result() for future in batches), strict=True))
        compiled = dict(zip(kernels.KERNEL_CASES, (future.result() for future in of_kernels), strict=True))
        in_triton = dict(
            zip(triton_kernels.TRITON_CASES, (future.result() for future in of_triton), strict=True)
        )
        findings = [
            *checks.judge(measured),
            *update_checks.judge_batches(updates),
            *migration.judge_migration(of_migration.result()),
            *kernels.judge_kernels(compiled),
            *triton_kernels.judge_triton(in_triton),
        ]
    table = Table(
        "program", "what the compiled program must show", "found", "", title="2 nodes x 4 H100, compiled here"
    )
    for finding in findings:
        verdict = {True: "[green]ok", False: "[red]FAILED", None: "stated"}[finding.good]
        table.add_row(finding.program, finding.promise, finding.found, verdict)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    failed = sum(finding.good is False for finding in findings)
    programs = len(cases) + len(updates) + 1 + len(compiled) + len(in_triton)
    console.print(
        f"{programs} programs in {time.monotonic() - start:.0f} s, {failed} of {len(findings)} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
