"""Compile training steps for 2 nodes x 4 H100 and hold the programs to what the design promises.

    make aot

Layers are prepared before: their tables are arguments. Stacks of layers run the same plans in two ways: as
`relibra_jax.execution.ExpertParallel` chooses on such nodes, scanned and unrolled, and with padded exchanges of tokens
and replicas. Each is compiled with R = 2 replica slots and with none, 2 and 8 layers deep, experts in the Hopper
kernels. Then whole optimizer updates with residents, several micro-batches and several updates; the program that
migrates experts; layers on one node of 8 whose replicas a kernel pulls; and the kernels by themselves, at the shapes of
named models, the planner's search among them, and those of Triton for a GPU of each family. No GPU is needed, and none
is used: this shows schedules, buffers, bytes and what the assembler made of the kernels, not that ragged exchanges and
kernels compute what they should.
``XLA_FLAGS=--xla_dump_to=DIR`` keeps the programs.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.aot import checks, kernels, migration, remote, search_kernel, triton_kernels, update_checks


def main() -> int:
    start = time.monotonic()
    # For the workers: a GPU that happens to be here is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA compiles one program on one core, mostly; the largest go first.
    stacks = sorted(checks.CASES, key=lambda case: (case.scanned, -case.layers, -case.replica_slots))
    context = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), 4)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:

        def submit(function: Callable[[Any], Any], cases: Iterable[Any]) -> dict[Any, Future]:
            return {case: pool.submit(function, case) for case in cases}

        of_updates = submit(update_checks.measure_batch, update_checks.BATCHES)
        of_stacks = submit(checks.measure, stacks)
        of_migration, of_remote = pool.submit(migration.measure_migration), pool.submit(remote.measure_remote)
        of_kernels = submit(kernels.compile_kernels, kernels.KERNEL_CASES)
        of_search = submit(search_kernel.compile_search, search_kernel.SEARCH_CASES)
        of_triton = submit(triton_kernels.compile_triton, triton_kernels.TRITON_CASES)
        findings = [
            *checks.judge(_results(of_stacks)),
            *update_checks.judge_batches(_results(of_updates)),
            *migration.judge_migration(of_migration.result()),
            *remote.judge_remote(of_remote.result()),
            *kernels.judge_kernels(_results(of_kernels)),
            *search_kernel.judge_search(_results(of_search)),
            *triton_kernels.judge_triton(_results(of_triton)),
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
    # One program migrates, and three fetch with a kernel or without.
    programs = 4 + sum(map(len, (of_updates, of_stacks, of_kernels, of_search, of_triton)))
    seconds = time.monotonic() - start
    console.print(f"{programs} programs in {seconds:.0f} s, {failed} of {len(findings)} failed")
    return 1 if failed else 0


def _results(futures: dict[Any, Future]) -> dict[Any, Any]:
    return {case: future.result() for case, future in futures.items()}


if __name__ == "__main__":
    sys.exit(main())
