"""The tables of a dry run: settings, memory by stage and item, buffers, and the modelled time of a step."""

import dataclasses
import operator
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.rl.dry_plan import BETWEEN, Planned
from experiments.rl.dry_run import DryRun
from experiments.step_memory import counted_rows, host_bytes, memory_by_stage, rank_gigabytes
from relibra_jax.cost.batch_time import PARTS
from relibra_jax.nnx.modelled_times import ModelledTimes, add_stages
from relibra_jax.support.counted import counted

ROLES: Final = ("plan", "static", "balanced")
"""The columns of modelled times, in the order of `ModelledTimes`."""


class Unit(NamedTuple):
    """A unit of memory.

    >>> GB.text(81_234_000_000), MB.text(1_234_000), GB.text(-2e9)
    ('81.2', '1.23', '-2')
    """

    name: str
    size: float
    """The bytes of one."""

    def text(self, size: int | float) -> str:
        """Return a number of bytes in this unit, with three digits."""
        return f"{size / self.size:.3g}" if abs(size) < 1000 * self.size else f"{size / self.size:,.0f}"


GB: Final = Unit("GB", 1e9)
MB: Final = Unit("MB", 1e6)


def print_dry_run(dry: DryRun, console: Console) -> int:
    """Print the tables of a dry run, then its notes and refusals in one line each.

    Returns:
        The exit status: 0, or 2 if the run would be refused.
    """
    for table in tables(dry):
        console.print(table)
    lines = [*dry.notes, *_closing(dry), *(f"refused: {refusal}" for refusal in dry.refusals)]
    for line in [*lines, "nothing was run"]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 2 if dry.refusals else 0


def tables(dry: DryRun) -> tuple[Table, ...]:
    """Make the tables of a dry run.

    Args:
        dry: the dry run.

    Returns:
        The tables of settings, memory and buffers, and of modelled time if there is one.
    """
    first = (_settings(dry), _memory(dry), _buffers(dry))
    return (*first, _time(dry.planned)) if dry.planned is not None and dry.planned.phases else first


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _settings(dry: DryRun) -> Table:
    config, model = dry.config, dry.config.model_config
    topology, copies = config.topology, config.data * config.fsdp
    tokens = config.prompt_tokens + config.response_tokens
    table = Table(title="settings", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    rows = {
        "model": f"{config.model_name}, {model.layers} layers, {model.num_experts} experts, top-{model.top_k},"
        f" {model.dtype}",
        "ranks": f"{counted(topology.num_nodes, 'node')} x {topology.ranks_per_node}"
        + (f" x {copies} copies (data={config.data}, fsdp={config.fsdp})" if copies > 1 else "")
        + f", {counted(topology.replica_slots, 'replica slot')}, {counted(topology.resident_slots, 'resident slot')}",
        "batch": f"{counted(config.prompts, 'prompt')} x {counted(config.responses_per_prompt, 'response')} of at most"
        f" {config.prompt_tokens} + {config.response_tokens} tokens",
        "step": f"{config.algorithm}, {counted(config.epochs, 'epoch')} x {counted(config.updates, 'update')} x"
        f" {counted(config.micro_batches, 'micro-batch')} of at most {dry.sizes.sequences * tokens:,} tokens a rank",
        "planner": f"{config.planner}, price {config.price}",
        "hardware": f"{dry.hardware.name}, {dry.hardware.memory / 1e9:.1f} GB a device",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _memory(dry: DryRun) -> Table:
    """Make the table of memory: a row for each item, a column for each stage."""
    stages, memory = memory_by_stage(dry.sizes), dry.hardware.memory
    totals = [sum(stage.values()) for stage in stages.values()]
    unit = GB if max(totals) >= GB.size else MB
    table = _table(f"memory of a rank in {unit.name}, computed", "item", *stages)
    for item in dict.fromkeys(item for stage in stages.values() for item in stage):
        sizes = [stage.get(item, 0) for stage in stages.values()]
        if any(sizes):
            table.add_row(item, *(unit.text(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("together", *map(unit.text, totals))
    table.add_row(f"left of {unit.text(memory)}", *(unit.text(memory - total) for total in totals))
    table.add_row("beside them in host memory", unit.text(host_bytes(dry.sizes)))
    return table


def _buffers(dry: DryRun) -> Table:
    """Make the table of buffers of a layer: rows, and bytes of one array of them."""
    model = dry.sizes.config
    row = jnp.dtype(model.dtype).itemsize * model.width
    rows = {"for which the memory above is counted": counted_rows(dry.sizes)}
    if dry.planned is not None:
        rows |= {f"{kind}, under the plan": count for kind, count in dry.planned.rows.items()}
    unit = GB if row * max(rows.values()) >= GB.size else MB
    table = _table("buffers of a rank in a layer", "", "rows", f"{unit.name} an array")
    for name, count in rows.items():
        table.add_row(name, f"{count:,}", unit.text(count * row))
    return table


def _time(planned: Planned) -> Table:
    """Make the table of modelled seconds: phases of a step, then the parts of all of them."""
    columns = [f"{role}, s" for role in ROLES]
    table = _table("modelled time of a step (a model, not a measurement)", "phase", *columns)
    table.add_row("rollout", "not modelled")
    for name, times in planned.phases.items():
        table.add_row(name, *(f"{time.total:.3g}" for time in times))
    step = total_times(planned)
    table.add_section()
    table.add_row("together", *(f"{time.total:.3g}" for time in step))
    between = planned.phases.get(BETWEEN)
    rest = step if between is None else jax.tree.map(operator.sub, step, between)
    for part, text in PARTS.items():
        seconds = [getattr(time, part) for time in rest]
        if any(seconds):
            table.add_row(f"  {text}", *(f"{value:.3g}" for value in seconds))
    if between is not None:
        table.add_row(f"  {BETWEEN}", *(f"{time.total:.3g}" for time in between))
    return table


def total_times(planned: Planned) -> ModelledTimes:
    """Add up the modelled times of the phases of a step."""
    return add_stages(list(planned.phases.values()))


def _closing(dry: DryRun) -> list[str]:
    """Return what the numbers are modelled for, and what it would save to gather experts once."""
    planned = dry.planned
    if planned is None:
        return []
    model, trace = dry.config.model_config, planned.trace
    layers = (
        ""
        if planned.layers == model.moe_layers
        else f", {planned.layers} of {model.moe_layers} layers planned"
    )
    note = f" ({trace.note})" if trace.note else ""
    lines = [
        f"routing: {trace.name}{note}; each token stands for {planned.stretch:.3g}{layers}; planned in"
        f" {planned.seconds:.1f} s (measured, with compilation)"
    ]
    if planned.phases:
        plan, static, balanced = (time.total for time in total_times(planned))
        lines.append(
            f"modelled for {dry.hardware.name}, {planned.way}: {static / plan - 1:+.1%} over static placement,"
            f" {balanced / plan:.1%} of the balanced step"
        )
    else:
        lines.append(f"price={dry.config.price}: no time is modelled")
    if planned.gather_once_saves > 0:
        memory = rank_gigabytes(dataclasses.replace(dry.sizes, gather_once=True))
        if memory <= dry.hardware.memory / 1e9:
            lines.append(
                f"gather_once=True would save {planned.gather_once_saves:.3g} s of a step (modelled);"
                f" a rank would need {memory:.1f} GB (computed)"
            )
    return lines
