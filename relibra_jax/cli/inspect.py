"""``relibra inspect``: describes the size of a trace, how unevenly it uses experts, and how long attention waits."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table

from relibra_jax.cli.options import TraceName
from relibra_jax.cli.step_tables import show_provenance, show_steps
from relibra_jax.contract.types import Price, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.long_samples import least_waits, split_exchange, split_waits
from relibra_jax.cost.models import MODELS
from relibra_jax.evaluation import Costs, Ranks
from relibra_jax.planning.starts import start_assignment
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.statistics import (
    PAIRS_EXPECTED,
    contiguous_imbalance,
    count_load,
    hot_expert_churn,
    hottest_expert,
    load_spread,
    micro_batch_load,
    neighbour_correlation,
    pair_lift,
)
from relibra_jax.traces.trace import Trace

RANKS: Final = 8
"""The number of ranks for which the imbalance is computed."""
MICRO_BATCHES: Final = (1, 4, 16)
"""The numbers of micro-batches for which the imbalance is computed. Neighbours are compared at the last number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Describe a trace: its size, how unevenly its experts are used, and how fast that changes."""

    trace: TraceName = None
    """The trace: a name (recorded, synthetic-128, W2, ...) or the path of an .npz file."""
    model: str = Costs.model
    """The model whose attention is priced: gpt-oss-20b, qwen3-235b-a22b, deepseek-v3 and others."""
    cluster: str = Costs.cluster
    """The cluster on which it is priced: h100, h200, gb200-nvl72 and others."""


def run_inspect(options: Inspect, console: Console) -> None:
    """Print a table that describes a trace, where it is from, and what changes from step to step if it has steps.

    Args:
        options: the name or path of the trace.
        console: the console that the table is printed on.

    Raises:
        ValueError: if the trace does not exist or is malformed, or the model or the cluster is unknown.
    """
    trace = read_trace(options.trace)
    lengths = trace.replay.mask.sum(1)
    layers, top_k = trace.replay.expert_ids.shape[2:]
    load = count_load(trace.replay, trace.num_experts)
    by_expert = load.sum(0)
    unused = int((by_expert == 0).sum())
    table = Table(title=trace.name, title_justify="left", show_header=False)
    for name, value in (
        ("samples", f"{len(lengths)}"),
        ("domains", _domains(trace)),
        (
            "tokens",
            f"{lengths.sum()}"
            + (f" ({lengths.min()} to {lengths.max()} per sample)" if lengths.any() else ""),
        ),
        ("MoE layers", f"{layers}"),
        ("experts", f"{trace.num_experts}, top-{top_k}"),
        # Every layer routes every token, so without tokens no layer has a mean load.
        ("load of the hottest expert / mean", _by_layer(hottest_expert, by_expert)),
        ("experts never used", f"{unused} of {by_expert.size} over all layers"),
        *(_balance(trace, load) if lengths.any() else ()),
        *(_attention(np.asarray(lengths), options) if lengths.any() else ()),
        ("note", trace.note or "none"),
    ):
        table.add_row(name, value)
    console.print(table)
    show_provenance(trace, console)
    topology = None
    if not trace.num_experts % RANKS:
        topology = Ranks(nodes=1, ranks_per_node=RANKS).topology(trace.num_experts)
    show_steps(trace, load, topology, Costs(model=options.model, cluster=options.cluster), console)


def _balance(trace: Trace, load: Int[np.ndarray, "B L E"]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table for a trace that has tokens: a name and a value each."""
    yield "spread of expert loads", f"{_by_layer(load_spread, load.sum(0))} (standard deviation / mean)"
    if trace.replay.expert_ids.shape[-1] > 1:
        lift = pair_lift(trace.replay, trace.num_experts)
        frequency = f"{lift.mean.mean():.2f} times as often as by chance (mean)"
        yield "pairs of experts used together", f"{frequency}, {_largest_lift(lift.largest)}"
    *fewer, most = sorted({min(number, len(load)) for number in MICRO_BATCHES})
    name = f"imbalance of {RANKS} ranks, static placement"
    value = f"not computed: {trace.num_experts} experts do not divide evenly"
    if not trace.num_experts % RANKS:
        parts = [(number, micro_batch_load(load, number)) for number in (*fewer, most)]
        value = ", ".join(f"{contiguous_imbalance(part, RANKS):.2f} with {number}" for number, part in parts)
        value += " micro-batches for the whole trace"
    yield name, value
    if fewer:
        loads = micro_batch_load(load, most)
        churn = f"{hot_expert_churn(loads):.0%} of the hottest eighth"
        yield f"hot experts new in the next of {most} micro-batches", churn
        yield "correlation of neighbouring micro-batches' loads", f"{neighbour_correlation(loads):.2f}"


def _largest_lift(largest: Float[np.ndarray, " L"]) -> str:
    """Return what a line says of the largest lift of each layer, NaN where chance produces no pair often enough."""
    if np.isnan(largest).all():
        return f"too few tokens for the largest: chance gives no pair {PAIRS_EXPECTED} times"
    return f"at most {np.nanmax(largest):.1f} times among pairs that chance gives at least {PAIRS_EXPECTED} times"


def _attention(lengths: Int[np.ndarray, " B"], options: Inspect) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table that say how long ranks wait for those with the longest samples."""
    model, cluster = look_up("model=", options.model, MODELS), look_up("cluster=", options.cluster, CLUSTERS)
    cost_model = CostModel(model=model, cluster=cluster)
    # Experts do not matter for attention, but models are padded to a number that divides over the ranks.
    experts = -(-model.num_experts // RANKS) * RANKS
    topology = Topology(num_nodes=1, ranks_per_node=RANKS, num_experts=experts, replica_slots=0)
    numbers = sorted({min(number, len(lengths)) for number in MICRO_BATCHES})
    exchange = split_exchange(cost_model, topology)
    packed, least, split = zip(
        *(_waits(lengths, topology, number, cost_model.price(topology), exchange) for number in numbers),
        strict=True,
    )
    for name, values, note in (
        (f"imbalance of attention of {RANKS} ranks", packed, ""),
        ("the same, at least, with whole samples", least, ""),
        (
            "the same, with long samples split over a node",
            split,
            f", if above {exchange:.0f} tokens (modelled)",
        ),
    ):
        ratios = ", ".join(
            f"{value:.2f} with {number}" for number, value in zip(numbers, values, strict=True)
        )
        yield name, f"{ratios} micro-batches{note}"


def _waits(
    lengths: Int[np.ndarray, " B"], topology: Topology, micro_batches: int, price: Price, exchange: float
) -> tuple[float, float, float]:
    """Return the attention of the busiest ranks / the mean: as packed, at least, and with long samples split."""
    packing = start_assignment(lengths, topology, num_micro_batches=micro_batches, price=price).sample
    held = np.append(lengths, 0).astype(float)[np.asarray(packing)]  # position -1 holds no sample
    mean = (held**2).sum() / topology.num_ranks
    sizes = {"num_micro_batches": micro_batches}
    least = least_waits(lengths, topology, tokens_per_rank=int(held.sum(-1).max()), **sizes)
    split = split_waits(lengths, topology, exchange=exchange, **sizes)
    waits = float((held**2).sum(-1).max((1, 2)).sum())
    return waits / mean, least / mean, split / mean


def _by_layer(measure: Callable[[np.ndarray], np.ndarray], load: Int[np.ndarray, "L E"]) -> str:
    if not load.any():
        return "none, because there are no tokens"
    values = measure(load)
    return f"{values.min():.2f} to {values.max():.2f} over layers, median {np.median(values):.2f}"


def _domains(trace: Trace) -> str:
    if len(trace.domains) < 2:
        return "not recorded"
    sizes = np.bincount(trace.domain)
    return f"{len(sizes)}, with {sizes.min()} to {sizes.max()} samples each"
