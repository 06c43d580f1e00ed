"""The plan of one batch for a dry run: from the routing of a trace, for devices that are not there.

The balancer and its price come from the functions that a run calls:

- Samples are those of the trace, stretched so that the longest has as many tokens as the settings allow.
- Of a model with more layers than `PLANNED_LAYERS`, only that many are planned, and each layer of the model counts with
  their mean time.
- Static placement of striped layers is priced from an estimate of their load, as in the metrics of a run.
- Layers run in the way that the rules give for the hardware. The first batch of a run may choose another by its price.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from experiments.rl.configs import Train
from experiments.rl.devices import copies_of_group
from experiments.rl.stages import stage_options
from experiments.rl.state import make_balancer, run_price, split_key
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.types import Array, RoutingReplay
from relibra_jax.cost.batch_time import BatchTime
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.group_exchange import group_exchange_time
from relibra_jax.cost.hardware import Cluster
from relibra_jax.execution.mesh import RANKS
from relibra_jax.models import ModelConfig
from relibra_jax.nnx.batch_planner import PlannedStages
from relibra_jax.nnx.modelled_times import ModelledTimes, add_stages, model_stage
from relibra_jax.routing.sizes import with_spare_room
from relibra_jax.traces.bootstrap import bootstrap
from relibra_jax.traces.calibrated import SYNTHETIC, draw_trace
from relibra_jax.traces.read import read_trace
from relibra_jax.traces.trace import Trace, some_layers

PLANNED_LAYERS: Final = 4
"""The largest number of layers that are planned."""
BETWEEN: Final = "experts and dense gradients between copies"
"""The phase of a step in which copies of the group exchange weights and gradients, beside nothing else."""
DRAWN_SAMPLES: Final = 256
"""The number of samples of a synthetic trace. Larger batches draw from them with replacement."""


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
    gather_once_saves: float
    """The modelled seconds of a step that ``gather_once`` would save: 0 without a price, if experts are gathered so, or
    if they are not sharded over copies."""


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

    Raises:
        ValueError: if the samples of the batch have no tokens.
    """
    trace = _with_samples(trace, config.samples)
    longest = int(np.asarray(trace.replay.mask).sum(1).max())
    if not longest:
        raise ValueError(
            f"trace {trace.name} has no tokens in the {config.samples} samples of a batch, so there is no load to"
            " balance"
        )
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
    phases, between = _phases(planned, config), _between_copies(planned, config)
    if between:
        exchange = _only(rest=jnp.asarray(between, jnp.float32))
        phases[BETWEEN] = ModelledTimes(exchange, exchange, exchange)
    between_once = between
    if config.fsdp > 1 and not config.gather_once:
        between_once = _between_copies(planned, dataclasses.replace(config, gather_once=True))
    return Planned(
        trace=trace,
        layers=layers,
        stretch=stretch,
        way=f"tokens {kinds.path}, {kinds.exchange}{', striped' if kinds.striped else ''}{across}",
        rows=_rows(planned, config, stretch),
        phases={name: jax.tree.map(lambda seconds: share * seconds, times) for name, times in phases.items()},
        seconds=planned.seconds,
        gather_once_saves=share * (between - between_once),
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
    moves = ModelledTimes(*(_only(reorder=time.reorder) for time in updates[0]))
    phases = {"moves": moves, "updates": _repeated(updates, config.epochs)}
    passes = config.recomputes - config.recomputes_live
    if passes:
        recompute = [model(number, updates=0) for number in stages["recompute"]]
        phases["recompute"] = _repeated(recompute, passes)
    return phases


def _between_copies(planned: PlannedStages, config: Train) -> float:
    """Model the seconds in which copies of the group exchange experts and dense gradients of the planned layers.

    With ``gather_once``, the residents of a reference are not counted: it pushes its own, which are gathered once more.
    """
    copies = config.data * config.fsdp
    if planned.cost is None or copies == 1:
        return 0.0
    cost = dataclasses.replace(planned.cost, shards=config.fsdp, data_parallel=copies)
    topology, passes = planned.parallel.topology, config.recomputes - config.recomputes_live

    def seconds(micro_batches: int, updates: int) -> float:
        of_pass = dataclasses.replace(cost, updates=updates, recompute=not updates)
        return group_exchange_time(
            of_pass, topology, micro_batches=micro_batches, gather_once=config.gather_once
        )

    total = config.epochs * seconds(config.updates * config.micro_batches, config.updates)
    # Without micro-batches of its own, a recompute runs in the stages of the updates, and gathers in each of them.
    alone = config.recompute_micro_batches
    stages = [config.micro_batches] * config.updates if alone is None else [alone]
    total += passes * sum(seconds(each, 0) for each in stages)
    return planned.batch.sample_load.shape[1] * total


def _only(**parts: Array) -> BatchTime:
    """Return a time of which all other parts are 0."""
    return BatchTime(*[jnp.zeros(())] * len(BatchTime._fields))._replace(**parts)


def _repeated(stages: Sequence[ModelledTimes], times: int) -> ModelledTimes:
    """Add up the times of stages without the moves of experts, so many times."""
    total = ModelledTimes(*(time._replace(reorder=jnp.zeros(())) for time in add_stages(stages)))
    return jax.tree.map(lambda seconds: times * seconds, total)
