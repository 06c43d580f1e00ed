"""Whole updates of all contenders, timed on the ranks of a miniature.

Every rank's process runs ``python -m experiments.miniature.updates SETTINGS``. Contenders alternate, and ranks start
each update together. Rank 0 writes the results.
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.interleaving import alternating
from experiments.miniature.contenders import Draw, Run, baseline_of, contenders, draw_batches
from experiments.miniature.counters import sent_bytes
from experiments.miniature.peers import PEERS, import_peers
from experiments.miniature.phases import PHASES, REST, SUMS, scopes_of, seconds_by_phase
from experiments.miniature.policy import FLOAT
from experiments.miniature.quota import whole_core
from experiments.miniature.rates import Rates, measure
from experiments.miniature.sharing import shared_programs
from experiments.miniature.twins import TWINS, Twin, ratios
from experiments.rl.process_group import join_processes
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.programs import keep_programs
from relibra_jax.traces.read import read_trace

TOLERANCE: Final = 1e-4
"""The largest relative difference of first losses; plans differ in the order in which terms are summed."""
LATER: Final = 1e-2
"""The largest relative difference of last losses. Adam turns small differences of small gradients into large ones."""
MEMORY: Final = 4e9
"""The memory of a rank in bytes, which no plan of the miniature fills."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the ranks run."""

    twin: str
    """The name of the twin."""
    grid: tuple[int, int]
    """The numbers of nodes and of ranks of a node."""
    layers: int
    """The number of layers."""
    trace: str | None
    """The routing: a name or a path, as `relibra_jax.traces.read.read_trace` takes it."""
    samples: int
    """The number of samples of an update."""
    micro_batches: int
    """The number of micro-batches of an update."""
    replica_slots: int
    """The number of replica slots of a rank, for planners that replicate."""
    path: str
    """The path of tokens: ``auto``, ``flat`` or ``hierarchical``."""
    exchanges: tuple[str, ...]
    """The kinds of token exchange, each of which all contenders run."""
    names: tuple[str, ...]
    """The contenders that run beside the forced balanced run; all if there are none."""
    repeats: int
    """The number of timed updates of each contender. With 0, only rates are measured."""
    profile: bool
    """Whether one more update of each contender is profiled."""
    out: str
    """The JSON file of the results."""

    def to_json(self) -> str:
        """Return the settings as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Read the settings from text."""
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("grid", "exchanges", "names")})


def main(settings: Settings) -> None:
    """Measure the rates, prepare all contenders with the whole core, time their updates, and write the results."""
    keep_programs()
    # Without asynchronous dispatch, programs run in call order, so all processes are always in the same exchange.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import_peers(name for name in settings.names if name in PEERS)
    with join_processes(), shared_programs():
        trace, twin = read_trace(settings.trace), TWINS[settings.twin]
        draws = draw_batches(trace, samples=settings.samples, layers=settings.layers, seed=0)
        mask = np.asarray(draws[-1].replay.mask)
        tokens = float(mask.sum()) / settings.micro_batches / jax.process_count()
        rates = _measure_rates(settings, tokens)
        cost = CostModel(
            cluster=rates.cluster(MEMORY),
            model=rates.model(twin.sizes(settings.layers), twin.num_experts),
            compute_bytes=FLOAT,
        )
        report: dict[str, Any] = {
            "settings": dataclasses.asdict(settings),
            "rates": rates._asdict(),
            "tokens": tokens,
            "there": twin.real_ratios()._asdict(),
            "here": ratios(cost, tokens=tokens, context=float(mask.sum(1).mean()))._asdict(),
        }
        if settings.repeats:
            runs = _prepare(settings, twin, cost, draws)
            report["rows"] = _measure_rows(runs, rates, settings.repeats)
        _write(report, settings)
        if settings.repeats and settings.profile:
            for name, run in runs.items():
                report["rows"][name]["phases"] = _profile(run)
            _write(report, settings)


def _write(report: dict[str, Any], settings: Settings) -> None:
    if jax.process_index() == 0:
        write_json(Path(settings.out), report)


def _prepare(settings: Settings, twin: Twin, cost: CostModel, draws: list[Draw]) -> dict[str, Run]:
    """Prepare and compile the contenders, and run each once.

    Raises:
        ValueError: if their losses differ, apart from that of the forced balanced run.
    """
    runs: dict[str, Run] = {}
    losses: dict[str, float] = {}
    known = contenders(settings.replica_slots, settings.exchanges)
    for name, contender in known.items():
        if (contender.peer or settings.names) and name not in (*settings.names, baseline_of(known)):
            continue
        with whole_core():
            begin = time.perf_counter()
            runs[name] = run = Run(
                contender,
                settings.grid,
                twin.num_experts,
                sizes=twin.sizes(settings.layers),
                cost=cost,
                micro_batches=settings.micro_batches,
                draws=draws,
                path=settings.path,
            )
            planned, loss = time.perf_counter() - begin, float(run.update())
        ready = time.perf_counter() - begin - planned
        _say(f"{name}: prepared in {planned:.0f} s, compiled and run once in {ready:.0f} s, loss {loss:.2f}")
        if not contender.even:
            losses[name] = loss
    _check_losses(losses, TOLERANCE)
    return runs


def _check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Raise ValueError if a loss differs from the first one."""
    for name, loss in losses.items():
        if not np.isclose(loss, first := next(iter(losses.values())), rtol=tolerance, atol=0):
            raise ValueError(f"{name}: the loss is {loss}, but that of {next(iter(losses))} is {first}")


def _measure_rows(runs: dict[str, Run], rates: Rates, repeats: int) -> dict[str, Any]:
    """Time the updates of all contenders, and return the results by name.

    Raises:
        ValueError: if the losses of the last updates differ, apart from those of balanced runs.
    """
    timed = {name: functools.partial(_time_update, run) for name, run in runs.items()}
    results = alternating(timed, repeats=repeats, warm_up=0)
    losses = {name: each[-1][3] for name, each in results.items()}
    _check_losses({name: loss for name, loss in losses.items() if not runs[name].contender.even}, LATER)
    return {
        name: {
            "seconds": [seconds for seconds, *_ in each],
            "loss": losses[name],
            "fast_bytes": each[-1][1].tolist(),
            "slow_bytes": each[-1][2].tolist(),
            "needed": runs[name].needed,
            "modelled": None if runs[name].contender.peer else runs[name].modelled(rates),
            "predicted": None if runs[name].contender.peer else runs[name].predicted(rates),
            "phases": None,
        }
        for name, each in results.items()
    }


def _measure_rates(settings: Settings, tokens: float) -> Rates:
    nodes, local = settings.grid
    twin = TWINS[settings.twin]
    topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=twin.num_experts, replica_slots=0)
    return measure(topology, twin.sizes(settings.layers), tokens=round(tokens), repeats=15)


def _time_update(run: Run) -> tuple[float, np.ndarray, np.ndarray, float]:
    """Time one update; return the seconds on rank 0, the bytes of each rank over each network, and the loss."""
    multihost_utils.sync_global_devices("update")
    before, begin = sent_bytes(), time.perf_counter()
    loss = jax.block_until_ready(run.update())
    seconds = time.perf_counter() - begin
    after = sent_bytes()
    own = np.asarray([after.fast - before.fast, after.slow - before.slow], np.float32)
    of_ranks = multihost_utils.process_allgather(own)
    return seconds, of_ranks[:, 0], of_ranks[:, 1], float(loss)


def _profile(run: Run) -> dict[str, list[float]]:
    """Profile one update; return the seconds of each phase on each rank."""
    with whole_core():
        scopes = json.loads(_from_first(lambda: json.dumps(scopes_of(run.program()))))
    own = seconds_by_phase(run.update, scopes)
    names = (*PHASES, SUMS, REST)
    of_ranks = multihost_utils.process_allgather(
        np.asarray([own.get(name, 0.0) for name in names], np.float32)
    )
    return {name: each.tolist() for name, each in zip(names, of_ranks.reshape(-1, len(names)).T, strict=True)}


def _from_first(make: Callable[[], str]) -> str:
    """Make a text on rank 0, and return it on all ranks."""
    text = np.frombuffer((make() if jax.process_index() == 0 else "").encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    sent = multihost_utils.broadcast_one_to_all(
        np.resize(text, length) if len(text) else np.zeros(length, np.uint8)
    )
    return np.asarray(sent).tobytes().decode()


def _say(text: Any) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]))
