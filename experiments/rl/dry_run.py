"""A dry run: the reasons to refuse a run, the memory that it needs, and the modelled time of a step. Nothing runs.

Refusals, and the sizes that determine memory, come from the functions that a run calls. Only the devices are described
in place of real ones. `experiments.rl.dry_plan` plans a batch for them.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import jax

from experiments.model_memory import check_device, check_host
from experiments.rl.configs import Train
from experiments.rl.dry_plan import Hardware, Planned, find_trace, plan_batch
from experiments.rl.prompt_files import read_files
from experiments.rl.prompts import Prompts, find_run_task, find_tokenizer
from experiments.rl.state import run_sizes
from experiments.rl.task_mixtures import find_tasks
from experiments.rl.train import check_planner
from experiments.rl.writers import find_writer
from experiments.step_memory import RunSizes, counted_rows
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.models.load_checks import memory_of_device
from relibra_jax.nnx.derived_cost import DEFAULT_CLUSTER, cluster_of
from relibra_jax.support.suggestions import look_up

CPU_CLUSTER: Final = "cpu-host"


class DryRun(NamedTuple):
    """What is known of a run before it starts."""

    config: Train
    hardware: Hardware
    sizes: RunSizes
    """The sizes of which `experiments.step_memory` counts the memory."""
    refusals: tuple[str, ...]
    """The reasons for which the run would not start, one line each."""
    notes: tuple[str, ...]
    """What a reader has to know of the numbers, one line each."""
    planned: Planned | None
    """The plan of a batch. None if there is none."""


def dry_run(
    config: Train, *, trace: str | None = None, cluster: str | None = None, plan: bool = True
) -> DryRun:
    """Count what a run would need, without its devices.

    Args:
        config: the settings of the run.
        trace: the name or path of a trace with the model's number of experts and top-k. None takes the recorded trace
            or a synthetic one.
        cluster: the name of a cluster of `relibra_jax.cost.hardware.CLUSTERS`. None takes the devices of this machine;
            for a model without a checkpoint, `DEFAULT_CLUSTER`.
        plan: whether to plan a batch, which takes most of the time.

    Raises:
        ValueError: if there is no such cluster or trace, or the trace does not fit the model.
    """
    hardware, sizes = find_hardware(config, cluster), run_sizes(config)
    refusals = find_refusals(config, hardware, sizes)
    notes, planned = [], None
    if config.lacks_checkpoint:
        notes.append(
            f"{config.model} does not exist: sizes are those published for {config.model_name}; a run needs the"
            " checkpoint with its config.json and tokenizer, and the task's prompts are not encoded here"
        )
    if config.engine:
        notes.append(f"servers are not asked: {' '.join(config.engine)}")
    if not config.replay:
        notes.append("replay=False: updates follow no plan, so no time is modelled")
    elif plan:
        drawn = find_trace(config.model_config, trace)
        planned = plan_batch(config, hardware, drawn)
        most, counted = max(planned.rows.values()), counted_rows(sizes)
        if most > counted:
            notes.append(f"buffers need {most:,} rows under the plan, but memory is counted for {counted:,}")
    return DryRun(config, hardware, sizes, refusals, tuple(notes), planned)


def find_hardware(config: Train, cluster: str | None) -> Hardware:
    """Find the devices for which to count (`dry_run`).

    Raises:
        ValueError: if there is no cluster of this name.
    """
    if cluster is None and config.lacks_checkpoint:
        cluster = DEFAULT_CLUSTER
    if cluster is not None:
        named = look_up("cluster ", cluster, CLUSTERS)
        platform = "cpu" if cluster == CPU_CLUSTER else "gpu"
        return Hardware(cluster, named, named.memory, platform, here=False)
    device = jax.devices()[0]
    shares = config.num_ranks if device.platform == "cpu" else len(jax.local_devices())
    memory = memory_of_device(device, shares=shares)
    return Hardware("this machine", cluster_of(device), memory, device.platform, here=True)


def find_refusals(config: Train, hardware: Hardware, sizes: RunSizes) -> tuple[str, ...]:
    """Return the reasons for which a run with these settings would not start, as its own checks say them."""
    name, ranks = config.model_name, config.num_ranks
    checks: list[Callable[[], object]] = [
        functools.partial(_check_task, config),
        functools.partial(check_planner, config),
        functools.partial(check_device, name, sizes, ranks=ranks, memory=hardware.memory),
    ]
    if config.writer is not None:
        checks.append(functools.partial(find_writer, config.writer))
    if hardware.here:
        local = ranks if hardware.platform == "cpu" else min(ranks, len(jax.local_devices()))
        checks.append(functools.partial(check_host, name, sizes, ranks=local))
        if hardware.platform != "cpu":
            checks.append(functools.partial(_check_devices, ranks))
    return tuple(_messages(checks))


def _check_task(config: Train) -> None:
    """Find the task, and draw and encode its first prompts if there is a tokenizer."""
    if config.lacks_checkpoint:
        if config.prompts_file is None:
            find_tasks(config.task)
        else:
            read_files(config)
    else:
        tokenizer = find_tokenizer(config)
        Prompts(config, find_run_task(config, tokenizer), tokenizer).draw((config.seeds[0],), config.prompts)


def _check_devices(ranks: int) -> None:
    if ranks > len(jax.devices()):
        raise ValueError(f"{ranks} ranks need {ranks} devices, but there are {len(jax.devices())}")


def _messages(checks: Iterable[Callable[[], object]]) -> Iterable[str]:
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield " ".join(str(error).split())
