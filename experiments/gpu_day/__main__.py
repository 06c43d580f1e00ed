"""``python -m experiments.gpu_day COMMAND``: day one on a GPU, in three commands of at most ten minutes each.

    python -m experiments.gpu_day right --record FOLDER/day.jsonl    # are the kernels right
    python -m experiments.gpu_day speed --record FOLDER/day.jsonl    # how fast are they, beside their peers
    python -m experiments.gpu_day why --record FOLDER/day.jsonl      # stragglers, a layer rank by rank, tiles
    python -m experiments.gpu_day report --record FOLDER/day.jsonl   # the tables of what is there

Every step runs in a process of its own that is killed when its time is over, and whatever it finds is appended to the
record at once. Commands go on where the record ends: a step that has passed with the same code is not run again. The
plan is made on the CPU and kept beside the record, so it may be made before, elsewhere: ``plan``. ``--rehearse`` runs
the same steps at small sizes without a GPU, the kernels in JAX's interpreter.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.gpu_day.ladder import Record, read_record, run_ladder
from experiments.gpu_day.steps import COMMANDS, all_steps

MINUTES: Final = 9.5
"""The time of a command, by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line; that of the process when None.

    Returns:
        The exit status: 0 if all steps of the command have passed, else 1.
    """
    options = _parser().parse_args(arguments)
    record = Record(options.record, rehearsal=options.rehearse)
    if options.command == "report":
        # Only here are JAX's modules imported.
        from experiments.gpu_day.report import report

        print(report(read_record(options.record)))
        return 0
    steps = all_steps(str(options.record.parent), options.trace)
    chosen = [steps["right"][1]] if options.command == "plan" else steps[options.command]
    told = run_ladder(chosen, record, seconds=60 * options.minutes)
    missing = [name for name, state in told.items() if not state.startswith("passed")]
    if missing:
        print(f"not passed: {', '.join(missing)}; the same command tries them again", file=sys.stderr)
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asks = "; ".join(f"{name}: {question}" for name, question in COMMANDS.items())
    parser.add_argument("command", choices=(*COMMANDS, "plan", "report"), help=asks)
    parser.add_argument(
        "--record", type=Path, required=True, help="the file of results, JSON lines, that grows"
    )
    parser.add_argument("--trace", help="the trace that is planned, by name or path; else this project's own")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"the time for all steps, {MINUTES}")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, without a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
