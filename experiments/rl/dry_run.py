"""A dry run: what a run would be refused for, what memory it needs, and the modelled time of a step. Nothing runs.

Refusals, the sizes that determine memory, the balancer and its price come from the functions that a run calls. Only
the devices are described in place of real ones, and the routing is that of a trace:

- Samples are those of the trace, stretched so that the longest has as many tokens as the settings allow.
- Of a model with more layers than `PLANNED_LAYERS`, so many are planned, and their time is that of all layers in the
  mean.
- Static placement of striped layers is priced from an estimate of their load, as in the metrics of a run.
- Layers run in the way that the rules give for the hardware. The first batch of a run may choose another by its price.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from experiments.model_memory import check_device, check_host
from experiments.rl.configs import Train
from experiments.rl.devices import copies_of_group
from experiments.rl.prompt_files import read_files
from experiments.rl.prompts import Prompts, find_run_task, find_tokenizer
from experiments.rl.stages import stage_options
from experiments.rl.state import make_balancer, run_price, run_sizes, split_key
from experiments.rl.task_mixtures import find_tasks
from experiments.rl.train import check_planner
from experiments.rl.writers import find_writer
from experiments.step_memory import RunSizes, counted_rows
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.cost.batch_time import BatchTime
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS, Cluster
from relibra_jax.execution.mesh import RANKS
from relibra_jax.models import ModelConfig
from relibra_jax.models.load_checks import memory_of_device
from relibra_jax.nnx.balancer import PlannedStages
from relibra_jax.nnx.derived_cost import DEFAULT_CLUSTER, cluster_of
from relibra_jax.nnx.modelled_times import ModelledTimes, add_stages, model_stage
from relibra_jax.routing.sizes import with_spare_room
from relibra_jax.support.suggestions import look_up
from relibra_jax.traces.bootstrap import bootstrap
from relibra_jax.traces.calibrated import SYNTHETIC, draw_trace
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace, some_layers

PLANNED_LAYERS: Final = 4
"""The largest number of layers that are planned."""
DRAWN_SAMPLES: Final = 256
"""The number of samples of a synthetic trace. Larger batches draw from them with replacement."""
CPU_CLUSTER: Final = "cpu-host"


class Hardware(NamedTuple):
    """The devices for which a dry run counts."""

    name: str
    """The name of the cluster, or ``this machine``."""
    cluster: Cluster
    """The speeds for which plans are priced."""
    memory: int | float
    """The memory of a device, in bytes."""
    platform: str
    """JAX's name of the platform, which determines the exchanges: gpu or cpu."""
    here: bool
    """Whether the devices are those of this machine, so that its host memory counts."""


class Planned(NamedTuple):
    """What the plan of one batch says of a step."""

    trace: Trace
    """The trace whose samples were planned."""
    layers: int
    """The number of layers that were planned."""
    stretch: float
    """The number of tokens for which each token of the trace stands."""
    way: str
    """The path and the exchanges for which plans are priced."""
    rows: dict[str, int]
    """The rows of a rank's buffers in a layer that the plan needs, with spare room, for each kind of stage."""
    phases: dict[str, ModelledTimes]
    """The modelled seconds of a step by phase: under the plan, under static placement and balanced. Empty without a
    price."""
    seconds: float
    """The seconds that planning took here, with its compilation."""


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


def find_trace(model: ModelConfig, name: str | None) -> Trace:
    """Find the trace from which a batch is planned, with at most `PLANNED_LAYERS` layers.

    Args:
        model: the architecture and sizes of the model.
        name: the name or path of a trace. None takes the recorded trace of the package, if it has the model's experts,
            or else draws one. For a number of experts without a calibration it takes that of the nearest number, and of
            two equally near ones the one with the nearest top-k.

    Raises:
        ValueError: if the trace cannot be read, or it has another number of experts or another top-k than the model.
    """
    trace = read_trace("recorded" if name is None else name)
    routing = trace.num_experts, trace.replay.expert_ids.shape[-1]
    layers = min(model.moe_layers, PLANNED_LAYERS)
    if routing == (model.num_experts, model.top_k):
        return some_layers(trace, layers)
    if name is not None:
        raise ValueError(
            f"trace {name}: {routing[0]} experts, top-{routing[1]}, but the model has {model.num_experts} experts,"
            f" top-{model.top_k}"
        )
    size = min(
        SYNTHETIC.values(),
        key=lambda size: (
            abs(math.log2(size.num_experts / model.num_experts)),
            abs(size.top_k - model.top_k),
        ),
    )
    drawn = draw_trace(
        size.calibration,
        samples=DRAWN_SAMPLES,
        num_experts=model.num_experts,
        top_k=model.top_k,
        layers=layers,
    )
    if (size.num_experts, size.top_k) == (model.num_experts, model.top_k):
        return drawn
    note = f"; the calibration is for {size.num_experts} experts, top-{size.top_k}"
    return drawn._replace(note=drawn.note + note)


def plan_batch(config: Train, hardware: Hardware, trace: Trace) -> Planned:
    """Plan one batch of a run from the samples of a trace, and model the time of its step.

    Args:
        config: the settings of the run.
        hardware: the devices.
        trace: the trace, with the layers to plan.
    """
    trace = _with_samples(trace, config.samples)
    longest = int(np.asarray(trace.replay.mask).sum(1).max())
    stretch = (config.prompt_tokens + config.response_tokens) / longest
    layers = trace.replay.expert_ids.shape[2]
    cost = run_price(config, hardware.cluster)
    if isinstance(cost, CostModel):
        cost = dataclasses.replace(cost, scale=stretch, stretch=stretch)
    *_, key = split_key(config.seeds[0])
    balancer = make_balancer(config, described_mesh(config, hardware), cost, key=key, layers=layers)
    planned = balancer.plan_stages(trace.replay, **stage_options(config))
    share = config.model_config.moe_layers / layers
    top_k = config.model_config.top_k
    kinds = planned.parallel.kinds(top_k)
    across = ", replicas on all nodes" if planned.parallel.across_nodes else ""
    return Planned(
        trace=trace,
        layers=layers,
        stretch=stretch,
        way=f"tokens {kinds.path}, {kinds.exchange}{', striped' if kinds.striped else ''}{across}",
        rows=_rows(planned, config, stretch),
        phases={
            name: jax.tree.map(lambda seconds: share * seconds, times)
            for name, times in _phases(planned, config).items()
        },
        seconds=planned.seconds,
    )


def _with_samples(trace: Trace, samples: int) -> Trace:
    """Return a trace of so many samples: the first ones, or more drawn with replacement."""
    if samples > len(trace.replay.mask):
        return bootstrap(trace, samples, seed=0)
    ids, mask = (np.asarray(leaf)[:samples] for leaf in trace.replay)
    return trace._replace(replay=RoutingReplay(ids, mask), domain=trace.domain[:samples])


@dataclasses.dataclass(frozen=True)
class _Described:
    """A device that is not there, as far as planning looks at it."""

    id: int
    platform: str
    process_index: int = 0


def described_mesh(config: Train, hardware: Hardware) -> Mesh:
    """Return the device mesh of a run, with descriptions in the places of devices. Nothing can run on it."""
    copies, topology = copies_of_group(config.data, config.fsdp), config.topology
    shape = (*copies.values(), topology.num_nodes, topology.ranks_per_node)
    devices = [_Described(number, hardware.platform) for number in range(config.num_ranks)]
    places = np.array(devices, dtype=object).reshape(shape)
    return Mesh(places, (*copies, *RANKS), axis_types=(AxisType.Auto,) * len(shape))


def _stages_by_kind(config: Train, planned: PlannedStages) -> dict[str, range]:
    """Return the numbers of the stages of the recompute, which may be those of the updates, and of the updates."""
    first = len(planned.plans) - config.updates
    updates = range(first, len(planned.plans))
    return {"recompute": range(first) if first else updates, "updates": updates}


def _rows(planned: PlannedStages, config: Train, stretch: float) -> dict[str, int]:
    """Count the rows of the busiest rank, which buffers have room for."""
    quotas = [np.asarray(plan.plan.quota) for plan in planned.plans]
    return {
        kind: max(with_spare_room(math.ceil(stretch * quotas[number].sum(-1).max())) for number in numbers)
        for kind, numbers in _stages_by_kind(config, planned).items()
    }


def _phases(planned: PlannedStages, config: Train) -> dict[str, ModelledTimes]:
    """Model the seconds of the planned layers in each phase of a step."""
    if planned.cost is None:
        return {}
    cost, topology, stages = planned.cost, planned.parallel.topology, _stages_by_kind(config, planned)
    home = contiguous_homes(topology, planned.batch.sample_load.shape[1])

    def model(number: int, updates: int) -> ModelledTimes:
        return model_stage(
            *(planned.plans[number], planned.batch, planned.stages[number]),
            *(cost.price(topology, updates=updates, recompute=not updates), topology),
            previous_home=home,
            moves=True,
        )

    updates = [model(number, updates=1) for number in stages["updates"]]
    moves = ModelledTimes(*(_only_moves(time, moves=True) for time in updates[0]))
    phases = {"moves": moves, "updates": _repeated(updates, config.epochs)}
    passes = config.recomputes - config.recomputes_live
    if passes:
        recompute = [model(number, updates=0) for number in stages["recompute"]]
        phases["recompute"] = _repeated(recompute, passes)
    return phases


def _only_moves(time: BatchTime, *, moves: bool) -> BatchTime:
    """Return the time of the moves of experts alone, or the time without it."""
    nothing = jnp.zeros(())
    if moves:
        return BatchTime(*[nothing] * len(time))._replace(reorder=time.reorder)
    return time._replace(reorder=nothing)


def _repeated(stages: Sequence[ModelledTimes], times: int) -> ModelledTimes:
    """Add up the times of stages without the moves of experts, so many times."""
    total = ModelledTimes(*(_only_moves(time, moves=False) for time in add_stages(stages)))
    return jax.tree.map(lambda seconds: times * seconds, total)
