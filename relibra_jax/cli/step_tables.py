"""What `relibra inspect` shows of a trace of several training steps: where it is from, and what changes in them."""

import json
from typing import Final

import numpy as np
from jaxtyping import Float, Int, Integer
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.terminal import wide_table
from relibra_jax.contract.recording import UNKNOWN
from relibra_jax.contract.types import Topology
from relibra_jax.evaluation import Costs, make_setting, run_planner
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.traces.drift import Drift, measure_drift
from relibra_jax.traces.trace import Trace

WIDTH: Final = 110
"""The width of a line of the tables, in characters."""
LEGEND: Final = (
    "age: updates between the weights that sampled a token and those that learned from it",
    "moved: share of token copies that went to other experts than in the step before (total variation distance)",
    "new: share of the hottest eighth of the experts that was not hot in the step before",
    "by chance: the same between two halves of one step, which training does not change; moved and new are between"
    " halves of two steps, so that all compare as many samples; means over layers",
)


def show_provenance(trace: Trace, console: Console) -> None:
    """Print where a trace is from, if it says so."""
    if trace.recording.provenance is None:
        return
    table = Table(title="where it is from", title_justify="left", show_header=False)
    for name, value in trace.recording.provenance.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    console.print(table)


def show_steps(
    trace: Trace, load: Int[np.ndarray, "B L E"], topology: Topology | None, costs: Costs, console: Console
) -> None:
    """Print what changes from step to step, if the trace has tokens of at least two steps.

    Args:
        trace: the trace.
        load: the token copies that every sample sends to every expert.
        topology: the ranks for which plans are priced. None if the experts do not divide over ranks.
        costs: what is priced.
        console: the console to print on.

    Raises:
        ValueError: if the costs name no model or cluster.
    """
    step = trace.recording.step
    if step is None or not trace.replay.mask.any() or step.min() == step.max():
        return
    drift = measure_drift(load, step, trace.recording.prompt)
    console.print(_by_step(trace, step, drift), crop=False, soft_wrap=True)
    console.print(_by_layer(drift), crop=False, soft_wrap=True)
    console.print("\n".join(LEGEND), style="dim", highlight=False)
    if topology is not None:
        setting = make_setting(trace, topology, cost=costs)
        before, now = (
            run_planner(name, PLANNERS[name], setting, timed_runs=0)
            for name in ("eplb_history", "eplb_batch")
        )
        console.print(
            "With replicas placed by the loads of the step before, a step takes"
            f" {before.modelled_seconds / now.modelled_seconds:.3f} times as long as with replicas placed by its own"
            f" loads (modelled; EPLB, imbalance {before.imbalance:.2f} and {now.imbalance:.2f}; {costs.model} on"
            f" {topology.num_ranks} ranks of {costs.cluster}).",
            highlight=False,
        )


def _by_step(trace: Trace, step: Integer[np.ndarray, " B"], drift: Drift) -> Table:
    table = wide_table("step by step", width=WIDTH)
    headings = (
        "step",
        "samples",
        "tokens",
        "mean",
        "p90",
        "longest",
        "reward",
        "age",
        "moved",
        "by chance",
        "new",
    )
    for heading in (*headings, "by chance"):
        table.add_column(heading, justify="right")
    lengths, steps = trace.replay.mask.sum(1), np.unique(step)
    changes = [("", "", "", ""), *(_cells(drift, number) for number in range(len(steps) - 1))]
    for each, cells in zip(steps.tolist(), changes, strict=True):
        chosen = step == each
        table.add_row(
            f"{each}",
            f"{chosen.sum()}",
            f"{lengths[chosen].sum()}",
            f"{lengths[chosen].mean():.0f}",
            f"{np.quantile(lengths[chosen], 0.9):.0f}",
            f"{lengths[chosen].max()}",
            _reward(trace.recording.rewards, chosen),
            _age(trace.recording.versions, each, chosen),
            *cells,
        )
    return table


def _by_layer(drift: Drift) -> Table:
    table = wide_table("layer by layer, mean over steps", width=WIDTH)
    for heading in ("layer", "moved", "by chance", "new", "by chance"):
        table.add_column(heading, justify="right")
    for layer in range(drift.between.distance.shape[1]):
        table.add_row(f"{layer}", *_cells(drift, (slice(None), layer)))
    return table


def _cells(drift: Drift, chosen: int | tuple[slice, int]) -> list[str]:
    pairs = zip(drift.between, drift.by_chance, strict=True)
    return [f"{part[chosen].mean():.1%}" for pair in pairs for part in pair]


def _reward(rewards: Float[np.ndarray, " B"] | None, chosen: np.ndarray) -> str:
    known = np.zeros(0) if rewards is None else rewards[chosen & ~np.isnan(rewards)]
    return f"{known.mean():.3f}" if known.size else "none"


def _age(versions: Integer[np.ndarray, "B T"] | None, step: int, chosen: np.ndarray) -> str:
    known = np.zeros(0) if versions is None else versions[chosen][versions[chosen] != UNKNOWN]
    return f"{step - known.mean():.2f}" if known.size else "unknown"
