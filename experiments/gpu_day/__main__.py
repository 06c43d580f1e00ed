"""``python -m experiments.gpu_day COMMAND ...``: the first day on a GPU, in commands of at most ten minutes each.

    python -m experiments.gpu_day smoke     # test the GPUs of this host, in about two minutes
    python -m experiments.gpu_day right     # check that the kernels are correct
    python -m experiments.gpu_day speed     # measure throughput, compared with baselines
    python -m experiments.gpu_day why       # exchanges, a profile of a layer, stragglers, planning
    python -m experiments.gpu_day more      # further models and sizes, tile sizes
    python -m experiments.gpu_day report    # print the results as tables

Several commands can be given at once, and run one after another: ``right speed why more report`` does what is worth
most first. Every step runs in its own process, which is killed at the step's time limit. Results are appended to the
record immediately. A command continues where the record ends: it does not repeat a step that has passed with the same
code. On a machine that keeps nothing, ``--resume`` names the record of the command before, and is read first. The plan
is made on the CPU and stored next to the record; ``plan`` makes it in advance, on any machine. After the first check
that hangs, the others have 30 s, and the one that hung is tried twice more, run under compute-sanitizer and dumped.
``--rehearse`` runs the steps at small sizes without a GPU, with the kernels in JAX's interpreter and padded exchanges
only.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from experiments.gpu_day.hang import steps_after_hang
from experiments.gpu_day.steps import COMMANDS, EXAMPLE, count_devices, day_steps, smoke_steps
from experiments.ladder.record import Record, read_record
from experiments.ladder.steps import Step, run_ladder

MINUTES: Final = 9.5
"""The default time limit of a command, in minutes."""
SMOKE_MINUTES: Final = 25.0
"""The default time limit of the smoke test, in minutes: several of its steps may hang."""
CHECKS_AT_ONCE: Final = 4
"""The number of checks of ``right`` that run at the same time. Most of their time is compilation. What is timed, and
what uses several GPUs, runs alone."""
RECORD: Final = Path("out/gpu_day/day.jsonl")
"""The default record."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command-line arguments. None stands for those of the process.

    Returns:
        The exit status: 0 if all steps of the command have passed, else 1.
    """
    options = _parser().parse_args(arguments)
    if options.rehearse:  # so that a rehearsal replaces no real plan
        options.record = options.record.parent / "rehearsal" / options.record.name
    try:
        if options.resume is not None:
            resume(options.resume, options.record)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record, outcomes = Record(options.record, rehearsal=options.rehearse), dict[str, str]()
    minutes = options.minutes or (SMOKE_MINUTES if "smoke" in options.commands else MINUTES)
    deadline = time.monotonic() + 60 * minutes
    for command in options.commands:
        if command == "report":
            # The report imports JAX; the other commands must work without it.
            from experiments.gpu_day.report import report

            print(report(read_record(options.record)))
            continue
        checks = command == "right"
        outcomes |= run_ladder(
            _steps(command, options),
            record,
            seconds=deadline - time.monotonic(),
            workers=CHECKS_AT_ONCE if checks else 1,
            diagnose=(lambda step: steps_after_hang(step, EXAMPLE, str(record.path.parent)))
            if checks
            else None,
        )
    missing = [name for name, outcome in outcomes.items() if not outcome.startswith("passed")]
    if missing:
        print(f"not passed: {', '.join(missing)}; run the same command to try them again", file=sys.stderr)
    return 1 if missing else 0


def resume(earlier: Path, record: Path) -> None:
    """Copy an earlier record, and the files beside it that later steps read, to the place of a new record.

    Args:
        earlier: the path of the earlier record.
        record: the path of the new record.

    Raises:
        ValueError: if there is no earlier record, or if the new one exists.
    """
    if not earlier.is_file():
        raise ValueError(f"--resume {earlier}: there is no such file")
    if record.exists():
        raise ValueError(
            f"--resume {earlier}: the record {record} exists already; continue it without --resume"
        )
    record.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(earlier, record)
    for name in {step.file for command in day_steps("", None).values() for step in command if step.file}:
        if earlier.with_name(name).is_file():
            shutil.copyfile(earlier.with_name(name), record.with_name(name))


def _steps(command: Any, options: argparse.Namespace) -> Sequence[Step]:
    if command == "smoke":
        devices = 2 if options.rehearse else count_devices()
        return smoke_steps(devices, rehearsal=options.rehearse)
    steps = day_steps(str(options.record.parent), options.trace)
    return steps["speed"][:1] if command == "plan" else steps[command]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_help = "; ".join(f"{name}: {question}" for name, question in COMMANDS.items())
    parser.add_argument("commands", nargs="+", choices=(*COMMANDS, "plan", "report"), help=command_help)
    parser.add_argument(
        "--record",
        type=Path,
        default=RECORD,
        help=f"file to which results are appended, in JSON lines (default: {RECORD})",
    )
    parser.add_argument(
        "--resume", type=Path, help="record of an earlier command, which is copied to the new record first"
    )
    parser.add_argument(
        "--trace", help="name or path of the trace to plan (default: the trace in this project)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"time limit for all commands together, in minutes (default: {MINUTES}, and {SMOKE_MINUTES:g} for smoke)",
    )
    rehearse = "run at small sizes, without a GPU, in the folder rehearsal/ beside the record"
    parser.add_argument("--rehearse", action="store_true", help=rehearse)
    return parser


if __name__ == "__main__":
    sys.exit(main())
