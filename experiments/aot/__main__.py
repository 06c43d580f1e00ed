"""Compile training steps for 2 nodes x 4 H100, and check that the programs have the properties that the design needs.

    make aot            # everything
    make aot-quick      # without what must be chosen by name, and further models and GPUs

It compiles these programs:

- stacks of layers that run the same plans in three ways: as `relibra_jax.execution.ExpertParallel` chooses on such
  nodes, scanned and unrolled, and with padded and with ragged exchanges of tokens and replicas. Each is compiled with
  R = 2 replica slots and with none, with 2 and 8 layers, and with the Hopper kernels. The tables of prepared layers are
  arguments;
- a stack whose layers dispatch tokens in two pieces, and one whose replicas are late;
- whole optimizer updates with residents, for several micro-batches and several updates;
- the program that migrates experts;
- layers whose replicas come from host memory;
- attention, and a language model that uses it for packed sequences;
- layers on one node of 8 ranks whose replicas a kernel pulls;
- the kernels alone at the shapes of published models, and the Triton kernels for a GPU of each family;
- the kernels of one model with another assembler and with the newest JAX, if ``make aot-compilers`` has installed them.

Each group of programs is a step of a ladder, a process with a time limit; two to four run at the same time. Findings go
to ``out/aot.jsonl`` immediately.

No GPU is needed or used. The checks cover schedules, buffers, bytes and the assembler's report on the kernels. They do
not show that ragged exchanges and kernels compute correct results. ``XLA_FLAGS=--xla_dump_to=DIR`` keeps the programs.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

import tyro
from rich.console import Console
from rich.table import Table

from experiments.aot.checks import STACKS, stack_name
from experiments.aot.compilers import COMPILERS
from experiments.aot.gpus import GPUS
from experiments.ladder.record import Record, read_record
from experiments.ladder.steps import Step, run_ladder
from pallas_kernels.hopper.tile_sizes import MODELS

RECORD: Final = Path("out/aot.jsonl")
STEP_SECONDS: Final = 1200
"""The time limit of a step, several times what one takes on two cores."""


def aot_steps(*, quick: bool = False) -> list[Step]:
    """Return the steps, those that take longest first.

    Args:
        quick: whether to leave out what must be chosen by name, the unrolled stack, the one in pieces and the one
            with late replicas, and to compile kernels for one model and one GPU.
    """

    def step(name: str, function: str, *arguments: str | bool) -> Step:
        return Step(name, f"experiments.aot.{function}", arguments, STEP_SECONDS, on_cpu=True)

    most = 1 if quick else None
    return [
        *(
            step(stack_name(*stack), "checks:check_stack", *stack)
            for stack in STACKS
            if stack == ("auto", True) or not quick
        ),
        *(
            step(f"updates, {way}", "update_checks:check_updates", way)
            for way in ("auto", "hierarchical padded")
            if way == "auto" or not quick
        ),
        *([] if quick else [step("remote fetch", "remote:check_remote")]),
        *(step(f"Hopper kernels, {model}", "kernels:check_kernels", model) for model in list(MODELS)[:most]),
        *(
            step(f"Hopper kernels, {name}", "compilers:check_compiler", name)
            for name, compiler in COMPILERS.items()
            if not quick and compiler.why_not is None
        ),
        *(step(f"Triton kernels, {gpu}", "triton_kernels:check_triton", gpu) for gpu in list(GPUS)[:most]),
        step("migration", "migration:check_migration"),
        *([] if quick else [step("replicas from host memory", "host:check_host")]),
        step("attention", "attention:check_attention"),
        *([] if quick else [step("pieces", "pieces:check_pieces"), step("late replicas", "late:check_late")]),
    ]


def main(*, quick: bool = False) -> int:
    """Run the steps, and print a table of the checks.

    Args:
        quick: whether to leave out what repeats a check.

    Returns:
        The exit status: 0, or 1 if a check failed.
    """
    start = time.monotonic()
    RECORD.unlink(missing_ok=True)
    steps = aot_steps(quick=quick)
    for name, compiler in COMPILERS.items():
        if not quick and compiler.why_not is not None:
            print(f"Hopper kernels, {name}: skipped: {compiler.why_not}", flush=True)
    # XLA mostly uses one core for a program.
    workers = min(len(os.sched_getaffinity(0)), 4)
    outcomes = run_ladder(
        steps, Record(RECORD), seconds=len(steps) * STEP_SECONDS, workers=workers, echo=False
    )
    findings = [line for line in read_record(RECORD) if "requirement" in line]
    table = Table(
        "program", "required property", "measured", "", title="Programs compiled for 2 nodes x 4 H100"
    )
    for step in steps:
        for finding in (line for line in findings if line["step"] == step.name):
            verdict = {True: "[green]ok", False: "[red]FAILED", None: "no check"}[finding["good"]]
            table.add_row(finding["program"], finding["requirement"], finding["result"], verdict)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    failed = sum(finding["good"] is False for finding in findings)
    ended = [name for name, outcome in outcomes.items() if outcome != "passed"]
    seconds = time.monotonic() - start
    console.print(f"{len(steps)} steps in {seconds:.0f} s, {failed} of {len(findings)} checks failed")
    if ended:
        console.print(f"not passed: {', '.join(ended)}; {RECORD} has their output")
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m experiments.aot"))
