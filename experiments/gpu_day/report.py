"""The record as the tables that results show: what passed, how fast, what is blank because it has not run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from experiments.gpu_day.operations import OURS
from experiments.gpu_day.steps import SPEEDS, all_steps

OPERATIONS: Final = (
    "forward",
    "input gradient",
    "weight gradient",
    "MLP forward",
    "MLP with gradients",
)
"""The columns of the table of speeds."""
PLANNERS: Final = ("static", "eplb", "relibra", "balanced")

type Lines = Sequence[Mapping[str, Any]]
"""Lines of a record."""


def report(lines: Lines) -> str:
    """The tables in Markdown.

    Args:
        lines: the lines of a record, in order; of a step that ran several times the last run counts.

    Returns:
        Text whose cells are empty where nothing was measured. What was rehearsed is left out.
    """
    measured = [line for line in lines if not line["rehearsal"]]
    return "\n".join(
        [*_machine(measured), "", *_checks(measured), "", *_speeds(measured), "", *_stragglers(measured)]
    )


def _facts(lines: Lines, step: str) -> list[Mapping[str, Any]]:
    """What the last run of a step said."""
    own = [line for line in lines if line["step"] == step]
    ends = [number for number, line in enumerate(own[:-1]) if "state" in line]
    return own[ends[-1] + 1 if ends else 0 :]


def _machine(lines: Lines) -> list[str]:
    found = [line for line in _facts(lines, "environment") if "device" in line]
    if not found:
        return ["Nothing has been measured: no step has run on a GPU."]
    one = found[-1]
    driver = next((str(value) for name, value in one.items() if name.startswith("driver_version")), "unknown")
    return [
        f"{one['device']}, {one['multiprocessors']} multiprocessors, jax {one['jax']}; driver and clocks: {driver}."
    ]


def _checks(lines: Lines) -> Iterator[str]:
    yield from ("| check | | seconds |", "|---|---|---:|")
    steps = {step.name: step for command in all_steps("", None).values() for step in command}
    for name in steps:
        last = next((line for line in reversed(_facts(lines, name)) if "state" in line), None)
        yield f"| {name} | {last['state'] if last else ''} | {last['seconds'] if last else ''} |"


def _speeds(lines: Lines) -> Iterator[str]:
    yield "TFLOP/s and share of the roofline, group sizes of a ReLibra plan:"
    yield ""
    yield f"| experts of | rows a group | {' | '.join(OPERATIONS)} |"
    yield f"|---|---:|{'---:|' * len(OPERATIONS)}"
    for model, rows in SPEEDS:
        facts = _facts(lines, f"speed of {model}, {rows} rows")
        ours = {
            line["operation"]: f"{line['teraflops']:.0f}, {line['of_roofline']:.0%}"
            for line in facts
            if line.get("by") == OURS and line.get("plan") == "relibra" and "teraflops" in line
        }
        cells = [ours.get(operation, "") for operation in OPERATIONS]
        yield f"| {model} | {rows:,} | {' | '.join(cells)} |"


def _stragglers(lines: Lines) -> Iterator[str]:
    found = {line["planner"]: line for line in _facts(lines, "stragglers") if "planner" in line}
    yield "The slowest rank's grouped MLP with gradients, summed over micro-batches and layers:"
    yield ""
    yield f"| | {' | '.join(PLANNERS)} |"
    yield f"|---|{'---:|' * len(PLANNERS)}"
    for head, name, form in (
        ("ms", "slowest_ms", ".2f"),
        ("imbalance of time", "imbalance_of_time", ".3f"),
        ("imbalance of rows", "imbalance_of_rows", ".3f"),
    ):
        cells = [format(found[planner][name], form) if planner in found else "" for planner in PLANNERS]
        yield f"| {head} | {' | '.join(cells)} |"
