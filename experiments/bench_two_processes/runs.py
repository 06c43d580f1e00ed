"""What is run: a trace's batches under every contender on one path, bytes counted and updates timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Final, Literal

import jax
import numpy as np

from experiments.bench_two_processes.crossing_bytes import (
    CROSSINGS,
    FLOAT,
    loopback_bytes,
    needed_bytes,
    program_bytes,
)
from experiments.bench_two_processes.update import Inputs, Update, make_inputs
from experiments.contenders import ContenderBatch, Samples, draw_samples, plan_contender, route_evenly
from experiments.interleaving import interleaved_seconds
from relibra_jax.execution import ExpertParallel, expert_mesh, grow_capacities
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.traces.trace import Trace
from relibra_jax.types import Topology, UnitTimes

type TokenPath = Literal["flat", "hierarchical"]
TOLERANCE: Final = 1e-4
"""How far gradients' norms may be apart, relatively: the terms of a sum come in another order under another plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of what is run."""

    micro_batches: tuple[int, ...] = (4, 8, 32)
    """Micro-batches of an update: each number is a batch of its own."""
    samples_per_rank: int = 2
    """Samples of a rank in a micro-batch, on average."""
    layers: int = 4
    """Layers of the stack; at most those that the trace has."""
    width: int = 128
    """D."""
    hidden: int = 128
    """F, as large as D in GPT-OSS."""
    replica_slots: int = 2
    """EPLB's replica slots of a rank."""
    resident_slots: int = 4
    """ReLibra's resident slots of a rank."""
    paths: tuple[TokenPath, ...] = ("flat", "hierarchical")
    """The paths on which bytes are counted."""
    timed_paths: tuple[TokenPath, ...] = ("hierarchical",)
    """Those on which updates are timed: ``hierarchical`` is what ``ExpertParallel(path="auto")`` takes here."""
    repeats: int = 5
    """Timed runs of every contender, in turns."""
    gflops: float = 50.0
    """What planners are told of a core: GFLOP/s."""
    gbytes: float = 1.0
    """What planners are told of the network: GB/s in each direction."""

    def unit_times(self, num_experts: int, *, hierarchical: bool) -> UnitTimes:
        """What planners are told: the seconds of one unit of work in an update."""
        expert = 3 * self.width * self.hidden
        flops, sent = self.gflops * 1e9, self.gbytes * 1e9
        return UnitTimes(
            token=6 * self.width * num_experts / flops,
            copy=6 * expert / flops,
            crossing=CROSSINGS * self.width * FLOAT / sent,
            spread=0.0,
            move=3 * expert * FLOAT / sent,
            push=2 * expert * FLOAT / sent,
            hierarchical=hierarchical,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender: its planner, and the slots that ranks have for it."""

    planner: str
    replica_slots: int = 0
    resident_slots: int = 0
    even: bool = False
    """Whether routing is forced to be even."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """What was found of one contender: seconds of process 0, bytes of both directions together, of one update."""

    trace: str
    path: TokenPath
    micro_batches: int
    contender: str
    tokens_per_rank: float
    """The mean over ranks and micro-batches."""
    rows_imbalance: float
    """Token copies of the fullest ranks over those of the mean ranks, each summed over layers and micro-batches."""
    bytes_sent: int
    bytes_of_program: int
    bytes_needed: dict[str, int]
    gradient_norm: float
    prepare_seconds: list[float]
    """Of all tables of the batch."""
    seconds: list[float]
    """Of an update; empty where it was not timed."""


def entrants(settings: Settings) -> dict[str, Entrant]:
    """The contenders by name. Nodes of one rank have no room for replicas inside a node: EPLB's go across."""
    return {
        "static": Entrant(planner="static"),
        "EPLB": Entrant(planner="eplb_global", replica_slots=settings.replica_slots),
        "ReLibra": Entrant(planner="relibra"),
        "ReLibra + residents": Entrant(planner="relibra", resident_slots=settings.resident_slots),
        "balanced": Entrant(planner="static", even=True),
    }


def run_path(trace: Trace, path: TokenPath, settings: Settings, say: Callable[[str], None]) -> Iterator[Line]:
    """Run every contender with every number of micro-batches on one path.

    Args:
        trace: the routing.
        path: the path of tokens.
        settings: the sizes.
        say: told what is going on.

    Returns:
        A Line of each number of micro-batches and contender.

    Raises:
        ValueError: if the trace is too short, or contenders do not have the same gradient.
    """
    layers = min(settings.layers, trace.replay.expert_ids.shape[2])
    topology = _topology(trace, Entrant(planner="static"))
    options = {"samples_per_rank": settings.samples_per_rank, "layers": layers}
    samples = {
        count: draw_samples(trace, topology, micro_batches=count, **options)
        for count in settings.micro_batches
    }
    runs = {}
    for name, entrant in entrants(settings).items():
        say(f"{trace.name}, {path}: planning and compiling {name}")
        runs[name] = _Run(entrant, samples, trace, path, settings)
    repeats = settings.repeats if path in settings.timed_paths else 0
    for count in settings.micro_batches:
        say(f"{trace.name}, {path}: running {count} micro-batches")
        yield from _run_count(runs, count, repeats)


class _Run:
    """One contender on one path, compiled for the batches of all numbers of micro-batches."""

    def __init__(
        self, entrant: Entrant, samples: dict[int, Samples], trace: Trace, path: TokenPath, settings: Settings
    ):
        self.entrant, self.trace, self.path, self.settings = entrant, trace.name, path, settings
        self.topology = _topology(trace, entrant)
        cost = settings.unit_times(trace.num_experts, hierarchical=path == "hierarchical")
        self.batches: dict[int, ContenderBatch] = {}
        capacities = None
        for count, drawn in samples.items():
            batch = route_evenly(drawn, trace.num_experts) if entrant.even else drawn
            self.batches[count] = plan_contender(batch, entrant.planner, self.topology, cost=cost)
            capacities = grow_capacities(capacities, self.batches[count].capacities)
        self.tokens = max(batch.expert_ids.shape[3] for batch in self.batches.values())
        self.parallel = ExpertParallel(
            mesh=expert_mesh(self.topology, devices=jax.devices()[: self.topology.num_ranks]),
            topology=self.topology,
            capacities=capacities,
            path=path,
            across_nodes=PLANNERS[entrant.planner].across_nodes,
        )
        first = self.inputs(min(samples))
        self.update = Update(self.parallel, first)
        jax.block_until_ready(self.update(first, self.update.prepare(first)))  # connects, too
        self.program_bytes = [program_bytes(program) for program in self.update.programs]

    def inputs(self, count: int) -> Inputs:
        sizes = {"width": self.settings.width, "hidden": self.settings.hidden}
        return make_inputs(self.batches[count], self.parallel, tokens=self.tokens, **sizes)

    def line(self, name: str, count: int, **found) -> Line:
        batch = self.batches[count]
        load, tokens = batch.rank_load, (batch.expert_ids[:, 0, :, :, 0] >= 0).sum(-1)
        begin, add, end = self.program_bytes
        needed = needed_bytes(
            *(batch, self.topology),
            hierarchical=self.path == "hierarchical",
            width=self.settings.width,
            hidden=self.settings.hidden,
        )
        return Line(
            trace=self.trace,
            path=self.path,
            micro_batches=count,
            contender=name,
            tokens_per_rank=float(tokens.mean()),
            rows_imbalance=float(load.max((2, 3)).sum() / load.mean((2, 3)).sum()),
            bytes_of_program=begin + count * add + end,
            bytes_needed=needed._asdict(),
            **found,
        )


def _run_count(runs: dict[str, _Run], count: int, repeats: int) -> Iterator[Line]:
    """The lines of one number of micro-batches."""
    inputs = {name: run.inputs(count) for name, run in runs.items()}
    preparations = {name: functools.partial(run.update.prepare, inputs[name]) for name, run in runs.items()}
    prepare_seconds = interleaved_seconds(preparations, repeats=max(repeats, 1))
    updates = {
        name: functools.partial(runs[name].update, inputs[name], prepare())
        for name, prepare in preparations.items()
    }
    sent, norms = {}, {}
    for name, update in updates.items():
        before = loopback_bytes()
        norms[name] = float(jax.block_until_ready(update()).norm)
        sent[name] = loopback_bytes() - before
    _check_norms({name: norm for name, norm in norms.items() if not runs[name].entrant.even})
    seconds = interleaved_seconds(updates, repeats=repeats) if repeats else {name: [] for name in updates}
    for name, run in runs.items():
        yield run.line(
            *(name, count),
            bytes_sent=sent[name],
            gradient_norm=norms[name],
            prepare_seconds=prepare_seconds[name],
            seconds=seconds[name],
        )


def _check_norms(norms: dict[str, float]) -> None:
    """Raise unless all contenders have the same gradient."""
    reference = norms["static"]
    for name, norm in norms.items():
        if not np.isclose(norm, reference, rtol=TOLERANCE, atol=0):
            raise ValueError(f"{name}: the gradient's norm is {norm}, that of static is {reference}")


def _topology(trace: Trace, entrant: Entrant) -> Topology:
    return Topology(
        num_nodes=2,
        ranks_per_node=1,
        num_experts=trace.num_experts,
        replica_slots=entrant.replica_slots,
        resident_slots=entrant.resident_slots,
    )
