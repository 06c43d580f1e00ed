"""``python -m experiments.gpu_day COMMAND``: the first day on a GPU, in commands of at most ten minutes each.

    python -m experiments.gpu_day smoke     # test the GPUs of this host, in about two minutes
    python -m experiments.gpu_day right     # check that the kernels are correct
    python -m experiments.gpu_day speed     # measure throughput, compared with baselines
    python -m experiments.gpu_day why       # stragglers, a layer rank by rank, tile sizes
    python -m experiments.gpu_day report    # print the results as tables

Every step runs in its own process, which is killed at the step's time limit. Results are appended to the record
immediately. A command continues where the record ends: it does not repeat a step that has passed with the same code.
The plan is made on the CPU and stored next to the record; ``plan`` makes it in advance, on any machine. ``--rehearse``
runs the steps at small sizes without a GPU, with the kernels in JAX's interpreter and padded exchanges only.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.gpu_day.steps import COMMANDS, count_devices, day_steps, smoke_steps
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
    record = Record(options.record, rehearsal=options.rehearse)
    if options.command == "report":
        # The report imports JAX; the other commands must work without it.
        from experiments.gpu_day.report import report

        print(report(read_record(options.record)))
        return 0
    minutes = options.minutes or (SMOKE_MINUTES if options.command == "smoke" else MINUTES)
    workers = CHECKS_AT_ONCE if options.command == "right" else 1
    outcomes = run_ladder(_steps(options), record, seconds=60 * minutes, workers=workers)
    missing = [name for name, outcome in outcomes.items() if not outcome.startswith("passed")]
    if missing:
        print(f"not passed: {', '.join(missing)}; run the same command to try them again", file=sys.stderr)
    return 1 if missing else 0


def _steps(options: argparse.Namespace) -> Sequence[Step]:
    if options.command == "smoke":
        devices = 2 if options.rehearse else count_devices()
        return smoke_steps(devices, rehearsal=options.rehearse)
    steps = day_steps(str(options.record.parent), options.trace)
    return [steps["right"][1]] if options.command == "plan" else steps[options.command]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_help = "; ".join(f"{name}: {question}" for name, question in COMMANDS.items())
    parser.add_argument("command", choices=(*COMMANDS, "plan", "report"), help=command_help)
    parser.add_argument(
        "--record",
        type=Path,
        default=RECORD,
        help=f"file to which results are appended, in JSON lines (default: {RECORD})",
    )
    parser.add_argument(
        "--trace", help="name or path of the trace to plan (default: the trace in this project)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"time limit for all steps, in minutes (default: {MINUTES}, and {SMOKE_MINUTES:g} for smoke)",
    )
    rehearse = "run at small sizes, without a GPU, in the folder rehearsal/ beside the record"
    parser.add_argument("--rehearse", action="store_true", help=rehearse)
    return parser


if __name__ == "__main__":
    sys.exit(main())
