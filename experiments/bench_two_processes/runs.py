"""Run the batches of a trace under every planner on one path, count the bytes and time the updates."""

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
from experiments.contenders import ContenderBatch, Samples, draw_samples, even_samples, plan_contender
from experiments.interleaving import interleaved_seconds
from experiments.rank_times import imbalance_over_stages, quotas_of_ranks
from relibra_jax.contract.types import Price, Topology
from relibra_jax.execution import ExpertParallel, expert_mesh, grow_capacities
from relibra_jax.planning.planners import PLANNERS
from relibra_jax.traces.trace import Trace

type TokenPath = Literal["flat", "hierarchical"]
TOLERANCE: Final = 1e-4
"""The largest relative difference of gradient norms; plans differ in the order in which terms are summed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The sizes that are run."""

    micro_batches: tuple[int, ...] = (4, 8, 32)
    """The numbers of micro-batches of an update; each number is a separate batch."""
    samples_per_rank: int = 2
    """The mean number of samples of a rank in a micro-batch."""
    layers: int = 4
    """The number of layers of the stack, at most that of the trace."""
    width: int = 128
    """The model width D."""
    hidden: int = 128
    """The expert width F, which equals D in GPT-OSS."""
    replica_slots: int = 2
    """The number of replica slots of a rank for EPLB."""
    resident_slots: int = 4
    """The number of resident slots of a rank for ReLibra."""
    paths: tuple[TokenPath, ...] = ("flat", "hierarchical")
    """The paths on which bytes are counted."""
    timed_paths: tuple[TokenPath, ...] = ("hierarchical",)
    """The paths on which updates are timed; ``ExpertParallel(path="auto")`` chooses ``hierarchical`` here."""
    repeats: int = 5
    """The number of timed updates of every planner; the planners alternate."""
    gflops: float = 50.0
    """The speed of a core that planners assume, in GFLOP/s."""
    gbytes: float = 1.0
    """The speed of the network that planners assume, in GB/s in each direction."""

    def price(self, num_experts: int, *, hierarchical: bool) -> Price:
        """Return the seconds of each unit of work in an update, which planners use. CPUs run padded exchanges.

        Args:
            num_experts: the number of logical experts of a layer.
            hierarchical: whether tokens take the hierarchical path.
        """
        expert = 3 * self.width * self.hidden
        flops, sent = self.gflops * 1e9, self.gbytes * 1e9
        return Price(
            token=6 * self.width * num_experts / flops,
            copy=6 * expert / flops,
            crossing=CROSSINGS * self.width * FLOAT / sent,
            spread=0.0,
            move=3 * expert * FLOAT / sent,
            push=2 * expert * FLOAT / sent,
            hierarchical=hierarchical,
            between="padded",
            inside="padded",
            spare_room=False,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A compared run: its planner and the slots of its ranks."""

    planner: str
    replica_slots: int = 0
    resident_slots: int = 0
    even: bool = False
    """Whether routing is replaced by even routing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The results of one compared run: seconds on process 0, and bytes in both directions together, for one update."""

    trace: str
    path: TokenPath
    micro_batches: int
    contender: str
    tokens_per_rank: float
    """The mean number of tokens over ranks and micro-batches."""
    rows_imbalance: float
    """The largest rank loads divided by the mean rank loads, each summed over layers and micro-batches."""
    bytes_sent: int
    bytes_of_program: int
    bytes_needed: dict[str, int]
    gradient_norm: float
    prepare_seconds: list[float]
    """The seconds of preparing all tables of the batch, for each timed run."""
    seconds: list[float]
    """The seconds of each timed update; empty if updates were not timed."""


def entrants(settings: Settings) -> dict[str, Entrant]:
    """Return the compared runs by name. A node has one rank, so the replicas of EPLB are on the other node."""
    return {
        "static": Entrant(planner="static"),
        "EPLB": Entrant(planner="eplb_global", replica_slots=settings.replica_slots),
        "ReLibra": Entrant(planner="relibra"),
        "ReLibra + residents": Entrant(planner="relibra", resident_slots=settings.resident_slots),
        "balanced": Entrant(planner="static", even=True),
    }


def run_path(
    trace: Trace, path: TokenPath, settings: Settings, report_progress: Callable[[str], None]
) -> Iterator[Line]:
    """Run every planner with every number of micro-batches on one path.

    Args:
        trace: the recorded routing.
        path: the path of tokens.
        settings: the sizes.
        report_progress: a function that receives a description of each step.

    Yields:
        The results of each number of micro-batches and planner.

    Raises:
        ValueError: if the trace is too short, or the planners' gradients differ.
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
        report_progress(f"{trace.name}, {path}: planning and compiling {name}")
        runs[name] = _Run(entrant, samples, trace, path, settings)
    repeats = settings.repeats if path in settings.timed_paths else 0
    for count in settings.micro_batches:
        report_progress(f"{trace.name}, {path}: running {count} micro-batches")
        yield from _run_count(runs, count, repeats)


class _Run:
    """One compared run on one path, compiled for the batches of all numbers of micro-batches."""

    def __init__(
        self, entrant: Entrant, samples: dict[int, Samples], trace: Trace, path: TokenPath, settings: Settings
    ):
        self.entrant, self.trace, self.path, self.settings = entrant, trace.name, path, settings
        self.topology = _topology(trace, entrant)
        cost = settings.price(trace.num_experts, hierarchical=path == "hierarchical")
        self.batches: dict[int, ContenderBatch] = {}
        capacities = None
        for count, count_samples in samples.items():
            batch = even_samples(count_samples, trace.num_experts) if entrant.even else count_samples
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
        jax.block_until_ready(
            self.update(first, self.update.prepare(first))
        )  # this also connects the processes
        self.program_bytes = [program_bytes(program) for program in self.update.programs]

    def inputs(self, count: int) -> Inputs:
        sizes = {"width": self.settings.width, "hidden": self.settings.hidden}
        return make_inputs(self.batches[count], self.parallel, tokens=self.tokens, **sizes)

    def line(self, name: str, count: int, **results) -> Line:
        batch = self.batches[count]
        tokens = (batch.expert_ids[:, 0, :, :, 0] >= 0).sum(-1)
        begin, add, end = self.program_bytes
        needed = needed_bytes(
            batch,
            self.topology,
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
            rows_imbalance=imbalance_over_stages(quotas_of_ranks(batch.batch_plan.plan.quota).sum(-1)),
            bytes_of_program=begin + count * add + end,
            bytes_needed=needed._asdict(),
            **results,
        )


def _run_count(runs: dict[str, _Run], count: int, repeats: int) -> Iterator[Line]:
    """Yield the results for one number of micro-batches."""
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
            name,
            count,
            bytes_sent=sent[name],
            gradient_norm=norms[name],
            prepare_seconds=prepare_seconds[name],
            seconds=seconds[name],
        )


def _check_norms(norms: dict[str, float]) -> None:
    """Raise an error if the planners' gradient norms differ by more than `TOLERANCE`."""
    reference = norms["static"]
    for name, norm in norms.items():
        if not np.isclose(norm, reference, rtol=TOLERANCE, atol=0):
            raise ValueError(f"{name}: the gradient norm is {norm}, but that of static is {reference}")


def _topology(trace: Trace, entrant: Entrant) -> Topology:
    return Topology(
        num_nodes=2,
        ranks_per_node=1,
        num_experts=trace.num_experts,
        replica_slots=entrant.replica_slots,
        resident_slots=entrant.resident_slots,
    )
