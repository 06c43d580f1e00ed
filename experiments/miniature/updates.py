"""Whole updates of all contenders, timed on the ranks of a miniature.

Every rank's process runs ``python -m experiments.miniature.updates SETTINGS``. Contenders alternate, and ranks start
each update together. Rank 0 writes the results.
"""

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.interleaving import alternating
from experiments.miniature.contenders import Run, contenders, draw_batches
from experiments.miniature.counters import sent_bytes
from experiments.miniature.policy import Sizes
from experiments.miniature.quota import whole_core
from experiments.miniature.rates import Rates, cluster_of, measure
from experiments.rl.process_group import join_processes
from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.models import Model
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.programs import keep_programs
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace

TOLERANCE: Final = 1e-4
"""The largest relative difference of losses; plans differ in the order in which terms are summed."""
MEMORY: Final = 4e9
"""The memory of a rank in bytes, which no plan of the miniature fills."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the ranks run."""

    grid: tuple[int, int]
    """The numbers of nodes and of ranks of a node."""
    sizes: Sizes
    """The sizes of the model."""
    trace: str
    """The routing: a name or a path."""
    samples: int
    """The number of samples of a batch."""
    micro_batches: int
    """The number of micro-batches of an update."""
    replica_slots: int
    """The number of replica slots of a rank, for planners that replicate."""
    path: str
    """The path of tokens: ``auto``, ``flat`` or ``hierarchical``."""
    names: tuple[str, ...] | None
    """The contenders that run, None for all."""
    repeats: int
    """The number of timed updates of each contender."""
    out: str
    """The JSON file of the results."""

    def to_json(self) -> str:
        """Return the settings as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Read the settings from text."""
        values = json.loads(text)
        names = values["names"] and tuple(values["names"])
        return cls(
            **values | {"sizes": Sizes(**values["sizes"]), "grid": tuple(values["grid"]), "names": names}
        )


def main(settings: Settings) -> None:
    """Measure the rates, prepare all contenders with the whole core, time their updates, and write the results."""
    keep_programs()
    # Without asynchronous dispatch, programs run in call order, so all processes are always in the same exchange.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with join_processes():
        trace = read_trace(settings.trace)
        draws = draw_batches(trace, samples=settings.samples, layers=settings.sizes.layers, batches=2, seed=0)
        rates = _measure_rates(settings, trace, tokens=int(draws[-1].replay.mask.sum()))
        _say(f"rates {rates}")
        cost = CostModel(cluster=cluster_of(rates, MEMORY), model=_model(settings.sizes, trace))
        runs = {}
        for name, contender in contenders(settings.replica_slots).items():
            if settings.names is None or name in settings.names:
                with whole_core():
                    runs[name] = run = Run(
                        contender,
                        settings.grid,
                        trace.num_experts,
                        sizes=settings.sizes,
                        cost=cost,
                        micro_batches=settings.micro_batches,
                        draws=draws,
                        path=settings.path,
                    )
                    begin = time.perf_counter()
                    loss = float(run.update())
                    _say(f"{name}: loss {loss:.1f}, first {time.perf_counter() - begin:.1f} s")
        timed = {name: functools.partial(_time_update, run) for name, run in runs.items()}
        results = alternating(timed, repeats=settings.repeats, warm_up=0)
        rows = {
            name: {
                "seconds": [result[0] for result in each],
                "fast_bytes": [int(b) for b in each[-1][1]],
                "slow_bytes": [int(b) for b in each[-1][2]],
                "modelled": {part: float(value) for part, value in runs[name].modelled.parts().items()},
            }
            for name, each in results.items()
        }
        import os

        if os.environ.get("PROF"):
            from experiments.miniature.phases import profile
            from experiments.miniature.contenders import update
            import pickle

            for name, run in runs.items():
                with whole_core():
                    text = (
                        update.lower(run.model, run.optimizer, run.batch, run.sequences).compile().as_text()
                    )
                multihost_utils.sync_global_devices("p")
                out = profile(run.update, text)
                pickle.dump((out, text), open(f"/tmp/mini/prof-{name}-{jax.process_index()}.pkl", "wb"))
        if jax.process_index() == 0:
            write_json(
                Path(settings.out),
                {"rates": rates._asdict(), "rows": rows, "settings": dataclasses.asdict(settings)},
            )


def _measure_rates(settings: Settings, trace: Trace, *, tokens: int) -> Rates:
    nodes, local = settings.grid
    topology = Topology(num_nodes=nodes, ranks_per_node=local, num_experts=trace.num_experts, replica_slots=0)
    copies = tokens * settings.sizes.top_k / settings.micro_batches / trace.num_experts
    return measure(
        topology,
        width=settings.sizes.width,
        hidden=settings.sizes.expert_width,
        rows=max(round(copies), 1),
        repeats=15,
    )


def _model(sizes: Sizes, trace: Trace) -> Model:
    width = sizes.width
    return Model(
        moe_layers=sizes.layers,
        num_experts=trace.num_experts,
        top_k=sizes.top_k,
        width=width,
        expert_width=sizes.expert_width,
        shared_width=0,
        attention_params=4 * width**2,
        attention_width=2 * width,
        cache_width=2 * width,
        cache_heads=1,
    )


def _time_update(run: Run) -> tuple[float, np.ndarray, np.ndarray]:
    """Time one update; return the seconds on rank 0 and the bytes that each rank sent over the networks."""
    multihost_utils.sync_global_devices("update")
    before, begin = sent_bytes(), time.perf_counter()
    jax.block_until_ready(run.update())
    seconds = time.perf_counter() - begin
    after = sent_bytes()
    own = np.asarray([after.fast - before.fast, after.slow - before.slow], np.float32)
    of_ranks = multihost_utils.process_allgather(own)
    return seconds, of_ranks[:, 0], of_ranks[:, 1]


def _say(text: Any) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]))
