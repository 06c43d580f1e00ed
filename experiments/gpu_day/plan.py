"""The plan whose group sizes the measurements use, made on the CPU and stored next to the record."""

from pathlib import Path

import numpy as np

from experiments.gpu_day.steps import PLAN
from experiments.ladder.facts import print_facts
from relibra_jax.contract.types import Topology

MICRO_BATCHES, LAYERS, SAMPLES_PER_RANK = 4, 2, 4


def make_plan(folder: str, trace: str | None, *, rehearsal: bool = False) -> None:
    """Plan a batch of a trace for 2 x 4 ranks with every planner, and write the quotas to a file.

    Args:
        folder: the folder for the file.
        trace: the name or path of a trace. None stands for the trace in this project.
        rehearsal: whether to plan only one micro-batch of one layer.
    """
    from experiments.contenders import contenders
    from relibra_jax.traces.read import read_trace

    recorded = read_trace(trace)
    topology = plan_topology(recorded.num_experts)
    by_name = contenders(
        recorded,
        topology,
        micro_batches=1 if rehearsal else MICRO_BATCHES,
        samples_per_rank=1 if rehearsal else SAMPLES_PER_RANK,
        layers=1 if rehearsal else LAYERS,
    )
    quotas = {name: np.asarray(contender.batch_plan.plan.quota) for name, contender in by_name.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / PLAN).open("wb") as file:
        np.savez(file, **quotas)  # type: ignore[arg-type]
    print_facts(
        trace=recorded.name,
        experts=recorded.num_experts,
        planners=list(quotas),
        shape=list(quotas["relibra"].shape),
    )


def read_quotas(folder: str) -> dict[str, np.ndarray]:
    """Return the quotas ``[M L N G S]`` of every planner, by its name."""
    with np.load(Path(folder) / PLAN, allow_pickle=False) as file:
        return dict(file)


def plan_topology(num_experts: int) -> Topology:
    """Return the topology of the expert-parallel group for which the plan is made."""
    return Topology(num_nodes=2, ranks_per_node=4, num_experts=num_experts, replica_slots=2)
