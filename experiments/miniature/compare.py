"""Measure planners on a twin: the rates of the machine first, then the links that they call for, then whole updates."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Final

from experiments.miniature.cluster import Miniature, rate_of
from experiments.miniature.contenders import EXCHANGES, contenders, draw_batches
from experiments.miniature.launch import run_on_ranks
from experiments.miniature.peers import PEERS, why_no_peer
from experiments.miniature.report import agreement, describe_machine, draw_speeds, make_tables, speeds
from experiments.miniature.twins import TWINS, Twin
from experiments.miniature.updates import Settings
from experiments.program import TraceName, wide_console
from relibra_jax.cost.models import MODELS
from relibra_jax.routing.exchange_rules import AUTO
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.limits import check_integer
from relibra_jax.support.suggestions import suggest_names
from relibra_jax.traces.read import read_trace

NOMINAL: Final = {"slow": "400mbit", "fast": "3gbit"}
"""The links with which the rates of the machine are measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Time whole updates under every planner on a scaled twin of a real model and cluster."""

    trace: TraceName = None
    """The routing: a name (recorded, synthetic-128, ...) or the path of an .npz file."""
    twin: str = "gpt-oss-20b"
    """The name of the twin."""
    nodes: int = 2
    """The number of nodes."""
    ranks: int = 4
    """The number of ranks of a node."""
    core: float = 0.24
    """The share of a core of each rank."""
    threads: int = 1
    """The number of threads of each rank. With one, nothing runs beside an exchange. Fitted exchanges need 1."""
    slow: str | None = None
    """The rate of the slow network, if it should not have the twin's ratio."""
    fast: str | None = None
    """The rate of the fast network, likewise."""
    layers: int = 4
    """The number of layers."""
    samples: int | None = None
    """The number of samples of an update. None takes six sevenths of the trace; homes are found from the rest."""
    micro_batches: int = 32
    """The number of micro-batches of an update."""
    replica_slots: int = 1
    """The number of replica slots of a rank, for planners that replicate."""
    path: str = "auto"
    """The path of tokens: auto, flat or hierarchical."""
    exchanges: tuple[str, ...] = (AUTO,)
    """The exchanges of tokens, each of which all contenders run: auto, padded, fitted, emulated, or one of them as in
    "fitted, not striped" or "padded, 2 pieces". 100% is the forced balanced run with the first."""
    contenders: tuple[str, ...] = ()
    """The names of the runs to compare with the forced balanced run. Without any, all are compared except the expert
    layers of MaxText and Tunix (`experiments.miniature.peers`)."""
    repeats: int = 5
    """The number of timed updates of each run. Runs alternate."""
    profile: bool = True
    """Whether one more update of each is profiled."""
    out: Path = Path("out/miniature")
    """The folder of the results."""


def compare(options: Compare) -> int:
    """Run the comparison; return the exit status.

    Raises:
        ValueError: if the twin is unknown, or a number is out of range.
    """
    twin = TWINS.get(options.twin)
    if twin is None:
        raise ValueError(f"twin={options.twin!r}: no such twin{suggest_names(options.twin, TWINS)}")
    check_integer("repeats", options.repeats, least=1)
    check_integer("replica_slots", options.replica_slots, least=0)
    if not options.exchanges or set(options.exchanges) - set(EXCHANGES):
        raise ValueError(f"exchanges={options.exchanges} must be one or more of {list(EXCHANGES)}")
    names = contenders(options.replica_slots, options.exchanges)
    if unknown := set(options.contenders) - set(names):
        raise ValueError(f"contenders={sorted(unknown)} are not among {', '.join(names)}")
    for name in set(options.contenders) & set(PEERS):
        if reason := why_no_peer(name):
            raise ValueError(f"contenders: {reason}")
    samples = _check_trace(options, twin)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        twin=options.twin,
        grid=(options.nodes, options.ranks),
        layers=options.layers,
        trace=options.trace,
        samples=samples,
        micro_batches=options.micro_batches,
        replica_slots=options.replica_slots,
        path=options.path,
        exchanges=options.exchanges,
        names=options.contenders,
        repeats=0,
        profile=options.profile,
        out=str(options.out / "rates.json"),
    )
    miniature = Miniature(
        nodes=options.nodes, ranks=options.ranks, core=options.core, threads=options.threads, **NOMINAL
    )
    if status := _run(miniature, settings):
        return status
    rates = json.loads((options.out / "rates.json").read_text())["rates"]
    slow, fast = _links(options, twin, rates)
    miniature = dataclasses.replace(miniature, slow=slow, fast=fast)
    print(f"links: {miniature.slow} between nodes, {miniature.fast} inside", file=sys.stderr)
    path = options.out / f"{options.twin}-{options.nodes}x{options.ranks}-{options.micro_batches}.json"
    settings = dataclasses.replace(settings, repeats=options.repeats, out=str(path))
    if status := _run(miniature, settings):
        return status
    report = json.loads(path.read_text()) | describe_machine() | {"links": dataclasses.asdict(miniature)}
    # The results are the same in any folder.
    del report["settings"]["out"]
    report["settings"]["trace"] = report["trace"] = Path(options.trace).name if options.trace else "recorded"
    report["agreement"] = agreement(speeds(report["rows"]))._asdict()
    write_json(path, report)
    draw_speeds(path.with_suffix(".png"), report)
    console = wide_console()
    for table in make_tables(report):
        console.print(table)
    console.print(f"model: {report['agreement']}; numbers and figure: {path}, {path.with_suffix('.png')}")
    return 0


def _check_trace(options: Compare, twin: Twin) -> int:
    """Check that the trace fits the twin; return the number of samples of an update."""
    trace = read_trace(options.trace)
    real = MODELS[twin.model]
    found = trace.num_experts, trace.replay.expert_ids.shape[-1]
    if found != (real.num_experts, real.top_k):
        raise ValueError(
            f"{trace.name} has {found[0]} experts and top-{found[1]}, but twin={options.twin!r} has"
            f" {real.num_experts} and top-{real.top_k}"
        )
    samples = len(trace.replay.mask) * 6 // 7 if options.samples is None else options.samples
    before, batch = draw_batches(trace, samples=samples, layers=options.layers, seed=0)
    fewest = min(len(before.tokens), len(batch.tokens))
    check_integer("micro_batches", options.micro_batches, least=1)
    if options.micro_batches > fewest:
        raise ValueError(
            f"micro_batches={options.micro_batches} exceeds the {fewest} samples of a batch (samples={samples} of"
            f" {len(trace.replay.mask)}, and at most as many others for the batch before it)"
        )
    return samples


def _run(miniature: Miniature, settings: Settings) -> int:
    return run_on_ranks(
        miniature, [sys.executable, "-m", "experiments.miniature.updates", settings.to_json()]
    )


def _links(options: Compare, twin: Twin, rates: dict[str, Any]) -> tuple[str, str]:
    """Return the rates of links with which exchanges, which reach a share of them, have the twin's ratios."""
    slow, fast = (
        f"{8 * needed * rate_of(NOMINAL[name]) / rates[name] / 1e6:.0f}mbit" if rates[name] else NOMINAL[name]
        for name, needed in zip(("slow", "fast"), twin.links(rates["flops"]), strict=True)
    )
    return options.slow or slow, options.fast or fast
