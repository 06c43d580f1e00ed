"""The record as Markdown tables: checks, throughput, layers and more; cells of steps that have not run are blank."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from experiments.gpu_day.operations import DENSE, OWN_KERNELS
from experiments.gpu_day.steps import ATTENTION_TOKENS, PARTS, SPEEDS, day_steps, speed_name

OPERATIONS: Final = (
    "forward",
    "input gradient",
    "weight gradient",
    "MLP forward",
    "MLP with gradients",
)
"""The columns of the table of throughput."""
NAMED_RATE: Final = 790
"""The rate in TFLOP/s that large dense products in bfloat16 reach on an H200, whatever a run measures."""
PLANNERS: Final = ("static", "eplb", "relibra", "balanced")

type Lines = Sequence[Mapping[str, Any]]
"""The lines of a record."""


def report(lines: Lines) -> str:
    """Return the tables of a record in Markdown.

    Args:
        lines: the lines of the record, in order. If a step ran several times, its last run is shown.

    Returns:
        The tables, without rehearsals. Cells without a measurement are empty.
    """
    measured = [line for line in lines if not line["rehearsal"]]
    parts = (
        _machine,
        _checks,
        _speeds,
        _shares,
        _baselines,
        _attention,
        _stragglers,
        _layer,
        _full_layer,
        _exchanges,
        _host,
    )
    return "\n".join("\n".join([*part(measured), ""]) for part in parts).rstrip()


def _facts(lines: Lines, step: str) -> list[Mapping[str, Any]]:
    """Return the lines of the last run of a step."""
    step_lines = [line for line in lines if line["step"] == step]
    ends = [number for number, line in enumerate(step_lines[:-1]) if "state" in line]
    return step_lines[ends[-1] + 1 if ends else 0 :]


def _machine(lines: Lines) -> list[str]:
    descriptions = [line for line in _facts(lines, "environment") if "device" in line]
    if not descriptions:
        return ["Nothing has been measured: no step has run on a GPU."]
    facts = descriptions[-1]
    driver = next(
        (str(value) for name, value in facts.items() if name.startswith("driver_version")), "unknown"
    )
    return [
        f"{facts['device']}, {facts['multiprocessors']} multiprocessors, jax {facts['jax']};"
        f" driver and clocks: {driver}."
    ]


def _checks(lines: Lines) -> Iterator[str]:
    yield from ("| check | | seconds |", "|---|---|---:|")
    steps = [step.name for command in day_steps("", None).values() for step in command]
    others = [line["step"] for line in lines if "state" in line]  # those of the smoke test
    for name in dict.fromkeys([*steps, *others]):
        last = next((line for line in reversed(_facts(lines, name)) if "state" in line), None)
        yield f"| {name} | {last['state'] if last else ''} | {last['seconds'] if last else ''} |"


def _speeds(lines: Lines) -> Iterator[str]:
    yield "TFLOP/s and share of the roofline, for the group sizes of a ReLibra plan:"
    yield ""
    yield f"| experts of | rows per group | {' | '.join(OPERATIONS)} |"
    yield f"|---|---:|{'---:|' * len(OPERATIONS)}"
    for model, rows in SPEEDS:
        kernel_results = {
            line["operation"]: f"{line['teraflops']:.0f}, {line['of_roofline']:.0%}"
            for line in _rates(lines, model, rows)
            if line["by"] == OWN_KERNELS
        }
        cells = [kernel_results.get(operation, "") for operation in OPERATIONS]
        yield f"| {model} | {rows:,} | {' | '.join(cells)} |"


def _shares(lines: Lines) -> Iterator[str]:
    yield f"Share of the rate of a dense product of as many rows in the same run, and of {NAMED_RATE} TFLOP/s:"
    yield ""
    yield f"| experts of | rows per group | tiles | dense, TFLOP/s | {' | '.join(OPERATIONS)} |"
    yield f"|---|---:|---|---:|{'---:|' * len(OPERATIONS)}"
    for model, rows in SPEEDS:
        for tiles, ending in (("counted", ""), ("measured, clusters", ", clusters")):
            rates = {
                (line["by"], line["operation"]): line["teraflops"]
                for line in _rates(lines, model, rows, ending)
            }
            if not rates:
                continue
            cells = []
            for operation in OPERATIONS:
                # The dense version of an MLP is no single product.
                dense = rates.get((DENSE, "forward" if operation.startswith("MLP") else operation))
                own = rates.get((OWN_KERNELS, operation))
                cells.append(f"{own / dense:.0%}, {own / NAMED_RATE:.0%}" if own and dense else "")
            dense = f"{rates[DENSE, 'forward']:.0f}" if (DENSE, "forward") in rates else ""
            yield f"| {model} | {rows:,} | {tiles} | {dense} | {' | '.join(cells)} |"


def _rates(lines: Lines, model: str, rows: int, ending: str = "") -> list[Mapping[str, Any]]:
    """Return the throughput of all versions for the group sizes of a ReLibra plan."""
    together = f"speed of {model}, {rows} rows"  # the step of records in which one step measured both parts
    steps = [name + ending for name in (together, *(speed_name(model, rows, part) for part in PARTS))]
    return [
        line
        for step in steps
        for line in _facts(lines, step)
        if line.get("plan") == "relibra" and "teraflops" in line
    ]


def _stragglers(lines: Lines) -> Iterator[str]:
    facts = {line["planner"]: line for line in _facts(lines, "stragglers") if "planner" in line}
    yield "Grouped MLP with gradients of the slowest rank, summed over micro-batches and layers:"
    yield ""
    yield f"| | {' | '.join(PLANNERS)} |"
    yield f"|---|{'---:|' * len(PLANNERS)}"
    for head, name, form in (
        ("ms", "slowest_ms", ".2f"),
        ("imbalance of time", "imbalance_of_time", ".3f"),
        ("imbalance of rows", "imbalance_of_rows", ".3f"),
    ):
        cells = [format(facts[planner][name], form) if planner in facts else "" for planner in PLANNERS]
        yield f"| {head} | {' | '.join(cells)} |"


def _baselines(lines: Lines) -> Iterator[str]:
    yield "TFLOP/s of all versions, for the same group sizes:"
    for model, rows in SPEEDS:
        facts = _rates(lines, model, rows)
        if facts:
            yield from ("", f"| {model}, {rows:,} rows per group | {' | '.join(OPERATIONS)} |")
            yield f"|---|{'---:|' * len(OPERATIONS)}"
        rates = {(line["by"], line["operation"]): f"{line['teraflops']:.0f}" for line in facts}
        for by in dict.fromkeys(by for by, _ in rates):
            cells = [rates.get((by, operation), "") for operation in OPERATIONS]
            yield f"| {by} | {' | '.join(cells)} |"


def _layer(lines: Lines) -> Iterator[str]:
    facts = [line["milliseconds"] for line in _facts(lines, "layer") if "milliseconds" in line]
    yield "A layer on one GPU for the tokens of each rank of a plan, mean of the ranks:"
    yield from ("", "| part | ms |", "|---|---:|")
    for part in facts[0] if facts else ():
        yield f"| {part} | {statistics.mean(each[part] for each in facts):.3f} |"


def _full_layer(lines: Lines) -> Iterator[str]:
    facts = _facts(lines, "layer of full size")
    parts = next((line for line in facts if "milliseconds" in line and "tokens" in line), None)
    yield "A layer of full size on one GPU, in the place of a rank with even routing:"
    yield from ("", "| part | ms |", "|---|---:|")
    for part, milliseconds in parts["milliseconds"].items() if parts else ():
        yield f"| {part} | {milliseconds:.2f} |"
    if parts:
        bandwidth = parts["copied_gigabytes_per_second"]
        yield ""
        yield (
            f"{parts['tokens']:,} tokens with {parts['top_k']} experts each, of width {parts['width']:,}."
            f" A copy reads and writes {bandwidth:,.0f} GB/s. The kernels of the layer with gradients:"
        )
        yield from ("", "| kernel | ms |", "|---|---:|")
    for line in facts:
        if "kernel" in line and line["milliseconds"] >= 0.01:
            yield f"| {line['kernel'].split(' | ')[0]} | {line['milliseconds']:.2f} |"


def _exchanges(lines: Lines) -> Iterator[str]:
    yield "XLA's ragged exchange on one GPU, by the number of even pieces of the rows:"
    yield from ("", "| pieces | GB/s |", "|---:|---:|")
    for line in _facts(lines, "ragged exchange"):
        if "pieces" in line:
            yield f"| {line['pieces']} | {line['gigabytes_per_second']:.1f} |"
    yield from ("", "A step of a scan whose copy is chosen by a branch, beside one without a branch:")
    yield from ("", "| products in the step | microseconds | of them the branch |", "|---:|---:|---:|")
    for line in _facts(lines, "branches"):
        if "products" in line:
            step, branch = line["microseconds"]["branch"], line["branch_microseconds"]
            yield f"| {line['products']} | {step:.0f} | {branch:.0f} |"


def _attention(lines: Lines) -> Iterator[str]:
    yield "Attention of one sequence with 32 heads, 4 key heads and samples of equal length:"
    yield from (
        "",
        "| tokens | samples | by | forward, ms | with gradients, ms | TFLOP/s |",
        "|---:|---:|---|---:|---:|---:|",
    )
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for tokens in ATTENTION_TOKENS:
        for line in _facts(lines, f"attention, {tokens} tokens"):
            if "attention" in line:
                of_parts = parts.setdefault((tokens, line["samples"], line["attention"]), {})
                of_parts[line["part"]] = line
    for (tokens, samples, name), of_parts in parts.items():
        cells = [
            f"{of_parts[part][value]:.{digits}f}" if part in of_parts else ""
            for part, value, digits in (
                ("forward", "milliseconds", 2),
                ("with gradients", "milliseconds", 2),
                ("with gradients", "teraflops", 0),
            )
        ]
        yield f"| {tokens:,} | {samples} | {name} | {' | '.join(cells)} |"


def _host(lines: Lines) -> Iterator[str]:
    yield "Experts copied from pinned host memory, beside products in the same program:"
    yield from ("", "| | ms |", "|---|---:|")
    for line in _facts(lines, "host copies"):
        if "bytes" in line:
            rate, size = line["gigabytes_per_second"], line["bytes"] / 1e6
            times = line["milliseconds"]
            yield f"| copy of {size:.0f} MB, at {rate:.0f} GB/s | {times['copy']:.2f} |"
            yield f"| products | {times['products']:.2f} |"
            yield f"| both | {times['both']:.2f} |"
    yield from ("", "Planning of a batch: 94 layers, 32 micro-batches, 128 experts on 4 x 8 ranks:")
    yield from ("", "| planner | device | ms | first call, s |", "|---|---|---:|---:|")
    for line in _facts(lines, "planning"):
        if "planner" in line:
            yield (
                f"| {line['planner']} | {line['device']} | {line['milliseconds']:.0f} |"
                f" {line['first_seconds']:.1f} |"
            )
