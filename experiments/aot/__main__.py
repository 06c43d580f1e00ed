"""Compile training steps for 2 nodes x 4 H100, and check that the programs have the properties that the design needs.

    make aot

It compiles these programs:

- stacks of layers that run the same plans in two ways: as `relibra_jax.execution.ExpertParallel` chooses on such nodes,
  scanned and unrolled, and with padded exchanges of tokens and replicas. Each is compiled with R = 2 replica slots and
  with none, with 2 and 8 layers, and with the Hopper kernels. The tables of prepared layers are arguments;
- whole optimizer updates with residents, for several micro-batches and several updates;
- the program that migrates experts;
- layers on one node of 8 ranks whose replicas a kernel pulls;
- the kernels alone at the shapes of published models, and the Triton kernels for a GPU of each family.

No GPU is needed or used. The checks cover schedules, buffers, bytes and the assembler's report on the kernels. They do
not show that ragged exchanges and kernels compute correct results. ``XLA_FLAGS=--xla_dump_to=DIR`` keeps the programs.
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

from experiments.aot import checks, kernels, migration, remote, triton_kernels, update_checks


def main() -> int:
    """Compile all programs in parallel, and print a table of the checks.

    Returns:
        The exit status: 0, or 1 if a check failed.
    """
    start = time.monotonic()
    # The workers inherit this and do not use a GPU of this machine.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA mostly uses one core for a program; the largest programs start first.
    stacks = sorted(checks.CASES, key=lambda case: (case.scanned, -case.layers, -case.replica_slots))
    context = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), 4)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:

        def submit(function: Callable[[Any], Any], cases: Iterable[Any]) -> dict[Any, Future]:
            return {case: pool.submit(function, case) for case in cases}

        update_jobs = submit(update_checks.measure_batch, update_checks.BATCHES)
        stack_jobs = submit(checks.measure, stacks)
        migration_job, remote_job = (
            pool.submit(migration.measure_migration),
            pool.submit(remote.measure_remote),
        )
        kernel_jobs = submit(kernels.compile_kernels, kernels.KERNEL_CASES)
        triton_jobs = submit(triton_kernels.compile_triton, triton_kernels.TRITON_CASES)
        findings = [
            *checks.judge(_results(stack_jobs)),
            *update_checks.judge_batches(_results(update_jobs)),
            *migration.judge_migration(migration_job.result()),
            *remote.judge_remote(remote_job.result()),
            *kernels.judge_kernels(_results(kernel_jobs)),
            *triton_kernels.judge_triton(_results(triton_jobs)),
        ]
    table = Table(
        "program", "required property", "measured", "", title="Programs compiled for 2 nodes x 4 H100"
    )
    for finding in findings:
        verdict = {True: "[green]ok", False: "[red]FAILED", None: "no check"}[finding.good]
        table.add_row(finding.program, finding.requirement, finding.result, verdict)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    failed = sum(finding.good is False for finding in findings)
    # The other four programs: one migrates experts, and three fetch replicas with or without a kernel.
    programs = 4 + sum(map(len, (update_jobs, stack_jobs, kernel_jobs, triton_jobs)))
    seconds = time.monotonic() - start
    console.print(f"{programs} programs in {seconds:.0f} s, {failed} of {len(findings)} checks failed")
    return 1 if failed else 0


def _results(futures: dict[Any, Future]) -> dict[Any, Any]:
    return {case: future.result() for case, future in futures.items()}


if __name__ == "__main__":
    sys.exit(main())
