"""The plan that speeds are measured under, made on the CPU and kept as a file beside the record."""

from pathlib import Path
from typing import Final

import numpy as np

from experiments.gpu_day.facts import say
from relibra_jax.types import Topology

FILE: Final = "plan.npz"
MICRO_BATCHES, LAYERS, SAMPLES_PER_RANK = 4, 2, 4


def make_plan(folder: str, trace: str | None, *, rehearsal: bool) -> None:
    """Plan a batch of a trace for 2 x 4 ranks with every contender, and write the quotas down.

    Args:
        folder: the folder of the plan.
        trace: a trace by name or path; None for the one of this project.
        rehearsal: whether one micro-batch of one layer is enough.
    """
    from experiments.contenders import contenders
    from relibra_jax.traces.read import read_trace

    read = read_trace(trace)
    topology = plan_topology(read.num_experts)
    by_name = contenders(
        read,
        topology,
        micro_batches=1 if rehearsal else MICRO_BATCHES,
        samples_per_rank=1 if rehearsal else SAMPLES_PER_RANK,
        layers=1 if rehearsal else LAYERS,
    )
    quotas = {name: np.asarray(contender.batch_plan.plan.quota) for name, contender in by_name.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / FILE).open("wb") as file:
        np.savez(file, **quotas)  # type: ignore[arg-type]
    say(trace=read.name, experts=read.num_experts, planners=list(quotas), shape=list(quotas["relibra"].shape))


def read_quotas(folder: str) -> dict[str, np.ndarray]:
    """The quotas ``[M L N G S]`` of every contender."""
    with np.load(Path(folder) / FILE, allow_pickle=False) as file:
        return dict(file)


def plan_topology(num_experts: int) -> Topology:
    """The expert-parallel group that is planned for."""
    return Topology(num_nodes=2, ranks_per_node=4, num_experts=num_experts, replica_slots=2)
